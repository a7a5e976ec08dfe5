"""The compiled programs of the sampler: copy weights, fill the cache, and decode new tokens.

Their shapes are few and fixed by the settings, so a run compiles a handful of programs. Layers are
written out and not scanned: XLA's GPU compiler copies what a scan cuts out of stacked weights and
keys, which would triple the memory traffic of a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array

from minirl.model.decoder import Decoder, unstacked
from minirl.model.sampling import likeliest, sample
from minirl.sample.attention import CacheRows, attend_to_cache, copied
from minirl.sample.cache import CacheShape, KeyValues, cache_shapes
from minirl.sample.slots import SlotState, no_tokens

# Longest run of the decode loop.
MAX_STEPS = 32
# One product for the gate and up matrices, whatever their size; XLA's limit is below those of 7B.
_GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 1024}


@jax.jit
def prepare(model: Decoder) -> Decoder:
    """Take the layers apart, and cast matrices, adapters too, to the type of the computation.

    So the learner casts them in every product: both compute with the same numbers.
    """
    # Norm scales (one axis) enter in full precision, in the learner too.
    model = unstacked(model)
    return jax.tree.map(lambda leaf: leaf if leaf.ndim < 2 else leaf.astype(model.dtype), model)


@partial(jax.jit, donate_argnames="written")
def fill(
    model: Decoder,
    written: list[KeyValues],
    prompts: list[KeyValues] | None,
    tokens_BT: Array,
    rows: CacheRows,
) -> list[KeyValues]:
    """Add known tokens, padded on the right, to prompts, or to slots beside their prompts; return
    these.

    The model is from `prepare`; `prompts` is None where prompts are written.
    """
    start_B = rows.prompt_tokens_N + rows.start_B
    position_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
    attend = attend_to_cache(rows, mesh=model.mesh)
    caches = list(zip(written, prompts or [None] * len(written), strict=True))
    return model(tokens_BT, position_BT, attend, caches)[1]


@partial(jax.jit, static_argnames="mesh", donate_argnames="prompts")
def copy(
    prompts: list[KeyValues], source_B: Array, row_B: Array, *, mesh: Mesh | None
) -> list[KeyValues]:
    """Copy rows of prompts over others: one in every part, over itself where there is none."""
    return [copied(layer, source_B, row_B, mesh=mesh) for layer in prompts]


@partial(
    jax.jit,
    static_argnames=("any_top_p", "top_logprobs"),
    donate_argnames="keys",
    compiler_options=_GPU_OPTIONS,
)
def decode(
    model: Decoder,
    keys: list[KeyValues],
    prompts: list[KeyValues],
    slots: SlotState,
    key: Array,
    steps: Array,
    *,
    any_top_p: bool,
    top_logprobs: int = 0,
) -> tuple[list[KeyValues], *tuple[Array, ...]]:
    """Draw `steps` tokens, at most `MAX_STEPS`, for every slot of `slots`.

    What a slot draws after its reply has ended is dropped by the host: no device asks another
    whether it has ended.

    Args:
        model: From `prepare`.
        keys: Keys and values of the slots.
        prompts: Those of the prompts.
        slots: What is asked for.
        key: Of the sampler's seed.
        steps: How many tokens.
        any_top_p: Whether any token is drawn from a nucleus.
        top_logprobs: K, of how many of the likeliest tokens log-probabilities are wanted.

    Returns:
        `keys`; by step, WS, the tokens, their log-probabilities and the shares that were cut off
        (`sampling.sample`); with K, WSK, the likeliest tokens and their log-probabilities.
    """
    mesh, count = model.mesh, len(slots.token_S)
    K = min(top_logprobs, model.config.vocab_size)
    episode_keys_S = jax.vmap(partial(jax.random.fold_in, key))(slots.episode_S)

    def body(step: Array, carry: Any) -> Any:
        keys, tokens_S, *drawn = carry
        rows = slots.rows._replace(start_B=slots.rows.start_B + step)
        positions_S = slots.prompt_tokens_S + rows.start_B
        attend = attend_to_cache(rows, mesh=mesh)
        hidden_BTD, keys = model(
            tokens_S[:, None], positions_S[:, None], attend, list(zip(keys, prompts, strict=True))
        )
        logits_SV = model.logits(hidden_BTD[:, 0])
        tokens_S, *numbers = sample(
            logits_SV,
            jax.vmap(jax.random.fold_in)(episode_keys_S, positions_S),
            slots.temperature_S,
            slots.top_p_S,
            any_top_p=any_top_p,
        )
        if K:
            numbers += likeliest(logits_SV, slots.temperature_S, count=K)
        pairs = zip(drawn, (tokens_S, *numbers), strict=True)
        return keys, tokens_S, *(array_WS.at[step].set(array_S) for array_WS, array_S in pairs)

    drawn = [jnp.zeros((MAX_STEPS, count), dtype) for dtype in (jnp.int32, *[jnp.float32] * 2)]
    if K:
        drawn += [jnp.zeros((MAX_STEPS, count, K), dtype) for dtype in (jnp.int32, jnp.float32)]
    keys, _, *drawn = jax.lax.fori_loop(0, steps, body, (keys, slots.token_S, *drawn))
    return keys, *drawn


def compilations() -> int:
    """Count the programs that this process has compiled for samplers."""
    jitted: list[Any] = [copy, fill, decode]
    return sum(program._cache_size() for program in jitted)


def lowered_programs(model: Decoder, shape: CacheShape) -> dict[str, Lowered]:
    """Lower what a sampler makes of weights, its largest fill, and its largest decode loop.

    `compile()` of each tells its memory and time; nothing is allocated. The model's parameters are
    `jax.ShapeDtypeStruct` with their places on its mesh.
    """
    prepared = prepare.lower(model)
    weights = jax.tree.map(
        lambda info, sharding: jax.ShapeDtypeStruct(
            info.shape, info.dtype, sharding=None if model.mesh is None else sharding
        ),
        prepared.out_info,
        prepared.compile().output_shardings,
    )
    prompts, keys = cache_shapes(shape, model.config, dtype=model.dtype, mesh=model.mesh)
    return {
        "prepare": prepared,
        "fill": fill.lower(weights, prompts, None, *no_tokens(shape, size=shape.pieces[-1])),
        "decode": decode.lower(
            weights,
            keys,
            prompts,
            SlotState.idle(shape, rows=shape.slots),
            jax.eval_shape(lambda: jax.random.key(0)),
            np.int32(MAX_STEPS),
            any_top_p=False,
        ),
    }
