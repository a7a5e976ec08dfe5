"""The compiled programs of the sampler: compute observations, write them to pages, decode.

Lengths are rounded up to a few sizes, so that a handful of programs serves a whole run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder, unstacked
from minirl.model.lora import merged
from minirl.model.sampling import sample
from minirl.model.sharding import row_parts
from minirl.sample.cache import (
    ROWS,
    KeyValues,
    Owners,
    Recent,
    Where,
    decode_slots,
    fill_rows,
    on_parts,
    owned,
    segment_shapes,
    write,
)
from minirl.sample.pages import Pool, Pools

# A pool on the devices: its segments, each a list of layers.
Segments = Sequence[Sequence[KeyValues]]

# Longest run of the decode loop; what lies between two runs costs about a millisecond.
MAX_STEPS = 32
# Longest piece of an observation computed at once: bounds the memory of its attention scores.
_PIECES = (32, 128, 512)
# Rows of one fill in each part: four at a time, and what is left one by one.
_FILL_ROWS = (4, 1)


class Draws(NamedTuple):
    """What the decode loop needs to know of every slot; NumPy on the host, a pytree inside.

    Attributes:
        prompt_tokens_S: Tokens of the slot's prompt in its pages.
        own_tokens_S: Tokens after it in pages of the slot's own.
        pages_SM: The own pages from the one on where the next token goes; -1 where there is none.
        token_S: That token.
        left_S: How many tokens its reply may still take.
        is_active_S: True where a reply is being sampled.
        episode_S: Number of the episode.
        temperature_S: 0 for greedy.
        top_p_S: 1 for the whole distribution.
    """

    prompt_tokens_S: Any
    own_tokens_S: Any
    pages_SM: Any
    token_S: Any
    left_S: Any
    is_active_S: Any
    episode_S: Any
    temperature_S: Any
    top_p_S: Any

    @classmethod
    def idle(cls, pools: Pools) -> Draws:
        """Describe slots without episodes."""
        slots = pools.parts * pools.slots
        prompt, own, token, left, episode = (np.zeros(slots, np.int32) for _ in range(5))
        pages_SM = np.full((slots, MAX_STEPS // pools.own.page_tokens + 2), -1, np.int32)
        temperature, top_p = (np.ones(slots, np.float32) for _ in range(2))
        idle = np.zeros(slots, bool)
        return cls(prompt, own, pages_SM, token, left, idle, episode, temperature, top_p)


class DecodeSizes(NamedTuple):
    """What a decode program is compiled for, besides the shapes of its arrays."""

    own_segments: int
    any_greedy: bool
    any_top_p: bool
    over_nucleus: bool


class Chunk(NamedTuple):
    """New tokens of rows, some rows in every part, padded on the right.

    Attributes:
        tokens_BT: The tokens.
        pages_BT: The page that each goes to; -1 for padding.
        columns_BT: Its column there.
        prompt: What the row has of its prompt.
        own: What it has of its own.
    """

    tokens_BT: Any
    pages_BT: Any
    columns_BT: Any
    prompt: Where
    own: Where


@dataclass(frozen=True, slots=True)
class Job:
    """Tokens to append to what a row has in pages.

    Attributes:
        part: The part of the mesh.
        ids: The tokens.
        start: How many tokens are there already of the pool that is written.
        prompt_pages: Pages of the row's prompt.
        prompt_tokens: Length of the prompt; None while that is what is written.
        own_pages: Pages of the row's own.
    """

    part: int
    ids: Sequence[int]
    start: int
    prompt_pages: Sequence[int]
    prompt_tokens: int | None = None
    own_pages: Sequence[int] = ()


def chunks(jobs: Sequence[Job], pools: Pools) -> Iterator[Chunk]:
    """Cut jobs into pieces of few shapes, rows side by side; earlier pieces of a row come first."""
    sizes = _pieces(pools)
    waiting = list(jobs)
    while waiting:
        by_part = [[job for job in waiting if job.part == part] for part in range(pools.parts)]
        most = max(len(part) for part in by_part)
        width = next(width for width in _FILL_ROWS if most >= width)
        rows: list[Job | None] = []
        for part in by_part:
            rows += [*part[:width], *[None] * (width - len(part[:width]))]
        size = round_up(min(sizes[-1], max(len(job.ids) for job in rows if job)), sizes)
        yield _chunk(rows, size, pools)
        rests = [
            dataclasses.replace(job, ids=job.ids[size:], start=job.start + size)
            for job in rows
            if job and len(job.ids) > size
        ]
        waiting = rests + [job for part in by_part for job in part[width:]]


def _pieces(pools: Pools) -> tuple[int, ...]:
    longest = max(pool.longest * pool.page_tokens for pool in (pools.prompts, pools.own))
    return (*[size for size in _PIECES if 2 * size <= longest], min(_PIECES[-1], longest))


def round_up(value: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the sizes that holds the value."""
    return next(size for size in sizes if size >= value)


def _empty_chunk(rows: int, size: int, pools: Pools) -> Chunk:
    tokens_BT, columns_BT = (np.zeros((rows, size), np.int32) for _ in range(2))
    places = [
        Where(np.zeros((rows, pool.longest), np.int32), np.zeros(rows, np.int32))
        for pool in (pools.prompts, pools.own)
    ]
    return Chunk(tokens_BT, np.full((rows, size), -1, np.int32), columns_BT, *places)


def _chunk(rows: Sequence[Job | None], size: int, pools: Pools) -> Chunk:
    chunk = _empty_chunk(len(rows), size, pools)
    for b, job in enumerate(rows):
        if job is None:
            continue
        to_prompt = job.prompt_tokens is None
        pool, pages = (pools.prompts, job.prompt_pages) if to_prompt else (pools.own, job.own_pages)
        ids = job.ids[:size]
        columns = np.arange(job.start, job.start + len(ids))
        chunk.tokens_BT[b, : len(ids)] = ids
        chunk.pages_BT[b, : len(ids)] = np.array(pages)[columns // pool.page_tokens]
        chunk.columns_BT[b, : len(ids)] = columns % pool.page_tokens
        chunk.prompt.pages_BM[b, : len(job.prompt_pages)] = job.prompt_pages
        chunk.prompt.tokens_B[b] = job.start if to_prompt else job.prompt_tokens
        chunk.own.pages_BM[b, : len(job.own_pages)] = job.own_pages
        chunk.own.tokens_B[b] = 0 if to_prompt else job.start
    return chunk


@functools.cache
def programs(graphdef: Any, stop_ids: tuple[int, ...], mesh: Mesh | None) -> Programs:
    """Return the programs for a model; samplers of one model share what is compiled."""
    return Programs(graphdef, stop_ids, mesh)


class Programs:
    """Jitted functions over the arrays that `prepare` makes of the weights; `write` and `decode`
    give back the pool that they take and write to.
    """

    def __init__(self, graphdef: Any, stop_ids: tuple[int, ...], mesh: Mesh | None) -> None:
        self._graphdef, self._mesh = graphdef, mesh
        self._stop_ids = np.array(stop_ids, np.int32)
        self._apart: tuple[Any, Any] | None = None
        self.prepare = jax.jit(self._prepare)
        self.fill = jax.jit(self._fill)
        self.write = jax.jit(self._write, donate_argnums=0)
        self.decode = jax.jit(self._decode, static_argnums=0, donate_argnums=3)

    def count(self) -> int:
        """Count the programs compiled so far."""
        jitted: list[Any] = [self.fill, self.write, self.decode]
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

    def _fill(
        self, weights: Any, prompts: Segments, own: Segments, chunk: Chunk
    ) -> list[tuple[Array, Array]]:
        """Compute every layer's keys and values of a chunk, (BTKE, BTKE).

        They are written by a program of their own: in one that also loops over the pages, the
        compiler would copy the pools.
        """
        model = self._model(weights)
        start_B = chunk.prompt.tokens_B + chunk.own.tokens_B
        positions_BT = start_B[:, None] + jnp.arange(chunk.tokens_BT.shape[1])[None]
        attend = fill_rows(chunk.prompt, chunk.own, mesh=self._mesh)
        caches = [_by_layer(pool, model.config) for pool in (prompts, own)]
        return model(chunk.tokens_BT, positions_BT, attend, list(zip(*caches, strict=True)))[1]

    def _write(self, pool: Segments, new: Any, pages_BT: Array, columns_BT: Array) -> Segments:
        """Put every layer's new keys and values to where they belong."""
        layers = [
            write([segment[at] for segment in pool], pages_BT, columns_BT, k, v, mesh=self._mesh)
            for at, (k, v) in enumerate(new)
        ]
        return [list(segment) for segment in zip(*layers, strict=True)]

    def _decode(
        self,
        sizes: DecodeSizes,
        weights: Any,
        prompts: Segments,
        own: Segments,
        owners: Sequence[Owners],
        draws: Draws,
        key: Array,
        max_steps: Array,
    ) -> tuple[Segments, Array, Array, Array, Array]:
        """Draw tokens for the active slots until a reply ends.

        Args:
            sizes: What the program is compiled for.
            weights: From `prepare`.
            prompts: The segments of prompts to look at.
            own: All segments of the slots' pool; the first `own_segments` are looked at.
            owners: Of the segments looked at, those of prompts first.
            draws: What is asked for.
            key: Of the sampler's seed.
            max_steps: Longest run, at most `MAX_STEPS`.

        Returns:
            The slots' pool; by step, WS, the tokens, their log-probabilities and the shares that
            were cut off (`sampling.sample`); the steps taken.
        """
        model = self._model(weights)
        slots = len(draws.token_S)
        pages = _by_layer([*prompts, *own[: sizes.own_segments]], model.config)
        owned = self._owned(owners, slots)
        episode_keys_S = jax.vmap(partial(jax.random.fold_in, key))(draws.episode_S)
        start_S = draws.prompt_tokens_S + draws.own_tokens_S

        def goes_on(carry: Any) -> Array:
            step, tokens_S, *_ = carry
            is_stop_S = (tokens_S[:, None] == self._stop_ids[None]).any(axis=-1)
            is_ended_S = draws.is_active_S & (is_stop_S | (step >= draws.left_S))
            return (step < max_steps) & ((step == 0) | ~is_ended_S.any())

        def body(carry: Any) -> Any:
            step, tokens_S, recent, *drawn = carry
            # An idle slot draws too; nobody reads it.
            positions_S = start_S + step
            attend = decode_slots(step, owners, owned, mesh=self._mesh)
            caches = list(zip(pages, recent, strict=True))
            hidden_BTD, caches = model(tokens_S[:, None], positions_S[:, None], attend, caches)
            ids_S, *numbers = sample(
                model.logits(hidden_BTD[:, 0]),
                jax.vmap(jax.random.fold_in)(episode_keys_S, positions_S),
                draws.temperature_S,
                draws.top_p_S,
                any_greedy=sizes.any_greedy,
                any_top_p=sizes.any_top_p,
                over_nucleus=sizes.over_nucleus,
            )
            tokens_S = jnp.where(draws.is_active_S, ids_S, tokens_S)
            rows = zip(drawn, (tokens_S, *numbers), strict=True)
            drawn = [all_WS.at[step].set(row_S) for all_WS, row_S in rows]
            return step + 1, tokens_S, [recent for _, recent in caches], *drawn

        start = [jnp.zeros((MAX_STEPS, slots), dtype) for dtype in (jnp.int32, *[jnp.float32] * 2)]
        step, _, recent, ids_WS, logprobs_WS, cut_WS = jax.lax.while_loop(
            goes_on, body, (jnp.int32(0), draws.token_S, _no_recent(model, slots), *start)
        )
        return self._flush(own, recent, draws, step), ids_WS, logprobs_WS, cut_WS, step

    def _owned(self, owners: Sequence[Owners], slots: int) -> list[Array]:
        parts = row_parts(self._mesh)
        tell = on_parts(
            partial(owned, slots=slots // parts), self._mesh, inputs=(ROWS,), outputs=ROWS
        )
        return [tell(whose) for whose in owners]

    def _flush(
        self, own: Segments, recent: Sequence[Recent], draws: Draws, steps: Array
    ) -> Segments:
        """Write the tokens of a run to the slots' pages."""
        length = own[0][0].v.shape[2]
        steps_W = jnp.arange(MAX_STEPS)
        columns_SW = draws.own_tokens_S[:, None] + steps_W[None]
        at_SW = columns_SW // length - draws.own_tokens_S[:, None] // length
        pages_SW = jnp.take_along_axis(draws.pages_SM, at_SW, axis=1)
        is_new_SW = draws.is_active_S[:, None] & (steps_W < steps)[None]
        new = [(kept.k_SKEW.transpose(0, 3, 1, 2), kept.v_SKWE.swapaxes(1, 2)) for kept in recent]
        return self._write(own, new, jnp.where(is_new_SW, pages_SW, -1), columns_SW % length)


def _by_layer(pool: Segments, config: ModelConfig) -> list[list[KeyValues]]:
    return [[segment[at] for segment in pool] for at in range(config.num_hidden_layers)]


def _no_recent(model: Decoder, slots: int) -> list[Recent]:
    config = model.config
    heads, size = config.num_key_value_heads, config.head_dim
    return [
        Recent(
            jnp.zeros((slots, heads, size, MAX_STEPS), model.dtype),
            jnp.zeros((slots, heads, MAX_STEPS, size), model.dtype),
        )
        for _ in range(config.num_hidden_layers)
    ]


def pool_shapes(
    pool: Pool, config: ModelConfig, *, dtype: Any, mesh: Mesh | None
) -> list[list[KeyValues]]:
    """Describe the arrays of a pool on all parts of the mesh."""
    return [
        segment_shapes(
            config, pages=pages * row_parts(mesh), length=pool.page_tokens, dtype=dtype, mesh=mesh
        )
        for pages in pool.segments
    ]


def empty_pool(shapes: Segments) -> list[list[KeyValues]]:
    """Allocate a pool, in zeros."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), list(shapes))


class Call(NamedTuple):
    """A program and the arrays that it is called with, or descriptions of them."""

    program: Any
    arguments: tuple[Any, ...]


def abstract_calls(
    model: tuple[Any, Any, Any],
    pools: Pools,
    *,
    config: ModelConfig,
    dtype: Any,
    mesh: Mesh | None,
) -> dict[str, Call]:
    """Describe what a sampler makes of weights, its largest fill, and its longest decode loop.

    `call.program.lower(*call.arguments).compile()` tells their memory and time; nothing is
    allocated.

    Args:
        model: As `lora.split` takes it apart, its parameters as `jax.ShapeDtypeStruct` with their
            places on a mesh.
        pools: From `plan_pools`.
        config: Shape of the model.
        dtype: In which it computes.
        mesh: Where the weights lie.
    """
    graphdef, *weights = model
    calls = Programs(graphdef, (0,), mesh)
    lowered = calls.prepare.lower(*weights)
    prepared = jax.tree.map(
        lambda info, place: jax.ShapeDtypeStruct(
            info.shape, info.dtype, sharding=None if mesh is None else place
        ),
        lowered.out_info,
        lowered.compile().output_shardings,
    )
    prompts, own = (
        pool_shapes(pool, config, dtype=dtype, mesh=mesh) for pool in (pools.prompts, pools.own)
    )
    owners = [
        Owners(
            np.zeros((pages * pools.parts, places), np.int32),
            np.zeros(pages * pools.parts, np.int32),
        )
        for pool, places in ((pools.prompts, pools.group_size), (pools.own, 1))
        for pages in pool.segments
    ]
    chunk = _empty_chunk(pools.parts * _FILL_ROWS[0], _pieces(pools)[-1], pools)
    sizes = DecodeSizes(len(own), any_greedy=False, any_top_p=False, over_nucleus=False)
    key, steps = jax.eval_shape(lambda: jax.random.key(0)), np.int32(MAX_STEPS)
    decode = (sizes, prepared, prompts, own, owners, Draws.idle(pools), key, steps)
    return {
        "prepare": Call(calls.prepare, tuple(weights)),
        "fill": Call(calls.fill, (prepared, prompts, own, chunk)),
        "decode": Call(calls.decode, decode),
    }
