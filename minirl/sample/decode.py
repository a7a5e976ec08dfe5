"""The compiled programs of the sampler: copy weights, fill the cache, and decode new tokens.

Their shapes are few and fixed by the settings, so a run compiles a handful of programs. Layers are
written out and not scanned: XLA's GPU compiler copies what a scan cuts out of stacked weights and
keys, which would triple the memory traffic of a step.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.stages import Lowered
from jaxtyping import Array, Float, Int

from minirl.model.decoder import Decoder, Layer, layers_of, with_layers
from minirl.model.linear_attention import State
from minirl.model.sharding import with_shardings
from minirl.sample.attention import (
    CacheRows,
    attend_to_cache,
    closed,
    copied,
    opened,
    recur_from_cache,
)
from minirl.sample.cache import CacheShape, cache_shapes
from minirl.sample.slots import SlotState, no_tokens

# Longest run of the decode loop.
MAX_STEPS = 32
# One product for the gate and up matrices, whatever their size; XLA's limit is below those of 7B.
_GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 1024}


def prepare(model: Decoder) -> Decoder:
    """Take the layers apart, and cast matrices, adapters too, to the type of the computation.

    So the learner casts them in every product: both compute with the same numbers. A step of
    sampling reads every weight once; a layer cut out of the stack would be read and written once
    more.
    """
    # One small program for all layers: the slices of one program are some hundred loops to compile.
    periods = [_period(model.layers, i, model.dtype) for i in range(model.config.full_layers)]
    rest = with_layers(model, [])
    return with_layers(_cast(rest, model.dtype), [layer for layers in periods for layer in layers])


@partial(jax.jit, static_argnames="dtype")
def _period(stack: Any, index: Array | int, dtype: Any) -> list[Layer]:
    cut = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
    return [_cast(layer, dtype) for layer in layers_of(jax.tree.map(cut, stack))]


def _cast(weights: Any, dtype: Any) -> Any:
    # Norm scales (one axis) enter in full precision, in the learner too.
    return jax.tree.map(lambda leaf: leaf if leaf.ndim < 2 else leaf.astype(dtype), weights)


@partial(jax.jit, donate_argnames="written")
def fill(
    model: Decoder,
    written: list[Any],
    prompts: list[Any] | None,
    tokens_BT: Array,
    rows: CacheRows,
) -> list[Any]:
    """Add known tokens, padded on the right, to prompts, or to slots beside their prompts; return
    these.

    The model is from `prepare`; `prompts` is None where prompts are written.
    """
    start_B = rows.prompt_tokens_N + rows.start_B
    position_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
    running = opened(written, prompts, rows, mesh=model.mesh)
    new = _run(model, tokens_BT, position_BT, running, prompts, rows)[1]
    return closed(written, new, rows, mesh=model.mesh)


def _run(
    model: Decoder,
    tokens_BT: Array,
    position_BT: Array,
    running: list[Any],
    prompts: list[Any] | None,
    rows: CacheRows,
) -> tuple[Array, list[Any]]:
    """Return hidden states, and what is written to: keys and values, and `opened` states."""
    attend = attend_to_cache(rows, mesh=model.mesh)
    recur = recur_from_cache(rows, mesh=model.mesh)
    caches = [
        layer if isinstance(layer, State) else (layer, of_prompts)
        for layer, of_prompts in zip(running, prompts or [None] * len(running), strict=True)
    ]
    return model(tokens_BT, position_BT, attend, caches, recur=recur)


@partial(jax.jit, donate_argnames="prompts")
def copy(model: Decoder, prompts: list[Any], source_B: Array, row_B: Array) -> list[Any]:
    """Copy rows of prompts over others: one in every part, over itself where there is none."""
    heads = model.config.num_key_value_heads
    return [copied(layer, source_B, row_B, heads=heads, mesh=model.mesh) for layer in prompts]


@partial(
    jax.jit,
    static_argnames=("any_top_p", "stop_ids"),
    donate_argnames="keys",
    compiler_options=_GPU_OPTIONS,
)
def decode(
    model: Decoder,
    keys: list[Any],
    prompts: list[Any],
    slots: SlotState,
    key: Array,
    steps: Array,
    *,
    any_top_p: bool,
    stop_ids: tuple[int, ...] = (),
) -> tuple[list[Any], *tuple[Array, ...]]:
    """Draw `steps` tokens, at most `MAX_STEPS`, for every slot of `slots`.

    What a slot draws after its reply has ended is dropped by the host: devices do not synchronise
    on replies that have ended. A later turn overwrites its keys; a state could not be restored, so
    it stays as it is from the end on.

    Args:
        model: From `prepare`.
        keys: Keys and values of the slots, and states.
        prompts: Those of the prompts.
        slots: What is asked for.
        key: Of the sampler's seed.
        steps: How many tokens.
        any_top_p: Whether any token is drawn from a nucleus.
        stop_ids: What a reply ends with, where there are states.

    Returns:
        `keys`; by step, WS, the tokens and their log-probabilities (`sample`).
    """
    mesh, count, first = model.mesh, len(slots.token_S), slots.rows
    episode_keys_S = jax.vmap(partial(jax.random.fold_in, key))(slots.episode_S)

    def body(step: Array, carry: Any) -> Any:
        keys, count_B, tokens_S, *drawn = carry
        rows = first._replace(start_B=first.start_B + step, count_B=count_B)
        positions_S = slots.prompt_tokens_S + rows.start_B
        hidden_BTD, keys = _run(model, tokens_S[:, None], positions_S[:, None], keys, prompts, rows)
        tokens_S, logp_S = sample(
            model.logits(hidden_BTD[:, 0]),
            jax.vmap(jax.random.fold_in)(episode_keys_S, positions_S),
            slots.temperature_S,
            slots.top_p_S,
            any_top_p=any_top_p,
        )
        if model.config.hybrid:
            is_end_S = (step + 1 >= slots.left_S) | jnp.isin(tokens_S, jnp.array(stop_ids, int))
            count_B = jnp.where(is_end_S, 0, count_B)
        pairs = zip(drawn, (tokens_S, logp_S), strict=True)
        drawn = (array_WS.at[step].set(array_S) for array_WS, array_S in pairs)
        return keys, count_B, tokens_S, *drawn

    drawn = [jnp.zeros((MAX_STEPS, count), dtype) for dtype in (jnp.int32, jnp.float32)]
    running = opened(keys, prompts, first, mesh=mesh)
    carry = (running, first.count_B, slots.token_S, *drawn)
    running, _, _, *drawn = jax.lax.fori_loop(0, steps, body, carry)
    return closed(keys, running, first, mesh=mesh), *drawn


def compilations() -> int:
    """Count the programs that this process has compiled for samplers."""
    jitted: list[Any] = [copy, fill, decode]
    return sum(program._cache_size() for program in jitted)


def lowered_programs(model: Decoder, shape: CacheShape) -> dict[str, Lowered]:
    """Lower a sampler's largest fill and its largest decode loop.

    `compile()` of each tells its memory and time; nothing is allocated. The model's parameters are
    `jax.ShapeDtypeStruct` with their places on its mesh.
    """
    graph, weights = nnx.split(jax.eval_shape(prepare, model))
    model = nnx.merge(graph, with_shardings(weights, model.mesh))
    prompts, keys = cache_shapes(shape, model.config, dtype=model.dtype, mesh=model.mesh)
    return {
        "fill": fill.lower(model, prompts, None, *no_tokens(shape, size=shape.pieces[-1])),
        "decode": decode.lower(
            model,
            keys,
            prompts,
            SlotState.idle(shape, rows=shape.slots),
            jax.eval_shape(lambda: jax.random.key(0)),
            np.int32(MAX_STEPS),
            any_top_p=False,
        ),
    }


def sample(
    logits_SV: Float[Array, "S V"],
    keys_S: Array,
    temperature_S: Float[Array, "S"],
    top_p_S: Float[Array, "S"],
    *,
    any_top_p: bool,
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits_SV: Unscaled, fp32.
        keys_S: A random key a row; one key always draws the same token from the same logits.
        temperature_S: Divides the logits; 0 takes the most likely token, or one of several.
        top_p_S: Draw only from the most likely tokens that together reach this probability.
        any_top_p: False promises that every top_p is 1.

    Returns:
        The tokens, and the natural-log probability of each under the whole softmax(logits /
        temperature), at temperature 1 where it is 0.
    """
    safe_S = jnp.where(temperature_S > 0, temperature_S, 1.0)
    scaled_SV = logits_SV / safe_S[:, None]
    peak_S = scaled_SV.max(axis=-1)
    weights_SV = jnp.exp(scaled_SV - peak_S[:, None])
    total_S = weights_SV.sum(axis=-1)
    drawable_SV = weights_SV
    if any_top_p:
        drawable_SV = jnp.where(_in_nucleus(weights_SV, top_p_S), weights_SV, 0.0)
    is_peak_SV = (scaled_SV == peak_S[:, None]).astype(weights_SV.dtype)
    ids_S = _draw(jnp.where(temperature_S[:, None] > 0, drawable_SV, is_peak_SV), keys_S)
    chosen_S = jnp.take_along_axis(scaled_SV, ids_S[:, None], axis=-1)[:, 0]
    return ids_S, chosen_S - peak_S - jnp.log(total_S)


def _in_nucleus(weights: Float[Array, "... V"], top_p: Float[Array, "..."]) -> Array:
    """Tell the smallest set of likeliest tokens that reaches top_p (arXiv:1904.09751); ties too.

    Weights are in proportion to probabilities.
    """
    descending = -jnp.sort(-weights, axis=-1)
    before = jnp.cumsum(descending, axis=-1) - descending
    enough = top_p * weights.sum(axis=-1)
    is_kept = before < enough[..., None]
    least = jnp.where(is_kept, descending, jnp.inf).min(axis=-1)
    # At top_p = 1, rounding could cut a token of the tail off.
    return (weights >= least[..., None]) | (top_p >= 1.0)[..., None]


def _draw(weights_SV: Array, keys_S: Array) -> Array:
    """Draw an index in proportion to the weights: first a block of the vocabulary, then inside it.

    Two uniform numbers a row take the place of one Gumbel number a token, and with two of them a
    token rarer than the 2**-23 of one fp32 number still has its exact share.
    """
    S, V = weights_SV.shape
    width = math.isqrt(V)
    blocks = -(-V // width)
    weights = jnp.pad(weights_SV, ((0, 0), (0, blocks * width - V))).reshape(S, blocks, width)
    uniform_S2 = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys_S)
    block_S = _invert(weights.sum(axis=-1), uniform_S2[:, 0])
    inside = jnp.take_along_axis(weights, block_S[:, None, None], axis=1)[:, 0]
    return block_S * width + _invert(inside, uniform_S2[:, 1])


def _invert(weights_SX: Array, uniform_S: Array) -> Array:
    """Return the first index whose cumulative weight exceeds the uniform share of the total."""
    cumulative_SX = jnp.cumsum(weights_SX, axis=-1)
    total_S1 = cumulative_SX[:, -1:]
    first_S = (cumulative_SX <= uniform_S[:, None] * total_S1).sum(axis=-1)
    # Rounding may put the share at the total itself; the last index of positive weight is the end.
    last_S = (cumulative_SX < total_S1).sum(axis=-1)
    return jnp.minimum(first_S, last_S)
