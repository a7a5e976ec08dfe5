"""Slots and kept prompts, as the host sees them, and what compiled programs are told of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from minirl.sample.attention import CacheRows
from minirl.sample.cache import CacheShape
from minirl.types import Decoding, Request, TopTokens

# Tokens of a later turn that are computed at once.
_TURN_PIECE = 128
# Fewer tokens are as soon computed as copied.
_LEAST_COPY = 32


class CopyRows(NamedTuple):
    """A prompt to copy over another one in every part; to itself where there is none to copy."""

    source_B: Any
    row_B: Any


def _no_rows(rows: int, prompts: int, group_size: int) -> CacheRows:
    by_row = (np.zeros(rows, np.int32) for _ in range(4))
    by_prompt = (np.zeros(prompts, np.int32) for _ in range(2))
    return CacheRows(*by_row, np.zeros((prompts, group_size), np.int32), *by_prompt)


class NewTokens(NamedTuple):
    """Known tokens to add to the cache, of one prompt, or of one slot beside its prompt, in every
    part.
    """

    tokens_BT: Any  # padded on the right
    rows: CacheRows

    @classmethod
    def empty(cls, shape: CacheShape, *, size: int) -> NewTokens:
        """Describe rows without tokens."""
        tokens_BT = np.zeros((shape.parts, size), np.int32)
        return cls(tokens_BT, _no_rows(shape.parts, shape.parts, 1))


class SlotState(NamedTuple):
    """What the decode loop needs to know of the slots that it goes over; NumPy on the host."""

    rows: CacheRows  # one new token where a reply is being sampled
    prompt_tokens_S: Any  # length of the prompt in the cache
    token_S: Any  # the token that is fed next
    episode_S: Any  # number of the episode, which decides its random stream
    temperature_S: Any
    top_p_S: Any

    @classmethod
    def idle(cls, shape: CacheShape, *, rows: int) -> SlotState:
        """Describe so many slots of each part, without episodes."""
        is_all = rows == shape.slots
        slots = shape.parts * rows
        prompts = shape.parts * (shape.prompts if is_all else min(shape.prompts, rows))
        described = _no_rows(slots, prompts, shape.group_size)
        if is_all:
            described = described._replace(row_B=None, prompt_N=None)
        return cls(
            described,
            *(np.zeros(slots, np.int32) for _ in range(3)),
            *(np.ones(slots, np.float32) for _ in range(2)),
        )


@dataclass(slots=True, eq=False)
class KeptPrompt:
    """A row of the cache for a prompt."""

    row: int  # inside of the part
    slots: list[int | None]  # those that sample from it, None where one more can
    ids: tuple[int, ...] | None = None
    filled: int = 0  # how many of them are in the cache
    used: int = 0  # when somebody last began to sample from it

    @property
    def is_in_use(self) -> bool:
        """Tell whether anybody samples from it."""
        return any(slot is not None for slot in self.slots)

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Return what the cache has to hold."""
        return self.ids or ()


@dataclass(slots=True, eq=False)
class SlotEpisode:
    """What the sampler knows of an episode; `new_ids`, `logprobs`, `versions` and, run by run of
    the decode loop, `top` of its reply.
    """

    number: int
    prompt_ids: tuple[int, ...]  # those of its ids that are kept as a prompt
    ids: list[int] = field(default_factory=list)
    left: int = 0  # tokens that the reply may still take; 0 between two requests
    decoding: Decoding = field(default_factory=Decoding)
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    slot: int | None = None  # counted over all parts; None while it waits for one
    prompt: KeptPrompt | None = None
    filled: int = 0  # how many of its ids after the prompt are in the cache

    def start(self, request: Request) -> None:
        """Begin a reply."""
        self.ids = list(request.ids)
        self.left, self.decoding = request.max_tokens, request.decoding
        self.new_ids, self.logprobs, self.versions, self.top = [], [], [], []

    @property
    def known_ids(self) -> list[int]:
        """Return what the slot has to hold before the last token is fed."""
        return self.ids[len(self.prompt_ids) : -1]


class Slots:
    """The slots and the kept prompts of every part of the mesh.

    A prompt that nobody samples from stays until its row is needed, the longest unused first.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._episodes: list[SlotEpisode | None] = [None] * (shape.parts * shape.slots)
        self._prompts = [
            [KeptPrompt(row, [None] * shape.group_size) for row in range(shape.prompts)]
            for _ in range(shape.parts)
        ]
        self._joined = 0
        self.prompts_filled = 0

    def active(self) -> list[SlotEpisode]:
        """Return the episodes that a reply is being sampled for, by slot."""
        return [episode for episode in self._episodes if episode and episode.left]

    def forget(self) -> None:
        """Let the cache be computed again, in the rows that a new sampler would take."""
        for episode in self._episodes:
            if episode is not None:
                episode.filled = 0
        for prompt in itertools.chain(*self._prompts):
            prompt.filled = 0
            if not prompt.is_in_use:
                prompt.ids, prompt.used = None, 0

    def place(self, episode: SlotEpisode) -> bool:
        """Give an episode a slot beside its prompt, if there are both.

        Preferred is a part where the prompt is in use, then one that keeps it, then the emptiest.
        """
        candidates = []
        for part, prompts in enumerate(self._prompts):
            slots = range(part * self._shape.slots, (part + 1) * self._shape.slots)
            free = [slot for slot in slots if self._episodes[slot] is None]
            prompt = self._row_for(prompts, episode.prompt_ids) if free else None
            if prompt is not None:
                is_kept = prompt.ids == episode.prompt_ids
                rank = (not (is_kept and prompt.is_in_use), not is_kept, -len(free), part)
                candidates.append((rank, free[0], prompt))
        if not candidates:
            return False
        _, slot, prompt = min(candidates, key=lambda candidate: candidate[0])
        if prompt.ids != episode.prompt_ids:
            prompt.ids, prompt.filled = episode.prompt_ids, 0
        self._joined += 1
        prompt.used = self._joined
        prompt.slots[prompt.slots.index(None)] = slot
        self._episodes[slot] = episode
        episode.slot, episode.prompt, episode.filled = slot, prompt, 0
        return True

    def leave(self, episode: SlotEpisode) -> None:
        """Free an episode's slot."""
        assert episode.slot is not None
        assert episode.prompt is not None
        slots = episode.prompt.slots
        slots[slots.index(episode.slot)] = None
        self._episodes[episode.slot] = None
        episode.slot, episode.prompt = None, None

    def next_copy(self) -> CopyRows | None:
        """Return which prompts begin as the next ones to fill do, such as with the same schema;
        None for none. What they share counts as filled.
        """
        waiting = [self._first_unfilled(part, of_slots=False) for part in range(self._shape.parts)]
        source_B, row_B = (np.zeros(self._shape.parts, np.int32) for _ in range(2))
        for part, prompt in enumerate(waiting):
            if not isinstance(prompt, KeptPrompt) or prompt.filled:
                continue
            source = max(self._prompts[part], key=lambda other: _shared(prompt, other))
            if (shared := _shared(prompt, source)) >= _LEAST_COPY:
                source_B[part], row_B[part] = source.row, prompt.row
                prompt.filled = shared
        return CopyRows(source_B, row_B) if (source_B != row_B).any() else None

    def next_fill(self, *, of_slots: bool) -> NewTokens | None:
        """Return the next tokens that the cache misses, of prompts or of slots; None for no more.

        They count as filled. There are few sizes, so that few programs are compiled: a piece is
        the largest that is full, or one that is but for less than the smallest.
        """
        shape = self._shape
        sizes = (min(_TURN_PIECE, shape.slot_tokens),) if of_slots else shape.pieces
        waiting = [self._first_unfilled(part, of_slots=of_slots) for part in range(shape.parts)]
        if not any(waiting):
            return None
        longest = max(len(owner.known_ids) - owner.filled for owner in waiting if owner)
        size = max((size for size in sizes if size < longest + sizes[0]), default=sizes[0])
        new = NewTokens.empty(shape, size=size)
        rows = new.rows
        for part, owner in enumerate(waiting):
            if owner is None:
                continue
            ids = owner.known_ids[owner.filled : owner.filled + size]
            new.tokens_BT[part, : len(ids)] = ids
            rows.start_B[part], rows.count_B[part] = owner.filled, len(ids)
            if isinstance(owner, KeptPrompt):
                rows.row_B[part] = owner.row
                self.prompts_filled += len(ids) == len(owner.known_ids) - owner.filled
            else:
                assert owner.slot is not None
                assert owner.prompt is not None
                rows.row_B[part] = owner.slot % shape.slots
                rows.prompt_N[part] = owner.prompt.row
                rows.prompt_tokens_N[part] = len(owner.prompt_ids)
            owner.filled += len(ids)
        return new

    def _first_unfilled(self, part: int, *, of_slots: bool) -> SlotEpisode | KeptPrompt | None:
        size = self._shape.slots
        candidates: list[Any] = [prompt for prompt in self._prompts[part] if prompt.is_in_use]
        if of_slots:
            slots = self._episodes[part * size : (part + 1) * size]
            candidates = [episode for episode in slots if episode and episode.left]
        return next((owner for owner in candidates if owner.filled < len(owner.known_ids)), None)

    def state(self) -> tuple[SlotState, list[int]]:
        """Describe the slots that a reply is sampled in to the decode loop, and perhaps others;
        return the row there of each of `active()`.
        """
        shape, active = self._shape, self.active()
        by_part: list[list[SlotEpisode]] = [[] for _ in range(shape.parts)]
        for episode in active:
            assert episode.slot is not None
            by_part[episode.slot // shape.slots].append(episode)
        size = next(size for size in shape.rows if size >= max(map(len, by_part)))
        state, active_rows = SlotState.idle(shape, rows=size), []
        rows = state.rows
        prompts = len(rows.prompt_tokens_N) // shape.parts
        for part, episodes in enumerate(by_part):
            known: dict[int, int] = {}
            for number, episode in enumerate(episodes):
                assert episode.slot is not None
                assert episode.prompt is not None
                slot, prompt = episode.slot % shape.slots, episode.prompt
                if rows.row_B is None:
                    row, n = slot, prompt.row
                else:
                    row, n = number, known.setdefault(prompt.row, len(known))
                s, at = part * size + row, part * prompts + n
                g = prompt.slots.index(episode.slot)
                rows.row_NG[at, g] = row
                rows.member_B[s] = n * shape.group_size + g
                rows.prompt_tokens_N[at] = len(episode.prompt_ids)
                if rows.row_B is not None:
                    rows.row_B[s], rows.prompt_N[at] = slot, prompt.row
                rows.start_B[s], rows.count_B[s] = episode.filled, 1
                state.prompt_tokens_S[s] = len(episode.prompt_ids)
                state.token_S[s], state.episode_S[s] = episode.ids[-1], episode.number
                state.temperature_S[s] = episode.decoding.temperature
                state.top_p_S[s] = episode.decoding.top_p
                active_rows.append(s)
        return state, active_rows

    def _row_for(self, prompts: list[KeptPrompt], ids: tuple[int, ...]) -> KeptPrompt | None:
        """Return a kept prompt that one more slot may share, or else the row to keep it in."""
        same = [prompt for prompt in prompts if prompt.ids == ids and None in prompt.slots]
        if same:
            return same[0]
        unused = [prompt for prompt in prompts if not prompt.is_in_use]
        return min(unused, key=lambda prompt: prompt.used, default=None)


def _shared(prompt: KeptPrompt, other: KeptPrompt) -> int:
    """Count the tokens at the beginning of a prompt that the cache has in another's row; the last
    one of a prompt is always computed.
    """
    pairs = zip(prompt.known_ids[:-1], other.known_ids[: other.filled], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
