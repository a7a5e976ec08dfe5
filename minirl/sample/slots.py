"""Slots and kept prompts, as the host sees them, and what compiled programs are told of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from minirl.sample.attention import NewTokens, Sharing
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


class FillRows(NamedTuple):
    """Known tokens to add to the cache, of one prompt or slot in every part."""

    tokens_BT: Any  # padded on the right
    new: NewTokens
    prompt_B: Any  # the prompt of each slot
    prompt_tokens_B: Any  # its length; 0 where prompts are filled

    @classmethod
    def empty(cls, shape: CacheShape, *, size: int) -> FillRows:
        """Describe rows without tokens."""
        row_B, start_B, count_B, *prompt = (np.zeros(shape.parts, np.int32) for _ in range(5))
        new = NewTokens(row_B, start_B, count_B)
        return cls(np.zeros((shape.parts, size), np.int32), new, *prompt)


class SlotState(NamedTuple):
    """What the decode loop needs to know of the slots that it goes over; NumPy on the host."""

    row_S: Any  # the slot, inside of its part; None for all in order
    sharing: Sharing
    prompt_tokens_S: Any  # length of the prompt in the cache
    own_tokens_S: Any  # tokens after it in the cache
    token_S: Any  # the token that is fed next
    is_active_S: Any  # whether a reply is being sampled
    episode_S: Any  # number of the episode, which decides its random stream
    temperature_S: Any
    top_p_S: Any

    @classmethod
    def idle(cls, shape: CacheShape, *, rows: int) -> SlotState:
        """Describe so many slots of each part, without episodes."""
        is_all = rows == shape.slots
        slots = shape.parts * rows
        prompts = shape.parts * (shape.prompts if is_all else min(shape.prompts, rows))

        def zeros(*sizes: int) -> np.ndarray:
            return np.zeros(sizes, np.int32)

        return cls(
            None if is_all else zeros(slots),
            Sharing(
                zeros(prompts, shape.group_size),
                zeros(slots),
                zeros(prompts),
                None if is_all else zeros(prompts),
            ),
            *(zeros(slots) for _ in range(3)),
            np.zeros(slots, bool),
            zeros(slots),
            *(np.ones(slots, np.float32) for _ in range(2)),
        )


@dataclass(slots=True, eq=False)
class KeptPrompt:
    """A row of the cache for a prompt."""

    row: int  # inside of the part
    places: list[int | None]  # the slots that sample from it
    ids: tuple[int, ...] | None = None
    filled: int = 0  # how many of them are in the cache
    used: int = 0  # when somebody last began to sample from it

    @property
    def is_in_use(self) -> bool:
        """Tell whether anybody samples from it."""
        return any(slot is not None for slot in self.places)

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
        """Give an episode a slot and a place beside its prompt, if there are both.

        Preferred is a part where the prompt is in use, then one that keeps it, then the emptiest.
        """
        found = []
        for part, prompts in enumerate(self._prompts):
            slots = range(part * self._shape.slots, (part + 1) * self._shape.slots)
            free = [slot for slot in slots if self._episodes[slot] is None]
            prompt = self._row_for(prompts, episode.prompt_ids) if free else None
            if prompt is not None:
                is_kept = prompt.ids == episode.prompt_ids
                rank = (not (is_kept and prompt.is_in_use), not is_kept, -len(free), part)
                found.append((rank, free[0], prompt))
        if not found:
            return False
        _, slot, prompt = min(found, key=lambda one: one[0])
        if prompt.ids != episode.prompt_ids:
            prompt.ids, prompt.filled = episode.prompt_ids, 0
        self._joined += 1
        prompt.used = self._joined
        prompt.places[prompt.places.index(None)] = slot
        self._episodes[slot] = episode
        episode.slot, episode.prompt, episode.filled = slot, prompt, 0
        return True

    def leave(self, episode: SlotEpisode) -> None:
        """Free an episode's slot."""
        assert episode.slot is not None
        assert episode.prompt is not None
        places = episode.prompt.places
        places[places.index(episode.slot)] = None
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
            found = max(self._prompts[part], key=lambda other: _shared(prompt, other))
            if (shared := _shared(prompt, found)) >= _LEAST_COPY:
                source_B[part], row_B[part] = found.row, prompt.row
                prompt.filled = shared
        return CopyRows(source_B, row_B) if (source_B != row_B).any() else None

    def next_fill(self, *, of_slots: bool) -> FillRows | None:
        """Return the next tokens that the cache misses, of prompts or of slots; None for no more.

        They count as filled. There are few sizes, so that few programs are compiled: a piece is
        the largest that is full, or one that is but for less than the smallest.
        """
        shape = self._shape
        sizes = (min(_TURN_PIECE, shape.own_tokens),) if of_slots else shape.pieces
        waiting = [self._first_unfilled(part, of_slots=of_slots) for part in range(shape.parts)]
        if not any(waiting):
            return None
        longest = max(len(one.known_ids) - one.filled for one in waiting if one)
        size = max((size for size in sizes if size < longest + sizes[0]), default=sizes[0])
        rows = FillRows.empty(shape, size=size)
        for part, one in enumerate(waiting):
            if one is None:
                continue
            ids = one.known_ids[one.filled : one.filled + size]
            rows.tokens_BT[part, : len(ids)] = ids
            rows.new.start_B[part], rows.new.count_B[part] = one.filled, len(ids)
            if isinstance(one, KeptPrompt):
                rows.new.row_B[part] = one.row
                self.prompts_filled += len(ids) == len(one.known_ids) - one.filled
            else:
                assert one.slot is not None
                assert one.prompt is not None
                rows.new.row_B[part] = one.slot % shape.slots
                rows.prompt_B[part] = one.prompt.row
                rows.prompt_tokens_B[part] = len(one.prompt_ids)
            one.filled += len(ids)
        return rows

    def _first_unfilled(self, part: int, *, of_slots: bool) -> SlotEpisode | KeptPrompt | None:
        size = self._shape.slots
        candidates: list[Any] = [prompt for prompt in self._prompts[part] if prompt.is_in_use]
        if of_slots:
            slots = self._episodes[part * size : (part + 1) * size]
            candidates = [episode for episode in slots if episode and episode.left]
        return next((one for one in candidates if one.filled < len(one.known_ids)), None)

    def state(self) -> tuple[SlotState, list[int]]:
        """Describe the slots that a reply is sampled in to the decode loop, and perhaps others;
        return the place there of each of `active()`.
        """
        shape, active = self._shape, self.active()
        by_part: list[list[SlotEpisode]] = [[] for _ in range(shape.parts)]
        for episode in active:
            assert episode.slot is not None
            by_part[episode.slot // shape.slots].append(episode)
        rows = next(size for size in shape.rows if size >= max(map(len, by_part)))
        state, places = SlotState.idle(shape, rows=rows), []
        prompts = len(state.sharing.tokens_N) // shape.parts
        for part, episodes in enumerate(by_part):
            known: dict[int, int] = {}
            for number, episode in enumerate(episodes):
                assert episode.slot is not None
                assert episode.prompt is not None
                slot, prompt = episode.slot % shape.slots, episode.prompt
                if state.row_S is None:
                    row, n = slot, prompt.row
                else:
                    row, n = number, known.setdefault(prompt.row, len(known))
                s, at = part * rows + row, part * prompts + n
                place = prompt.places.index(episode.slot)
                state.sharing.row_NG[at, place] = row
                state.sharing.place_B[s] = n * shape.group_size + place
                state.sharing.tokens_N[at] = len(episode.prompt_ids)
                if state.row_S is not None:
                    state.row_S[s], state.sharing.prompt_N[at] = slot, prompt.row
                state.prompt_tokens_S[s] = len(episode.prompt_ids)
                state.own_tokens_S[s], state.token_S[s] = episode.filled, episode.ids[-1]
                state.is_active_S[s], state.episode_S[s] = True, episode.number
                state.temperature_S[s] = episode.decoding.temperature
                state.top_p_S[s] = episode.decoding.top_p
                places.append(s)
        return state, places

    def _row_for(self, prompts: list[KeptPrompt], ids: tuple[int, ...]) -> KeptPrompt | None:
        """Return a kept prompt with a free place, or else the row to keep it in."""
        same = [prompt for prompt in prompts if prompt.ids == ids and None in prompt.places]
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
