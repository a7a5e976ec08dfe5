"""The compiled programs of the sampler: fill prompts, fill slots, decode.

Lengths are rounded up to a few sizes, so that a handful of programs serves a whole run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from minirl.config import SamplerConfig
from minirl.kv_cache import KeyValues, decode_slots, fill_prompts, fill_slots, first_columns
from minirl.model import Decoder
from minirl.sampling import sample

# Longest run of the decode loop; what lies between two runs costs about a millisecond.
MAX_STEPS = 32
# Longest piece of an observation computed at once: bounds the memory of its attention scores.
_PIECE = 512
# Rows of one fill: four at a time, and what is left one by one.
_FILL_ROWS = (4, 1)
# A shorter look-back than this is not worth cutting out of the store.
_SHORTEST_LOOK = 256


class Draws(NamedTuple):
    """What the decode loop needs to know of every slot; NumPy on the host, a pytree inside.

    Attributes:
        prompt_S: Row of the slot's prompt.
        cell_S: The slot's place in the flattened table of prompts and places.
        column_S: Column of the slot's store where its next token goes.
        token_S: That token.
        left_S: How many tokens its reply may still take.
        is_active_S: True where a reply is being sampled.
        episode_S: Number of the episode.
        temperature_S: 0 for greedy.
        top_p_S: 1 for the whole distribution.
    """

    prompt_S: Any
    cell_S: Any
    column_S: Any
    token_S: Any
    left_S: Any
    is_active_S: Any
    episode_S: Any
    temperature_S: Any
    top_p_S: Any

    @classmethod
    def idle(cls, slots: int) -> Draws:
        """Describe slots without episodes."""
        integers = [np.zeros(slots, np.int32) for _ in range(5)]
        ones = [np.ones(slots, np.float32) for _ in range(2)]
        return cls(*integers, np.zeros(slots, bool), np.zeros(slots, np.int32), *ones)


class DecodeSizes(NamedTuple):
    """What a decode program is compiled for."""

    prompt_length: int
    length: int
    any_greedy: bool
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to rows of a store, padded on the right; `end` is past the last column."""

    rows_B: np.ndarray
    tokens_BT: np.ndarray
    start_B: np.ndarray
    count_B: np.ndarray

    @property
    def end(self) -> int:
        """Return the first column that no row fills."""
        return int((self.start_B + self.count_B).max())


class Sizes:
    """The sizes that lengths are rounded up to."""

    def __init__(self, config: SamplerConfig) -> None:
        self.prompt = _ladder(config.max_prompt_tokens, parts=(4, 2, 1))
        self.own = _ladder(config.max_response_tokens, parts=(8, 4, 2, 1))
        longest = max(self.prompt[-1], self.own[-1])
        self._pieces = [size for size in (32, 128) if 2 * size <= longest] + [min(_PIECE, longest)]

    def decode(self, draws: Draws, *, longest_prompt: int, max_steps: int) -> Any:
        """Return the sizes for a run of the decode loop, and how many steps they hold."""
        active = draws.is_active_S
        longest = int(draws.column_S[active].max())
        sizes = DecodeSizes(
            prompt_length=round_up(longest_prompt, self.prompt),
            length=round_up(longest + 1, self.own),
            any_greedy=bool((draws.temperature_S[active] == 0).any()),
            any_top_p=bool((draws.top_p_S[active] < 1).any()),
        )
        return sizes, min(max_steps, MAX_STEPS, sizes.length - longest)

    def chunks(self, jobs: Sequence[tuple[int, int, Sequence[int]]]) -> Iterator[Chunk]:
        """Cut (row, start, ids) into pieces of few shapes, rows side by side."""
        size = self._pieces[-1]
        waiting = [job for job in jobs if job[2]]
        while waiting:
            pieces = [(row, start, ids[:size]) for row, start, ids in waiting]
            while pieces:
                width = next(width for width in _FILL_ROWS if len(pieces) >= width)
                yield self._chunk(pieces[:width])
                pieces = pieces[width:]
            waiting = [
                (row, start + size, ids[size:]) for row, start, ids in waiting if len(ids) > size
            ]

    def _chunk(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> Chunk:
        rows, starts, parts = zip(*pieces, strict=True)
        counts = [len(ids) for ids in parts]
        tokens_BT = np.zeros((len(pieces), round_up(max(counts), self._pieces)), np.int32)
        for b, ids in enumerate(parts):
            tokens_BT[b, : len(ids)] = ids
        integers = [np.array(values, np.int32) for values in (rows, starts, counts)]
        return Chunk(integers[0], tokens_BT, *integers[1:])


def round_up(value: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the sizes that holds the value."""
    return next(size for size in sizes if size >= value)


def _ladder(longest: int, *, parts: tuple[int, ...]) -> tuple[int, ...]:
    rounded = [-(-longest // (16 * part)) * 16 for part in parts]
    return tuple(sorted({size for size in rounded if size >= min(_SHORTEST_LOOK, rounded[-1])}))


@functools.cache
def programs(graphdef: Any, treedef: Any, stop_ids: tuple[int, ...]) -> Programs:
    """Return the programs for a model; samplers of one model share what is compiled."""
    return Programs(graphdef, treedef, stop_ids)


class Programs:
    """Jitted functions over the weights' arrays; each gives the stores that it was given back."""

    def __init__(self, graphdef: Any, treedef: Any, stop_ids: tuple[int, ...]) -> None:
        self._graphdef, self._treedef = graphdef, treedef
        self._stop_ids = np.array(stop_ids, np.int32)
        self.fill_prompts = jax.jit(self._fill_prompts, static_argnums=0, donate_argnums=2)
        self.fill_slots = jax.jit(self._fill_slots, static_argnums=0, donate_argnums=3)
        self.decode = jax.jit(self._decode, static_argnums=0, donate_argnums=3)

    def count(self) -> int:
        """Count the programs compiled so far."""
        jitted: list[Any] = [self.fill_prompts, self.fill_slots, self.decode]
        return sum(program._cache_size() for program in jitted)

    def _model(self, weights: Sequence[Array]) -> Decoder:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, weights))

    def _fill_prompts(
        self, length: int, weights: Any, prompts: list[KeyValues], chunk: tuple[Array, ...]
    ) -> list[KeyValues]:
        """Append a chunk's arrays to prompts, looking back at no more than `length` columns."""
        rows_B, tokens_BT, start_B, count_B = chunk
        positions_BT, columns_BT = _columns(tokens_BT, start_B, count_B, store=prompts)
        attend = fill_prompts(rows_B, columns_BT, length=length)
        return self._model(weights)(tokens_BT, positions_BT, attend, prompts)[1]

    def _fill_slots(
        self,
        lengths: tuple[int, int],
        weights: Any,
        prompts: list[KeyValues],
        own: list[KeyValues],
        chunk: tuple[Array, ...],
        prompt_B: Array,
        prompt_lengths_B: Array,
    ) -> list[KeyValues]:
        """Append a chunk's arrays to slots, looking back at so many columns of prompts and own."""
        rows_B, tokens_BT, start_B, count_B = chunk
        offsets_BT, columns_BT = _columns(tokens_BT, start_B, count_B, store=own)
        attend = fill_slots(
            rows_B,
            columns_BT,
            prompt_B,
            prompt_lengths_B,
            prompt_length=lengths[0],
            length=lengths[1],
        )
        positions_BT = prompt_lengths_B[:, None] + offsets_BT
        caches = list(zip(prompts, own, strict=True))
        _, caches = self._model(weights)(tokens_BT, positions_BT, attend, caches)
        return [kept for _, kept in caches]

    def _decode(
        self,
        sizes: DecodeSizes,
        weights: Any,
        prompts: list[KeyValues],
        own: list[KeyValues],
        draws: Draws,
        slot_NG: Array,
        prompt_lengths_N: Array,
        key: Array,
        max_steps: Array,
    ) -> tuple[list[KeyValues], Array, Array, Array]:
        """Draw tokens for the active slots until a reply ends.

        Returns:
            The slots' store; the tokens and their log-probabilities by step, WS; the steps taken.
        """
        model = self._model(weights)
        # Cut here and not in the loop, where each step would copy.
        prompts = [first_columns(kept, sizes.prompt_length) for kept in prompts]
        episode_keys_S = jax.vmap(partial(jax.random.fold_in, key))(draws.episode_S)
        prompt_lengths_S = prompt_lengths_N[draws.prompt_S]

        def goes_on(carry: Any) -> Array:
            step, tokens_S, *_ = carry
            is_stop_S = (tokens_S[:, None] == self._stop_ids[None]).any(axis=-1)
            is_ended_S = draws.is_active_S & (is_stop_S | (step >= draws.left_S))
            return (step < max_steps) & ((step == 0) | ~is_ended_S.any())

        def body(carry: Any) -> Any:
            step, tokens_S, own, ids_WS, logprobs_WS = carry
            # An idle slot writes again and again where its next token will go: no harm.
            columns_S = draws.column_S + jnp.where(draws.is_active_S, step, 0)
            positions_S = prompt_lengths_S + columns_S
            attend = decode_slots(
                columns_S, slot_NG, draws.cell_S, prompt_lengths_N, length=sizes.length
            )
            caches = list(zip(prompts, own, strict=True))
            hidden_BTD, caches = model(tokens_S[:, None], positions_S[:, None], attend, caches)
            drawn_S, logprobs_S = sample(
                model.logits(hidden_BTD[:, 0]),
                jax.vmap(jax.random.fold_in)(episode_keys_S, positions_S),
                draws.temperature_S,
                draws.top_p_S,
                any_greedy=sizes.any_greedy,
                any_top_p=sizes.any_top_p,
            )
            tokens_S = jnp.where(draws.is_active_S, drawn_S, tokens_S)
            ids_WS = ids_WS.at[step].set(tokens_S)
            logprobs_WS = logprobs_WS.at[step].set(logprobs_S)
            return step + 1, tokens_S, [kept for _, kept in caches], ids_WS, logprobs_WS

        shape = (MAX_STEPS, len(draws.token_S))
        start = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        step, _, own, ids_WS, logprobs_WS = jax.lax.while_loop(
            goes_on, body, (jnp.int32(0), draws.token_S, own, *start)
        )
        return own, ids_WS, logprobs_WS, step


def _columns(
    tokens_BT: Array, start_B: Array, count_B: Array, *, store: Sequence[KeyValues]
) -> tuple[Array, Array]:
    """Return the columns of a chunk's tokens, and the same with padding past the store's end."""
    offsets_BT = jnp.arange(tokens_BT.shape[1])[None, :]
    columns_BT = start_B[:, None] + offsets_BT
    past_the_end = store[0].v.shape[2]
    return columns_BT, jnp.where(offsets_BT < count_B[:, None], columns_BT, past_the_end)
