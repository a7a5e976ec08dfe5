"""The compiled programs of the sampler: fill the cache with known tokens, and decode new ones.

Their shapes are few and fixed by the settings, so a run compiles a handful of programs. Layers are
written out and not scanned: XLA's GPU compiler copies what a scan cuts out of stacked weights and
keys, which would triple the memory traffic of a step.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array

from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder, unstacked
from minirl.model.lora import merged
from minirl.model.sampling import sample
from minirl.model.sharding import row_parts
from minirl.sample.attention import FillRows, Sharing, attend_decode, attend_fill
from minirl.sample.cache import (
    Cache,
    CacheShape,
    cache_shapes,
    first_prompts,
    first_tokens,
    is_on_cpu,
    layers,
    with_first_tokens,
    write,
)

# Longest run of the decode loop.
MAX_STEPS = 32
# Tokens that are computed at once, of a prompt and of a later turn; they bound the scores' memory.
_PROMPT_PIECES = (128, 512)
_TURN_PIECES = (128,)
# One product for the gate and up matrices, whatever their size; XLA's limit is below those of 7B.
_GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 1024}


class SlotState(NamedTuple):
    """What the decode loop needs to know of every slot; NumPy on the host.

    Attributes:
        sharing: Which slots look at which prompt.
        prompt_tokens_S: Length of the slot's prompt in the cache.
        own_tokens_S: Tokens after it in the cache.
        token_S: The token that is fed next.
        is_active_S: True where a reply is being sampled.
        episode_S: Number of the episode, which decides its random stream.
        temperature_S: 0 for greedy.
        top_p_S: 1 for the whole distribution.
    """

    sharing: Sharing
    prompt_tokens_S: Any
    own_tokens_S: Any
    token_S: Any
    is_active_S: Any
    episode_S: Any
    temperature_S: Any
    top_p_S: Any

    @classmethod
    def idle(cls, shape: CacheShape, *, prompts: int) -> SlotState:
        """Describe slots without episodes, beside the first so many prompts of each part."""
        slots, prompts = shape.parts * shape.slots, shape.parts * prompts

        def zeros(*sizes: int) -> np.ndarray:
            return np.zeros(sizes, np.int32)

        return cls(
            Sharing(zeros(prompts, shape.group_size), zeros(slots), zeros(prompts)),
            *(zeros(slots) for _ in range(3)),
            np.zeros(slots, bool),
            zeros(slots),
            *(np.ones(slots, np.float32) for _ in range(2)),
        )


@dataclass(frozen=True, slots=True)
class Prefill:
    """Known tokens to add to the cache.

    Attributes:
        part: The part of the mesh.
        ids: The tokens.
        start: How many tokens the prompt, or else the slot, has in the cache already.
        prompt: The prompt that is written or continued, inside of the part.
        prompt_tokens: Its length, where a slot is written.
        slot: The slot that is written, inside of the part; None for the prompt.
    """

    part: int
    ids: Sequence[int]
    start: int
    prompt: int
    prompt_tokens: int = 0
    slot: int | None = None


def batches(work: Sequence[Prefill], shape: CacheShape) -> Iterator[FillRows]:
    """Cut tokens into pieces of few lengths, one at a time in every part.

    Args:
        work: All of prompts, or all of slots.
        shape: Of the cache.
    """
    queues = [deque(one for one in work if one.part == part) for part in range(shape.parts)]
    while any(queues):
        rows = [queue.popleft() if queue else None for queue in queues]
        sizes = _pieces(shape, of_slots=work[0].slot is not None)
        longest = max(len(row.ids) for row in rows if row)
        size = next((size for size in sizes if size >= longest), sizes[-1])
        yield _fill_rows(rows, size)
        for queue, row in zip(queues, rows, strict=True):
            if row and len(row.ids) > size:
                queue.appendleft(replace(row, ids=row.ids[size:], start=row.start + size))


def _pieces(shape: CacheShape, *, of_slots: bool) -> list[int]:
    if of_slots:
        return sorted({min(size, shape.own_tokens) for size in _TURN_PIECES})
    return sorted({min(size, shape.prompt_tokens) for size in _PROMPT_PIECES})


def _fill_rows(rows: Sequence[Prefill | None], size: int) -> FillRows:
    found = FillRows(
        np.zeros((len(rows), size), np.int32), *(np.zeros(len(rows), np.int32) for _ in range(5))
    )
    for b, row in enumerate(rows):
        if row is None:
            continue
        ids = row.ids[:size]
        found.tokens_BT[b, : len(ids)] = ids
        found.new_B[b], found.prompt_B[b] = len(ids), row.prompt
        found.prompt_tokens_B[b] = row.start if row.slot is None else row.prompt_tokens
        if row.slot is not None:
            found.slot_B[b], found.own_tokens_B[b] = row.slot, row.start
    return found


@functools.cache
def programs(graphdef: Any, shape: CacheShape, mesh: Mesh | None) -> Programs:
    """Return the programs for a model; samplers of one model and size share what is compiled."""
    del shape  # decides the arrays
    return Programs(graphdef, mesh)


class Programs:
    """Jitted functions over the arrays that `prepare` makes of the weights.

    `fill_prompts`, `fill_slots` and `decode` return the part of the cache that they take and write.
    """

    def __init__(self, graphdef: Any, mesh: Mesh | None) -> None:
        self._graphdef, self._mesh = graphdef, mesh
        self._apart: tuple[Any, Any] | None = None
        on_cpu = is_on_cpu(mesh)
        self.prepare = jax.jit(self._prepare)
        self.fill_prompts = jax.jit(self._fill_prompts, donate_argnums=1)
        self.fill_slots = jax.jit(self._fill_slots, donate_argnums=2)
        self.decode = jax.jit(
            self._decode,
            static_argnames=("own_tokens", "any_top_p", "over_nucleus"),
            donate_argnames="own",
            compiler_options=None if on_cpu else _GPU_OPTIONS,
        )

    def count(self) -> int:
        """Count the programs compiled so far."""
        jitted: list[Any] = [self.fill_prompts, self.fill_slots, self.decode]
        return sum(program._cache_size() for program in jitted)

    def _prepare(self, weights: nnx.State, frozen: nnx.State) -> tuple[Array, ...]:
        """Merge adapters, take the layers apart, and cast matrices to the type that the model
        computes in, once and not at every step.
        """
        model = unstacked(merged(nnx.merge(self._graphdef, weights, frozen)))
        graphdef, weights = nnx.split(model)
        leaves, treedef = jax.tree.flatten(weights)
        self._apart = graphdef, treedef
        # Norm scales (one axis) enter in full precision, in the learner too.
        return tuple(leaf if leaf.ndim < 2 else leaf.astype(model.dtype) for leaf in leaves)

    def _model(self, weights: Sequence[Array]) -> Decoder:
        assert self._apart is not None
        graphdef, treedef = self._apart
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))

    def _fill_prompts(self, weights: Any, prompts: Any, rows: FillRows) -> Any:
        """Compute new tokens of prompts."""
        # A prompt of one piece has nothing to look back at.
        has_past = prompts[0].k.shape[-1] > rows.tokens_BT.shape[1]
        caches = [(kept if has_past else None, None) for kept in layers(prompts)]
        new = self._filled(weights, caches, rows)
        return self._written(prompts, new, rows, rows.prompt_B, rows.prompt_tokens_B)

    def _fill_slots(self, weights: Any, prompts: Any, own: Any, rows: FillRows) -> Any:
        """Compute new tokens of slots."""
        caches = list(zip(layers(prompts), layers(own), strict=True))
        new = self._filled(weights, caches, rows)
        return self._written(own, new, rows, rows.slot_B, rows.own_tokens_B)

    def _filled(self, weights: Any, caches: Any, rows: FillRows) -> Any:
        start_B = rows.prompt_tokens_B + rows.own_tokens_B
        positions_BT = start_B[:, None] + jnp.arange(rows.tokens_BT.shape[1])[None]
        model = self._model(weights)
        attend = attend_fill(rows, mesh=self._mesh)
        # All reads come before the cache is written in its place.
        return jax.lax.optimization_barrier(model(rows.tokens_BT, positions_BT, attend, caches))[1]

    def _written(self, stacks: Any, new: Any, rows: FillRows, row_B: Array, start_B: Array) -> Any:
        count_T = jnp.arange(rows.tokens_BT.shape[1])[None]
        length = stacks[0].k.shape[-1]
        column_BT = jnp.where(count_T < rows.new_B[:, None], start_B[:, None] + count_T, length)
        return write(stacks, new, row_B, column_BT, mesh=self._mesh)

    def _decode(
        self,
        weights: Any,
        prompts: Any,
        own: Any,
        slots: SlotState,
        key: Array,
        steps: Array,
        *,
        own_tokens: int,
        any_top_p: bool,
        over_nucleus: bool,
    ) -> tuple[Any, Array, Array, Array]:
        """Draw `steps` tokens, at most `MAX_STEPS`, for every slot.

        What a slot draws after its reply has ended is dropped by the host: no device asks another
        whether it has ended.

        Args:
            weights: From `prepare`.
            prompts: Keys and values of the prompts.
            own: Those of the slots.
            slots: What is asked for.
            key: Of the sampler's seed.
            steps: Length of the run.
            own_tokens: How many positions of each slot are looked at.
            any_top_p: Whether any token is drawn from a nucleus.
            over_nucleus: Whether log-probabilities are those of the nucleus.

        Returns:
            The slots' part of the cache; by step, WS, the tokens, their log-probabilities and the
            shares that were cut off (`sampling.sample`).
        """
        model, mesh = self._model(weights), self._mesh
        count, parts = len(slots.token_S), row_parts(mesh)
        prompts = layers(first_prompts(prompts, len(slots.sharing.row_NG) // parts, mesh))
        episode_keys_S = jax.vmap(partial(jax.random.fold_in, key))(slots.episode_S)
        row_S = jnp.tile(jnp.arange(count // parts), parts)
        # On CPUs a slice of what the loop changes is a copy, and so is what is read before it is
        # written; elsewhere slices are read in place and all layers are written by one kernel.
        on_cpu = is_on_cpu(mesh)

        def body(step: Array, carry: Any) -> Any:
            own, tokens_S, *drawn = carry
            own_tokens_S = slots.own_tokens_S + step
            positions_S = slots.prompt_tokens_S + own_tokens_S
            # Of an idle slot nothing is kept: there is no such column.
            column_S1 = jnp.where(slots.is_active_S, own_tokens_S, own[0].k.shape[-1])[:, None]
            put = partial(write, row_B=row_S, column_BT=column_S1, mesh=mesh)
            attend = attend_decode(
                slots.sharing, own_tokens_S, put=put if on_cpu else None, mesh=mesh
            )
            kept = own if on_cpu else layers(first_tokens(own, own_tokens))
            caches = list(zip(prompts, kept, strict=True))
            hidden_BTD, new = model(tokens_S[:, None], positions_S[:, None], attend, caches)
            tokens_S, *numbers = sample(
                model.logits(hidden_BTD[:, 0]),
                jax.vmap(jax.random.fold_in)(episode_keys_S, positions_S),
                slots.temperature_S,
                slots.top_p_S,
                any_top_p=any_top_p,
                over_nucleus=over_nucleus,
            )
            rows = zip(drawn, (tokens_S, *numbers), strict=True)
            drawn = [all_WS.at[step].set(row_S) for all_WS, row_S in rows]
            return new if on_cpu else put(own, new), tokens_S, *drawn

        looked_at = first_tokens(own, own_tokens) if on_cpu else own
        start = [jnp.zeros((MAX_STEPS, count), dtype) for dtype in (jnp.int32, *[jnp.float32] * 2)]
        carry = (looked_at, slots.token_S, *start)
        looked_at, _, *drawn = jax.lax.fori_loop(0, steps, body, carry)
        if on_cpu:
            looked_at = with_first_tokens(own, own_tokens, looked_at)
        return looked_at, *drawn


def fill_tokens(shape: CacheShape) -> int:
    """Return how many tokens of prompts are computed at once, on all parts together."""
    return shape.parts * _pieces(shape, of_slots=False)[-1]


def lowered_programs(
    model: tuple[Any, Any, Any],
    shape: CacheShape,
    *,
    config: ModelConfig,
    dtype: Any,
    mesh: Mesh | None,
) -> dict[str, Lowered]:
    """Lower what a sampler makes of weights, its largest fill, and its largest decode loop.

    `compile()` of each tells its memory and time; nothing is allocated.

    Args:
        model: As `lora.split` takes it apart, its parameters as `jax.ShapeDtypeStruct` with their
            places on a mesh.
        shape: From `plan_cache`.
        config: Shape of the model.
        dtype: In which it computes.
        mesh: Where the weights lie.
    """
    graphdef, *weights = model
    calls = Programs(graphdef, mesh)
    prepare = calls.prepare.lower(*weights)
    prepared = jax.tree.map(
        lambda info, place: jax.ShapeDtypeStruct(
            info.shape, info.dtype, sharding=None if mesh is None else place
        ),
        prepare.out_info,
        prepare.compile().output_shardings,
    )
    cache: Cache = cache_shapes(shape, config, dtype=dtype, mesh=mesh)
    rows = _fill_rows([None] * shape.parts, fill_tokens(shape) // shape.parts)
    decode = calls.decode.lower(
        prepared,
        *cache,
        SlotState.idle(shape, prompts=shape.prompts),
        jax.eval_shape(lambda: jax.random.key(0)),
        np.int32(MAX_STEPS),
        own_tokens=shape.own_tokens,
        any_top_p=False,
        over_nucleus=False,
    )
    fill = calls.fill_prompts.lower(prepared, cache.prompts, rows)
    return {"prepare": prepare, "fill": fill, "decode": decode}
