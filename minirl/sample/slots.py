"""Slots and kept prompts, as the host sees them, and what compiled programs are told of them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from minirl.sample.attention import CacheRows
from minirl.sample.cache import CacheShape
from minirl.types import Request

# Tokens of a later turn that are computed at once.
_TURN_PIECE = 128
# Fewer tokens are as soon computed as copied.
_LEAST_COPY = 32
# What the order of prompts goes by.
_IDS = attrgetter("ids")


def _no_rows(rows: int, prompts: int, group_size: int) -> CacheRows:
    by_row = (np.zeros(rows, np.int32) for _ in range(4))
    by_prompt = (np.zeros(prompts, np.int32) for _ in range(2))
    return CacheRows(*by_row, np.zeros((prompts, group_size), np.int32), *by_prompt)


def no_tokens(shape: CacheShape, *, size: int) -> tuple[np.ndarray, CacheRows]:
    """Describe nothing to add to the cache: for each part so many tokens, BT, and their row."""
    return np.zeros((shape.parts, size), np.int32), _no_rows(shape.parts, shape.parts, 1)


class SlotState(NamedTuple):
    """What the decode loop needs to know of the slots that it goes over; NumPy on the host."""

    rows: CacheRows  # one new token where a reply is being sampled
    prompt_tokens_S: Any  # length of the prompt in the cache
    token_S: Any  # the token that is fed next
    episode_S: Any  # number of the episode, which decides its random stream
    left_S: Any  # tokens that the reply may still take
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
            *(np.zeros(slots, np.int32) for _ in range(4)),
            *(np.ones(slots, np.float32) for _ in range(2)),
        )


@dataclass(slots=True, eq=False)
class KeptPrompt:
    """A row of the cache for a prompt."""

    row: int  # inside of the part
    slots: list[int | None]  # those that sample from it, None where one more can
    ids: tuple[int, ...] = ()
    filled: int = 0  # how many of them are in the cache

    @property
    def is_in_use(self) -> bool:
        """Tell whether anybody samples from it."""
        return any(slot is not None for slot in self.slots)

    @property
    def missing(self) -> Sequence[int]:
        """Return the ids that the cache has to hold, and does not yet."""
        return self.ids[self.filled :]

    def describe(self, rows: CacheRows, part: int) -> None:
        """Tell where its new tokens go."""
        rows.row_B[part] = self.row


@dataclass(slots=True, eq=False)
class SlotEpisode:
    """What the sampler knows of an episode; `logprobs` and `versions` are of its reply."""

    number: int
    prompt_ids: tuple[int, ...]  # those of its ids that are kept as a prompt
    ids: list[int] = field(default_factory=list)
    left: int = 0  # tokens that the reply may still take; 0 between two requests
    temperature: float = 1.0
    top_p: float = 1.0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    part: int = 0  # of the mesh
    slot: int | None = None  # inside of the part; None while it waits for one
    prompt: KeptPrompt = field(default_factory=lambda: KeptPrompt(0, []))
    filled: int = 0  # how many of its ids after the prompt are in the cache

    def start(self, request: Request) -> None:
        """Begin a reply."""
        self.ids = list(request.ids)
        self.left = request.max_tokens
        self.temperature, self.top_p = request.temperature, request.top_p
        self.logprobs, self.versions = [], []

    @property
    def missing(self) -> Sequence[int]:
        """Return the ids that the slot has to hold before the last token is fed, and does not."""
        return self.ids[len(self.prompt_ids) + self.filled : -1]

    def describe(self, rows: CacheRows, part: int) -> None:
        """Tell where its new tokens go."""
        rows.row_B[part], rows.prompt_N[part] = self.slot, self.prompt.row
        rows.prompt_tokens_N[part] = len(self.prompt_ids)


class _Part:
    """The slots and prompts of a part of the mesh.

    Attributes:
        episodes: By slot; None where it is free.
        kept: Prompts by their ids, which several rows may have.
        unused: Prompts that nobody samples from, the longest unused first.
        to_fill: Prompts in the order in which they are filled, and perhaps some that are.
        filled: Those that the cache holds, in the order of their ids.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.episodes: list[SlotEpisode | None] = [None] * shape.slots
        rows = range(shape.prompts)
        self._prompts = [KeptPrompt(row, [None] * shape.group_size) for row in rows]
        self.kept: dict[tuple[int, ...], list[KeptPrompt]] = {}
        self.unused = dict.fromkeys(self._prompts)
        self.to_fill: deque[KeptPrompt] = deque()
        self.filled: list[KeptPrompt] = []

    def forget(self) -> None:
        """Forget what the cache holds, and the prompts that nobody samples from."""
        for episode in self.episodes:
            if episode is not None:
                episode.filled = 0
        for prompt in self._prompts:
            prompt.filled = 0
        self.to_fill, self.filled = deque(p for p in self._prompts if p.is_in_use), []
        self.unused = {prompt: None for prompt in self._prompts if not prompt.is_in_use}
        for prompt in self.unused:
            self._give_up(prompt)

    def row_for(self, ids: tuple[int, ...]) -> KeptPrompt | None:
        """Return a kept prompt that one more slot may share, or else the row to keep it in."""
        same = (prompt for prompt in self.kept.get(ids, ()) if None in prompt.slots)
        return next(same, None) or next(iter(self.unused), None)

    def join(self, episode: SlotEpisode, prompt: KeptPrompt) -> None:
        """Give an episode the lowest free slot, beside a prompt from `row_for`."""
        if prompt.ids != episode.prompt_ids:
            self._give_up(prompt)
            prompt.ids, prompt.filled = episode.prompt_ids, 0
            self.kept.setdefault(prompt.ids, []).append(prompt)
        if prompt.missing and not prompt.is_in_use:
            self.to_fill.append(prompt)
        self.unused.pop(prompt, None)
        slot = self.episodes.index(None)
        prompt.slots[prompt.slots.index(None)] = slot
        self.episodes[slot] = episode
        episode.slot, episode.prompt, episode.filled = slot, prompt, 0

    def leave(self, episode: SlotEpisode) -> None:
        """Free an episode's slot."""
        slot, prompt = episode.slot, episode.prompt
        assert slot is not None
        prompt.slots[prompt.slots.index(slot)] = None
        if not prompt.is_in_use:
            self.unused[prompt] = None
        self.episodes[slot] = episode.slot = None

    def unfilled(self) -> KeptPrompt | None:
        """Return the prompt that is filled next, if any."""
        while self.to_fill and not (self.to_fill[0].is_in_use and self.to_fill[0].missing):
            self.to_fill.popleft()
        return self.to_fill[0] if self.to_fill else None

    def beginning(self, ids: tuple[int, ...]) -> tuple[int, KeptPrompt | None]:
        """Return the filled prompt that begins as these ids do for longest, after for how many.

        In the order of ids it stands next to them: the time grows with the logarithm of the number
        of prompts.
        """
        at = bisect_right(self.filled, ids, key=_IDS)
        near = self.filled[max(at - 1, 0) : at + 1]
        found = [(_shared(prompt.ids, ids), prompt) for prompt in near]
        return max(found, key=lambda pair: pair[0], default=(0, None))

    def _give_up(self, prompt: KeptPrompt) -> None:
        """Forget a prompt that its row no longer keeps."""
        if prompt in (same := self.kept.get(prompt.ids, [])):
            same.remove(prompt)
            if not same:
                del self.kept[prompt.ids]
        if prompt in self.filled:
            self.filled.remove(prompt)
        prompt.ids = ()


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count the ids that two lists begin with alike."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(ids), len(others)))


class Slots:
    """The slots and the kept prompts of every part of the mesh.

    A prompt that nobody samples from stays until its row is needed, the longest unused first.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._shape, self._parts = shape, [_Part(shape) for _ in range(shape.parts)]
        self.tokens_filled = 0

    def _active_in(self, part: _Part) -> Iterator[SlotEpisode]:
        return (episode for episode in part.episodes if episode and episode.left)

    def forget(self) -> None:
        """Forget cached tokens; assign rows as a fresh sampler would."""
        for part in self._parts:
            part.forget()

    def assign(self, episode: SlotEpisode) -> bool:
        """Give an episode a slot beside its prompt, if there are both.

        Preferred is a part where the prompt is in use, then one that keeps it, then the emptiest.
        """
        candidates = []
        for number, part in enumerate(self._parts):
            free = part.episodes.count(None)
            prompt = part.row_for(episode.prompt_ids) if free else None
            if prompt is not None:
                is_kept = prompt.ids == episode.prompt_ids
                rank = (not (is_kept and prompt.is_in_use), not is_kept, -free, number)
                candidates.append((rank, prompt))
        if not candidates:
            return False
        (*_, episode.part), prompt = min(candidates, key=lambda candidate: candidate[0])
        self._parts[episode.part].join(episode, prompt)
        return True

    def leave(self, episode: SlotEpisode) -> None:
        """Free an episode's slot."""
        self._parts[episode.part].leave(episode)

    def next_copy(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return which prompts begin as the next ones to fill do, such as with the same schema, and
        these, by their rows in every part, B; None for none. What they share counts as filled.

        States of linear attention are known at the end of a prompt alone, and never shared.
        """
        if self._shape.has_states:
            return None
        source_B, row_B = (np.zeros(self._shape.parts, np.int32) for _ in range(2))
        for number, part in enumerate(self._parts):
            prompt = part.unfilled()
            if prompt is None or prompt.filled:
                continue
            # The last token of a prompt is always computed.
            ids = prompt.ids[:-1]
            shared, source = part.beginning(ids)
            if source is not None and shared >= _LEAST_COPY:
                source_B[number], row_B[number], prompt.filled = source.row, prompt.row, shared
        return (source_B, row_B) if (source_B != row_B).any() else None

    def fill_prompts(self) -> tuple[np.ndarray, CacheRows] | None:
        """Return the next tokens of prompts that the cache misses, padded on the right, and where
        they go: for every part those of one prompt; None for no more. They count as filled.
        """
        prompts = [part.unfilled() for part in self._parts]
        tokens = self._next_piece(prompts, self._shape.pieces)
        for part, prompt in zip(self._parts, prompts, strict=True):
            if prompt is not None and not prompt.missing:
                insort(part.filled, prompt, key=_IDS)
        return tokens

    def fill_slots(self) -> tuple[np.ndarray, CacheRows] | None:
        """Return the next tokens of slots, as `fill_prompts` does; prompts are filled."""
        waiting = [
            next((episode for episode in self._active_in(part) if episode.missing), None)
            for part in self._parts
        ]
        return self._next_piece(waiting, (min(_TURN_PIECE, self._shape.slot_tokens),))

    def _next_piece(
        self, rows_of: Sequence[KeptPrompt | SlotEpisode | None], sizes: Sequence[int]
    ) -> tuple[np.ndarray, CacheRows] | None:
        """Take the next missing tokens of a row of every part.

        There are few sizes, so that few programs are compiled: a piece is the largest that is full,
        or one that is but for less than the smallest.
        """
        longest = max((len(row.missing) for row in rows_of if row), default=0)
        if not longest:
            return None
        size = max((size for size in sizes if size < longest + sizes[0]), default=sizes[0])
        tokens_BT, rows = no_tokens(self._shape, size=size)
        for part, row in enumerate(rows_of):
            if row is None:
                continue
            ids = row.missing[:size]
            tokens_BT[part, : len(ids)] = ids
            rows.start_B[part], rows.count_B[part] = row.filled, len(ids)
            row.describe(rows, part)
            row.filled += len(ids)
            self.tokens_filled += len(ids)
        return tokens_BT, rows

    def state(self) -> tuple[SlotState, list[tuple[int, SlotEpisode]]]:
        """Describe the slots that a reply is sampled in to the decode loop, and perhaps others;
        return the episodes, each with its row there; none where no reply is asked for.
        """
        shape = self._shape
        by_part = [list(self._active_in(part)) for part in self._parts]
        size = next(size for size in shape.rows if size >= max(map(len, by_part)))
        state, active = SlotState.idle(shape, rows=size), list[tuple[int, SlotEpisode]]()
        rows = state.rows
        prompts = len(rows.prompt_tokens_N) // shape.parts
        for part, episodes in enumerate(by_part):
            numbers: dict[int, int] = {}
            for number, episode in enumerate(episodes):
                slot, prompt = episode.slot, episode.prompt
                assert slot is not None
                row, n = slot, prompt.row
                if rows.row_B is not None:
                    row, n = number, numbers.setdefault(prompt.row, len(numbers))
                s, at = part * size + row, part * prompts + n
                if rows.row_B is not None:
                    rows.row_B[s], rows.prompt_N[at] = slot, prompt.row
                g = prompt.slots.index(slot)
                rows.row_NG[at, g], rows.member_B[s] = row, n * shape.group_size + g
                rows.prompt_tokens_N[at] = len(episode.prompt_ids)
                rows.start_B[s], rows.count_B[s] = episode.filled, 1
                state.prompt_tokens_S[s] = len(episode.prompt_ids)
                state.token_S[s], state.episode_S[s] = episode.ids[-1], episode.number
                state.left_S[s] = episode.left
                state.temperature_S[s] = episode.temperature
                state.top_p_S[s] = episode.top_p
                active.append((s, episode))
        return state, active
