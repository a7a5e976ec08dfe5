"""The native sampler: a fixed number of slots that decode side by side.

A slot is taken as soon as it is free. A prompt is computed once for all the episodes that share it,
a later turn computes only its new tokens, and tokens are drawn in a loop on the device that comes
back when a reply ends. Each episode draws from its own random stream, so what it says does not
depend on its slot or its neighbours (but for rounding).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from minirl.config import SamplerConfig
from minirl.decode import Chunk, Draws, Sizes, programs, round_up
from minirl.kv_cache import KeyValues, add_rows, empty_store
from minirl.model import Decoder
from minirl.prompts import PromptTable, Seat
from minirl.types import Decoding, Reply, Request, Tokenizer


@dataclass(slots=True)
class Work:
    """What a sampler has done so far, in tokens unless said otherwise.

    Attributes:
        sampled: Tokens drawn.
        steps: Passes of the decode loop, each over all slots.
        calls: Runs of the decode loop.
        filled: Observation tokens computed ahead of the decode loop.
    """

    sampled: int = 0
    steps: int = 0
    calls: int = 0
    filled: int = 0


@dataclass(slots=True)
class _Slot:
    """An episode in its place; `left` is 0 while it waits for its next request."""

    episode: int
    ids: list[int]
    seat: Seat
    prompt_length: int
    cached: int
    left: int = 0
    decoding: Decoding = field(default_factory=Decoding)
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class NativeSampler:
    """Sample replies with a `Decoder` in this process."""

    def __init__(
        self,
        model: Decoder,
        config: SamplerConfig,
        tokenizer: Tokenizer,
        *,
        group_size: int,
        seed: int,
        version: int = 0,
    ) -> None:
        """Compile nothing and allocate nothing yet.

        Args:
            model: Gives the structure and the first weights.
            config: Slots and lengths. Memory is that of the slots times the longest response, and
                of slots / group_size prompts; of more where more come together.
            tokenizer: Knows the stop tokens and the text of a reply.
            group_size: Episodes that share one kept prompt; more keep it again.
            seed: With an episode's number it decides the episode's random stream.
            version: Weight version of the model.
        """
        self.work = Work()
        self._config, self._tokenizer = config, tokenizer
        self._model_config, self._dtype = model.config, model.dtype
        self._sizes = Sizes(config)
        self._key = jax.random.key(seed)
        graphdef, weights = nnx.split(model)
        stop_ids = tuple(tokenizer.stop_ids)
        self._programs = programs(graphdef, jax.tree.structure(weights), stop_ids)
        self._prompts = PromptTable(slots=config.slots, group_size=group_size)
        self._slots: list[_Slot | None] = [None] * config.slots
        self._place: dict[int, int] = {}
        self._queue: deque[Request] = deque()
        self._prompt_store: list[KeyValues] = []
        self._own_store: list[KeyValues] = []
        self.set_weights(weights, version=version)

    @property
    def compilations(self) -> int:
        """Count the programs compiled so far, for this model by all its samplers."""
        return self._programs.count()

    def set_weights(self, weights: Any, *, version: int) -> None:
        """Sample with these weights: the same arrays, no copy, unless they are wider than the
        model computes in; then matrices are cast once and not at every step.
        """
        if self._place or self._queue:
            raise RuntimeError("weights changed while episodes were being sampled")
        dtype = self._dtype

        def narrow(leaf: jax.Array) -> jax.Array:
            # Norm scales (one axis) enter in full precision, in the learner too.
            return leaf if leaf.ndim < 2 or leaf.dtype == dtype else leaf.astype(dtype)

        self._weights = tuple(narrow(leaf) for leaf in jax.tree.leaves(weights))
        self._version = version
        self._forget_prompts()

    def free_memory(self) -> None:
        """Give the memory of the caches back until the next request."""
        if self._place:
            raise RuntimeError("caches freed while episodes were being sampled")
        self._own_store = []
        self._forget_prompts()

    def submit(self, request: Request) -> None:
        """Ask for a reply: the first of an episode waits for a slot, a later one has its own."""
        if not request.ids or request.max_tokens < 1:
            raise ValueError(f"episode {request.episode}: an empty prompt or reply was asked for")
        if request.episode not in self._place:
            if len(request.ids) > self._config.max_prompt_tokens:
                raise ValueError(f"episode {request.episode}: prompt over max_prompt_tokens")
            self._check_room(request, prompt_tokens=len(request.ids))
            self._queue.append(request)
            return
        slot = self._at(self._place[request.episode])
        if request.ids[: len(slot.ids)] != tuple(slot.ids):
            raise ValueError(f"episode {request.episode}: the request rewrites its history")
        self._check_room(request, prompt_tokens=slot.prompt_length + 1)
        self._start(slot, request)

    def advance(self, *, max_steps: int) -> list[tuple[int, Reply]]:
        """Fill free slots, then decode until a reply ends or for `max_steps` tokens each.

        Returns:
            Ended replies by slot; empty when none ended or nothing was asked for.
        """
        self._admit()
        self._fill()
        active = [s for s, slot in enumerate(self._slots) if slot is not None and slot.left]
        return self._decode(active, max_steps) if active else []

    def release(self, episode: int) -> None:
        """Forget an episode wherever it is; its slot is free."""
        if episode in self._place:
            place = self._place.pop(episode)
            self._prompts.leave(self._at(place).seat)
            self._slots[place] = None
        else:
            self._queue = deque(r for r in self._queue if r.episode != episode)

    def _check_room(self, request: Request, *, prompt_tokens: int) -> None:
        response = len(request.ids) - prompt_tokens + request.max_tokens
        if response > self._config.max_response_tokens:
            raise ValueError(
                f"episode {request.episode}: {response} response tokens over max_response_tokens"
            )

    def _start(self, slot: _Slot, request: Request) -> None:
        slot.ids = list(request.ids)
        slot.left, slot.decoding = request.max_tokens, request.decoding
        slot.new_ids, slot.logprobs = [], []

    def _forget_prompts(self) -> None:
        self._prompts.forget()
        self._prompt_store = []

    def _admit(self) -> None:
        """Give free slots to the queue in its order, and compute the prompts not yet kept."""
        missing = []
        for place, slot in enumerate(self._slots):
            if slot is not None or not self._queue:
                continue
            request = self._queue.popleft()
            # The last token of a prompt is fed by the decode loop: that draws the first token.
            prompt_ids = request.ids[:-1]
            seat = self._prompts.join(prompt_ids, place)
            if seat.is_new:
                missing.append((seat.prompt, 0, prompt_ids))
            new = _Slot(request.episode, [], seat, len(prompt_ids), len(prompt_ids))
            self._start(new, request)
            self._slots[place] = new
            self._place[request.episode] = place
        self._make_room()
        for chunk in self._sizes.chunks(missing):
            length = round_up(chunk.end, self._sizes.prompt)
            self._prompt_store = self._programs.fill_prompts(
                length, self._weights, self._prompt_store, _arrays(chunk)
            )
            self.work.filled += int(chunk.count_B.sum())

    def _make_room(self) -> None:
        """Allocate what is missing of the stores, on the mesh of the weights."""
        mesh = getattr(self._weights[0].sharding, "mesh", None)

        def allocate(rows: int, length: int) -> list[KeyValues]:
            return empty_store(
                self._model_config, rows=rows, length=length, dtype=self._dtype, mesh=mesh
            )

        rows = self._prompts.rows
        if not self._own_store:
            self._own_store = allocate(self._config.slots, self._sizes.own[-1])
        if not self._prompt_store:
            self._prompt_store = allocate(rows, self._sizes.prompt[-1])
        elif self._prompt_store[0].k.shape[0] < rows:
            self._prompt_store = add_rows(self._prompt_store, rows)

    def _fill(self) -> None:
        """Compute the new tokens of later turns, all but the last of each."""
        jobs = []
        for place, slot in enumerate(self._slots):
            if slot is not None and slot.left and slot.cached < len(slot.ids) - 1:
                jobs.append((place, slot.cached - slot.prompt_length, slot.ids[slot.cached : -1]))
                slot.cached = len(slot.ids) - 1
        for chunk in self._sizes.chunks(jobs):
            prompt_B = np.array([self._at(s).seat.prompt for s in chunk.rows_B], np.int32)
            prompt_lengths_B = np.array([self._at(s).prompt_length for s in chunk.rows_B], np.int32)
            lengths = (
                round_up(int(prompt_lengths_B.max()), self._sizes.prompt),
                round_up(chunk.end, self._sizes.own),
            )
            self._own_store = self._programs.fill_slots(
                lengths,
                self._weights,
                self._prompt_store,
                self._own_store,
                _arrays(chunk),
                prompt_B,
                prompt_lengths_B,
            )
            self.work.filled += int(chunk.count_B.sum())

    def _at(self, place: int) -> _Slot:
        slot = self._slots[place]
        assert slot is not None
        return slot

    def _draws(self) -> Draws:
        draws = Draws.idle(self._config.slots)
        places = self._prompts.places
        for s, slot in enumerate(self._slots):
            if slot is not None:
                draws.prompt_S[s] = slot.seat.prompt
                draws.cell_S[s] = slot.seat.prompt * places + slot.seat.place
                draws.column_S[s] = slot.cached - slot.prompt_length
                draws.token_S[s], draws.left_S[s] = slot.ids[-1], slot.left
                draws.is_active_S[s] = slot.left > 0
                draws.episode_S[s] = slot.episode
                draws.temperature_S[s] = slot.decoding.temperature
                draws.top_p_S[s] = slot.decoding.top_p
        return draws

    def _decode(self, active: Sequence[int], max_steps: int) -> list[tuple[int, Reply]]:
        draws = self._draws()
        sizes, steps = self._sizes.decode(
            draws, longest_prompt=self._prompts.longest(), max_steps=max_steps
        )
        self._own_store, ids_WS, logprobs_WS, taken = self._programs.decode(
            sizes,
            self._weights,
            self._prompt_store,
            self._own_store,
            draws,
            self._prompts.slots(),
            self._prompts.lengths(),
            self._key,
            np.int32(steps),
        )
        ids_WS = np.asarray(ids_WS)[: int(taken)]
        logprobs_WS = np.asarray(logprobs_WS)[: int(taken)]
        self.work.calls += 1
        self.work.steps += len(ids_WS)
        self.work.sampled += len(ids_WS) * len(active)
        ended = [
            self._extend(self._at(s), ids_WS[:, s].tolist(), logprobs_WS[:, s].tolist())
            for s in active
        ]
        return [one for one in ended if one is not None]

    def _extend(
        self, slot: _Slot, ids: list[int], logprobs: list[float]
    ) -> tuple[int, Reply] | None:
        """Append what a slot drew; return its reply if that is the end of it."""
        slot.ids += ids
        slot.new_ids += ids
        slot.logprobs += logprobs
        slot.cached += len(ids)
        slot.left -= len(ids)
        is_stopped = slot.ids[-1] in self._tokenizer.stop_ids
        if slot.left and not is_stopped:
            return None
        slot.left = 0
        text = self._tokenizer.decode(slot.new_ids[:-1] if is_stopped else slot.new_ids)
        finish = "stop" if is_stopped else "length"
        reply = Reply(tuple(slot.new_ids), tuple(slot.logprobs), text, finish, self._version)
        return slot.episode, reply


def _arrays(chunk: Chunk) -> tuple[np.ndarray, ...]:
    return chunk.rows_B, chunk.tokens_BT, chunk.start_B, chunk.count_B
