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
from minirl.decode import Compiled, Draws
from minirl.kv_cache import KeyValues, empty_store
from minirl.model import Decoder
from minirl.prompts import PromptTable
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
    prompt: int
    cell: int
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
            config: Slots and lengths: memory is that of the slots times the longest response, and
                of up to 2 x slots / group_size prompts.
            tokenizer: Knows the stop tokens and the text of a reply.
            group_size: Episodes that share one kept prompt; more keep it again.
            seed: With an episode's number it decides the episode's random stream.
            version: Weight version of the model.
        """
        self.work = Work()
        self._config = config
        self._tokenizer = tokenizer
        self._model = (model.config, model.dtype)
        prompts = min(config.slots, 2 * -(-config.slots // group_size))
        self._prompts = PromptTable(prompts=prompts, group_size=group_size)
        self._compiled = Compiled(
            nnx.graphdef(model), config, stop_ids=tuple(tokenizer.stop_ids), seed=seed
        )
        self._slots: list[_Slot | None] = [None] * config.slots
        self._place: dict[int, int] = {}
        self._queue: deque[Request] = deque()
        self._stores: tuple[list[KeyValues], list[KeyValues]] | None = None
        self.set_weights(nnx.state(model), version=version)

    @property
    def compilations(self) -> int:
        """Count the programs compiled so far."""
        return self._compiled.count()

    def set_weights(self, weights: Any, *, version: int) -> None:
        """Sample with these weights: the same arrays, no copy, unless they are wider than the
        model computes in; then matrices are cast once and not at every step.
        """
        if self._place or self._queue:
            raise RuntimeError("weights changed while episodes were being sampled")
        dtype = self._model[1]

        def narrow(leaf: jax.Array) -> jax.Array:
            # Norm scales (one axis) enter in full precision, in the learner too.
            return leaf if leaf.ndim < 2 or leaf.dtype == dtype else leaf.astype(dtype)

        self._weights = tuple(narrow(leaf) for leaf in jax.tree.leaves(weights))
        self._compiled.treedef = jax.tree.structure(weights)
        self._version = version
        self._prompts.forget()

    def free_memory(self) -> None:
        """Give the memory of the caches back until the next request."""
        if self._place:
            raise RuntimeError("caches freed while episodes were being sampled")
        self._stores = None
        self._prompts.forget()

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
        slot = self._slots[self._place[request.episode]]
        assert slot is not None
        if request.ids[: len(slot.ids)] != tuple(slot.ids):
            raise ValueError(f"episode {request.episode}: the request rewrites its history")
        self._check_room(request, prompt_tokens=self._prompts.length(slot.prompt) + 1)
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
            slot = self._slots[place]
            assert slot is not None
            self._prompts.leave(slot.prompt, slot.cell)
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

    def _admit(self) -> None:
        """Give free slots to the queue in its order, and compute the prompts not yet kept."""
        missing: list[int] = []
        for place, slot in enumerate(self._slots):
            if slot is not None:
                continue
            if not self._queue:
                break
            request = self._queue[0]
            # The last token of a prompt is fed by the decode loop: that draws the first token.
            seat = self._prompts.join(request.ids[:-1], place)
            if seat is None:
                break
            self._queue.popleft()
            self._place[request.episode] = place
            new = _Slot(request.episode, [], seat.prompt, seat.cell, len(request.ids) - 1)
            self._start(new, request)
            self._slots[place] = new
            if seat.is_new:
                missing.append(seat.prompt)
        self._fill_prompts(missing)

    def _caches(self) -> tuple[list[KeyValues], list[KeyValues]]:
        if self._stores is None:
            model_config, dtype = self._model
            sizes = (
                (self._prompts.size, self._compiled.prompt_lengths[-1]),
                (self._config.slots, self._compiled.lengths[-1]),
            )
            prompts, own = (
                empty_store(model_config, rows=rows, length=length, dtype=dtype)
                for rows, length in sizes
            )
            self._stores = (prompts, own)
        return self._stores

    def _fill_prompts(self, rows: Sequence[int]) -> None:
        jobs = [(row, 0, list(self._prompts.ids(row))) for row in rows if self._prompts.ids(row)]
        prompts, own = self._caches()
        for chunk in self._compiled.chunks(jobs):
            prompts = self._compiled.fill_prompts(self._weights, prompts, chunk)
            self.work.filled += chunk.tokens
        self._stores = (prompts, own)

    def _fill(self) -> None:
        """Compute the new tokens of later turns, all but the last of each."""
        jobs = []
        for place, slot in enumerate(self._slots):
            if slot is not None and slot.left and slot.cached < len(slot.ids) - 1:
                start = slot.cached - self._prompts.length(slot.prompt)
                jobs.append((place, start, slot.ids[slot.cached : -1]))
                slot.cached = len(slot.ids) - 1
        prompts, own = self._caches()
        for chunk in self._compiled.chunks(jobs):
            seated = [self._slots[row] for row in chunk.rows_B.tolist()]
            prompt_rows = np.array([slot.prompt for slot in seated if slot], np.int32)
            lengths = self._prompts.lengths()[prompt_rows]
            own = self._compiled.fill_slots(
                self._weights, prompts, own, chunk, prompt_rows, lengths
            )
            self.work.filled += chunk.tokens
        self._stores = (prompts, own)

    def _decode(self, active: list[int], max_steps: int) -> list[tuple[int, Reply]]:
        draws = Draws.idle(self._config.slots)
        for s, slot in enumerate(self._slots):
            if slot is not None:
                draws.prompt_S[s], draws.cell_S[s] = slot.prompt, slot.cell
                draws.column_S[s] = slot.cached - self._prompts.length(slot.prompt)
                draws.is_active_S[s] = slot.left > 0
                draws.token_S[s], draws.left_S[s] = slot.ids[-1], slot.left
                draws.episode_S[s] = slot.episode
                draws.temperature_S[s] = slot.decoding.temperature
                draws.top_p_S[s] = slot.decoding.top_p
        prompts, own = self._caches()
        own, ids_WS, logprobs_WS = self._compiled.decode(
            self._weights, prompts, own, self._prompts, draws, max_steps
        )
        self._stores = (prompts, own)
        self.work.calls += 1
        self.work.steps += len(ids_WS)
        self.work.sampled += len(ids_WS) * len(active)
        ended = [self._extend(s, ids_WS[:, s].tolist(), logprobs_WS[:, s].tolist()) for s in active]
        return [one for one in ended if one is not None]

    def _extend(
        self, place: int, ids: list[int], logprobs: list[float]
    ) -> tuple[int, Reply] | None:
        """Append what a slot drew; return its reply if that is the end of it."""
        slot = self._slots[place]
        assert slot is not None
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
