"""The compiled programs of the sampler: fill prompts, fill slots, decode.

Lengths are rounded up to a few sizes, so that a handful of programs serves a whole run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minirl.config import SamplerConfig
from minirl.kv_cache import KeyValues, decode_slots, fill_prompts, fill_slots
from minirl.model import Decoder
from minirl.prompts import PromptTable
from minirl.sampling import sample

# Longest piece of an observation computed at once: bounds the memory of its attention scores.
_CHUNK = 512
# Rows of one fill: as many as wait, up to the larger; the last ones are filled one by one.
_FILL_ROWS = (4, 1)
# Longest run of the decode loop; what is between runs costs about a millisecond.
_MAX_STEPS = 32


class Draws(NamedTuple):
    """What the decode loop needs to know of each slot; NumPy on the host, a pytree inside."""

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to rows of a store; rows may repeat, with the same tokens."""

    rows_B: np.ndarray
    tokens_BT: np.ndarray
    start_B: np.ndarray
    count_B: np.ndarray
    tokens: int


class Compiled:
    """The programs of one sampler, compiled at first use."""

    def __init__(
        self, graphdef: Any, config: SamplerConfig, *, stop_ids: tuple[int, ...], seed: int
    ) -> None:
        self.treedef: Any = None
        self.prompt_lengths = _sizes(config.max_prompt_tokens, parts=(4, 2, 1))
        self.lengths = _sizes(config.max_response_tokens, parts=(8, 4, 2, 1))
        self._pieces = _sizes(min(_CHUNK, self.prompt_lengths[-1]), parts=(16, 4, 1))
        self._graphdef = graphdef
        self._stop_ids = jnp.array(stop_ids, jnp.int32)
        self._key = jax.random.key(seed)
        self._fill_prompts = jax.jit(self._trace_fill_prompts, static_argnums=0, donate_argnums=2)
        self._fill_slots = jax.jit(self._trace_fill_slots, static_argnums=0, donate_argnums=3)
        self._decode = jax.jit(self._trace_decode, static_argnums=0, donate_argnums=3)

    def count(self) -> int:
        """Count the programs compiled so far."""
        programs: list[Any] = [self._fill_prompts, self._fill_slots, self._decode]
        return sum(program._cache_size() for program in programs)

    def chunks(self, jobs: Sequence[tuple[int, int, list[int]]]) -> Iterator[Chunk]:
        """Cut (row, start, ids) into pieces of a few shapes, rows side by side."""
        size = self._pieces[-1]
        waiting = [(row, start, ids) for row, start, ids in jobs if ids]
        while waiting:
            pieces = [(row, start, ids[:size]) for row, start, ids in waiting]
            while pieces:
                width = next(w for w in _FILL_ROWS if w == 1 or len(pieces) >= w)
                yield self._chunk(pieces[:width])
                pieces = pieces[width:]
            waiting = [
                (row, start + size, ids[size:]) for row, start, ids in waiting if len(ids) > size
            ]

    def fill_prompts(self, weights: Any, prompts: list[KeyValues], chunk: Chunk) -> Any:
        """Append a chunk to prompts; returns their new store."""
        length = _round_up(int((chunk.start_B + chunk.count_B).max()), self.prompt_lengths)
        return self._fill_prompts(length, weights, prompts, *_arrays(chunk))

    def fill_slots(
        self,
        weights: Any,
        prompts: list[KeyValues],
        own: list[KeyValues],
        chunk: Chunk,
        prompt_B: np.ndarray,
        prompt_lengths_B: np.ndarray,
    ) -> Any:
        """Append a chunk to slots; returns their new store."""
        sizes = (
            _round_up(int(prompt_lengths_B.max()), self.prompt_lengths),
            _round_up(int((chunk.start_B + chunk.count_B).max()), self.lengths),
        )
        return self._fill_slots(
            sizes, weights, prompts, own, *_arrays(chunk), prompt_B, prompt_lengths_B
        )

    def decode(
        self,
        weights: Any,
        prompts: list[KeyValues],
        own: list[KeyValues],
        table: PromptTable,
        draws: Draws,
        max_steps: int,
    ) -> tuple[list[KeyValues], np.ndarray, np.ndarray]:
        """Draw tokens for the active slots until a reply ends.

        Returns:
            The slots' new store, and the drawn tokens and their log-probabilities by step, WS.
        """
        active = draws.is_active_S
        longest = int(draws.column_S[active].max())
        length = _round_up(longest + 1, self.lengths)
        steps = min(max_steps, _MAX_STEPS, length - longest)
        rows = -(-table.size // 2)
        static = (
            table.size if table.used_rows() > rows else rows,
            _round_up(table.longest(), self.prompt_lengths),
            length,
            bool((draws.temperature_S[active] == 0).any()),
            bool((draws.top_p_S[active] < 1).any()),
        )
        own, ids_WS, logprobs_WS, taken = self._decode(
            static, weights, prompts, own, draws, table.slots(), table.lengths(), np.int32(steps)
        )
        taken = int(taken)
        return own, np.asarray(ids_WS)[:taken], np.asarray(logprobs_WS)[:taken]

    def _chunk(self, pieces: Sequence[tuple[int, int, list[int]]]) -> Chunk:
        width = _round_up(max(len(ids) for _, _, ids in pieces), self._pieces)
        tokens_BT = np.zeros((len(pieces), width), np.int32)
        for b, (_, _, ids) in enumerate(pieces):
            tokens_BT[b, : len(ids)] = ids
        count_B = np.array([len(ids) for _, _, ids in pieces], np.int32)
        return Chunk(
            rows_B=np.array([row for row, _, _ in pieces], np.int32),
            tokens_BT=tokens_BT,
            start_B=np.array([start for _, start, _ in pieces], np.int32),
            count_B=count_B,
            tokens=int(count_B.sum()),
        )

    def _model(self, weights: Any) -> Decoder:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self.treedef, weights))

    def _trace_fill_prompts(
        self, length: int, weights: Any, prompts: Any, rows_B: Any, tokens_BT: Any, *span: Any
    ) -> Any:
        positions_BT, columns_BT = _columns(tokens_BT, *span, length=prompts[0].k.shape[2])
        attend = fill_prompts(rows_B, columns_BT, length=length)
        return self._model(weights)(tokens_BT, positions_BT, attend, prompts)[1]

    def _trace_fill_slots(
        self, sizes: Any, weights: Any, prompts: Any, own: Any, rows_B: Any, tokens_BT: Any,
        start_B: Any, count_B: Any, prompt_B: Any, prompt_lengths_B: Any,
    ) -> Any:  # fmt: skip
        prompt_length, length = sizes
        positions_BT, columns_BT = _columns(tokens_BT, start_B, count_B, length=own[0].k.shape[2])
        attend = fill_slots(
            rows_B, columns_BT, prompt_B, prompt_lengths_B,
            prompt_length=prompt_length, length=length,
        )  # fmt: skip
        caches = list(zip(prompts, own, strict=True))
        positions_BT = positions_BT + prompt_lengths_B[:, None]
        _, caches = self._model(weights)(tokens_BT, positions_BT, attend, caches)
        return [kept for _, kept in caches]

    def _trace_decode(
        self, static: Any, weights: Any, prompts: Any, own: Any, draws: Draws,
        slot_NG: Any, prompt_lengths_N: Any, max_steps: Any,
    ) -> Any:  # fmt: skip
        rows, prompt_length, length, any_greedy, any_top_p = static
        model = self._model(weights)
        # Cut once here: inside the loop each step would copy.
        prompts = [KeyValues(*[x[:rows, :, :prompt_length] for x in kept]) for kept in prompts]
        slot_NG, lengths_N = slot_NG[:rows], prompt_lengths_N[:rows]
        first_S = prompt_lengths_N[draws.prompt_S]
        cell_S = jnp.minimum(draws.cell_S, slot_NG.size - 1)
        episode_keys_S = jax.vmap(partial(jax.random.fold_in, self._key))(draws.episode_S)

        def is_ended(tokens_S: Any, step: Any) -> Any:
            is_stop_S = (tokens_S[:, None] == self._stop_ids[None]).any(axis=-1)
            return draws.is_active_S & (is_stop_S | (step >= draws.left_S))

        def goes_on(carry: Any) -> Any:
            step, tokens_S, *_ = carry
            return (step < max_steps) & ((step == 0) | ~is_ended(tokens_S, step).any())

        def body(carry: Any) -> Any:
            step, tokens_S, own, ids_WS, logprobs_WS = carry
            columns_S = draws.column_S + jnp.where(draws.is_active_S, step, 0)
            positions_S = first_S + columns_S
            attend = decode_slots(
                columns_S, slot_NG, cell_S, lengths_N,
                prompt_length=prompt_length, length=length,
            )  # fmt: skip
            caches = list(zip(prompts, own, strict=True))
            hidden_S1D, caches = model(tokens_S[:, None], positions_S[:, None], attend, caches)
            keys_S = jax.vmap(jax.random.fold_in)(episode_keys_S, positions_S)
            drawn_S, logprobs_S = sample(
                model.logits(hidden_S1D[:, 0]), keys_S, draws.temperature_S, draws.top_p_S,
                any_greedy=any_greedy, any_top_p=any_top_p,
            )  # fmt: skip
            tokens_S = jnp.where(draws.is_active_S, drawn_S, tokens_S)
            own = [kept for _, kept in caches]
            return (
                step + 1, tokens_S, own,
                ids_WS.at[step].set(tokens_S), logprobs_WS.at[step].set(logprobs_S),
            )  # fmt: skip

        shape = (_MAX_STEPS, len(draws.token_S))
        out = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        step, _, own, ids_WS, logprobs_WS = jax.lax.while_loop(
            goes_on, body, (jnp.int32(0), draws.token_S, own, *out)
        )
        return own, ids_WS, logprobs_WS, step


def _sizes(longest: int, *, parts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes that lengths up to `longest` are rounded up to, each a multiple of 16."""
    return tuple(sorted({-(-longest // (16 * part)) * 16 for part in parts}))


def _round_up(value: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= value)


def _columns(tokens_BT: Any, start_B: Any, count_B: Any, *, length: int) -> tuple[Any, Any]:
    """Return where tokens go in their row, and the same with padding past the row's end."""
    offsets_BT = jnp.arange(tokens_BT.shape[1])[None, :]
    columns_BT = start_B[:, None] + offsets_BT
    return columns_BT, jnp.where(offsets_BT < count_B[:, None], columns_BT, length)


def _arrays(chunk: Chunk) -> tuple[np.ndarray, ...]:
    return chunk.rows_B, chunk.tokens_BT, chunk.start_B, chunk.count_B
