"""Slots and kept prompts, as the host sees them: which episode is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minirl.sample.cache import CacheShape
from minirl.sample.decode import Prefill, SlotState
from minirl.types import Decoding, Request


@dataclass(slots=True, eq=False)
class Episode:
    """What the sampler knows of an episode.

    Attributes:
        number: As its requests name it.
        prompt_ids: Those of its ids that are kept as a prompt.
        ids: All its tokens so far.
        left: How many tokens the running reply may still take; 0 between two requests.
        decoding: How they are drawn.
        new_ids: Tokens of the running reply.
        logprobs: Their log-probabilities.
        versions: Weight versions that sampled them.
        slot: Its slot; None while it waits for one.
        prompt: The kept prompt.
        own_tokens: How many of its ids after the prompt are in the cache.
    """

    number: int
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    left: int = 0
    decoding: Decoding = field(default_factory=Decoding)
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    slot: int | None = None
    prompt: Prompt | None = None
    own_tokens: int = 0

    def start(self, request: Request) -> None:
        """Begin a reply."""
        self.ids = list(request.ids)
        self.left, self.decoding = request.max_tokens, request.decoding
        self.new_ids, self.logprobs, self.versions = [], [], []

    @property
    def known(self) -> int:
        """Count the ids after the prompt that the cache has to hold: the last is fed next."""
        return len(self.ids) - 1 - len(self.prompt_ids)


@dataclass(slots=True, eq=False)
class Prompt:
    """A row of the cache for a prompt.

    Attributes:
        row: Its number inside of the part.
        ids: The prompt; None where the row is free.
        places: The slots that sample from it, by place; None where nobody does.
        is_filled: Whether its keys and values are those of the current weights.
        used: When somebody last began to sample from it.
    """

    row: int
    places: list[int | None]
    ids: tuple[int, ...] | None = None
    is_filled: bool = False
    used: int = 0

    @property
    def is_in_use(self) -> bool:
        """Tell whether anybody samples from it."""
        return any(slot is not None for slot in self.places)


class Slots:
    """The slots and the kept prompts of every part of the mesh.

    A prompt that nobody samples from stays until its row is needed, the longest unused first.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._episodes: list[Episode | None] = [None] * (shape.parts * shape.slots)
        self._prompts = [
            [Prompt(row, [None] * shape.group_size) for row in range(shape.prompts)]
            for _ in range(shape.parts)
        ]
        self._joined = 0

    def episodes(self) -> list[Episode]:
        """Return the episodes that have a slot, by slot."""
        return [episode for episode in self._episodes if episode is not None]

    def active(self) -> list[Episode]:
        """Return those that a reply is being sampled for."""
        return [episode for episode in self.episodes() if episode.left]

    def forget(self) -> None:
        """Let everything in the cache be computed again."""
        for episode in self.episodes():
            episode.own_tokens = 0
        for prompts in self._prompts:
            for prompt in prompts:
                prompt.is_filled = False

    def place(self, episode: Episode) -> bool:
        """Give an episode a slot and a place beside its prompt, if there are both."""
        found = [
            (prompt, part)
            for part in range(self._shape.parts)
            if self._free_slot(part) is not None
            and (prompt := self._row_for(part, episode.prompt_ids)) is not None
        ]
        if not found:
            return False
        prompt, part = min(found, key=lambda one: self._rank(*one, episode.prompt_ids))
        slot = self._free_slot(part)
        assert slot is not None
        if prompt.ids != episode.prompt_ids:
            prompt.ids, prompt.is_filled = episode.prompt_ids, False
        self._joined += 1
        prompt.used = self._joined
        prompt.places[prompt.places.index(None)] = slot
        self._episodes[slot] = episode
        episode.slot, episode.prompt, episode.own_tokens = slot, prompt, 0
        return True

    def leave(self, episode: Episode) -> None:
        """Free an episode's slot."""
        assert episode.slot is not None
        assert episode.prompt is not None
        places = episode.prompt.places
        places[places.index(episode.slot)] = None
        self._episodes[episode.slot] = None
        episode.slot, episode.prompt = None, None

    def missing_prompts(self) -> list[Prefill]:
        """List the prompts in use that are to be computed, and count them as filled."""
        work = []
        for part, prompts in enumerate(self._prompts):
            for prompt in prompts:
                if prompt.ids and prompt.is_in_use and not prompt.is_filled:
                    work.append(Prefill(part, prompt.ids, 0, prompt.row))
                    prompt.is_filled = True
        return work

    def missing_turns(self) -> list[Prefill]:
        """List the tokens of slots that are to be computed, and count them as filled."""
        work = []
        for episode in self.active():
            start, end = episode.own_tokens, episode.known
            if start < end:
                assert episode.slot is not None
                assert episode.prompt is not None
                first = len(episode.prompt_ids)
                part, slot = divmod(episode.slot, self._shape.slots)
                ids = episode.ids[first + start : first + end]
                work.append(Prefill(part, ids, start, episode.prompt.row, first, slot))
                episode.own_tokens = end
        return work

    def state(self) -> SlotState:
        """Describe every slot, and the prompts that are looked at, to the decode loop."""
        shape = self._shape
        active = self.active()
        last = max(episode.prompt.row for episode in active if episode.prompt)
        prompts = next(count for count in shape.prompt_counts if count > last)
        state = SlotState.idle(shape, prompts=prompts)
        for episode in active:
            s, prompt = episode.slot, episode.prompt
            assert s is not None
            assert prompt is not None
            part, slot = divmod(s, shape.slots)
            place = prompt.places.index(s)
            state.sharing.row_NG[part * prompts + prompt.row, place] = slot
            state.sharing.tokens_N[part * prompts + prompt.row] = len(episode.prompt_ids)
            state.sharing.place_B[s] = prompt.row * shape.group_size + place
            state.prompt_tokens_S[s] = len(episode.prompt_ids)
            state.own_tokens_S[s], state.token_S[s] = episode.own_tokens, episode.ids[-1]
            state.is_active_S[s], state.episode_S[s] = True, episode.number
            state.temperature_S[s] = episode.decoding.temperature
            state.top_p_S[s] = episode.decoding.top_p
        return state

    def _range(self, part: int) -> range:
        return range(part * self._shape.slots, (part + 1) * self._shape.slots)

    def _free_slot(self, part: int) -> int | None:
        return next((slot for slot in self._range(part) if self._episodes[slot] is None), None)

    def _row_for(self, part: int, ids: Sequence[int]) -> Prompt | None:
        """Return a kept prompt with a free place, or else the row to keep it in.

        Low rows are taken first, so that those in use lie together.
        """
        prompts = self._prompts[part]
        same = [prompt for prompt in prompts if prompt.ids == ids and None in prompt.places]
        if same:
            return same[0]
        unused = [prompt for prompt in prompts if not prompt.is_in_use]
        usual = self._shape.prompt_counts[0]
        return min(unused, key=lambda prompt: (prompt.row >= usual, prompt.used), default=None)

    def _rank(self, prompt: Prompt, part: int, ids: Sequence[int]) -> tuple[bool, bool, int]:
        """Prefer a part where the prompt is in use, then where it is kept, then the emptiest."""
        taken = sum(self._episodes[slot] is not None for slot in self._range(part))
        return prompt.ids != ids or not prompt.is_in_use, prompt.ids != ids, taken
