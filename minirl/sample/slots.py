"""Who sits where: episodes in slots, each with pages of its own and a place beside its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minirl.sample.cache import Owners
from minirl.sample.decode import Draws, Job
from minirl.sample.pages import FreePages, Pool, Pools, Prompt, PromptTable
from minirl.types import Decoding, Request


@dataclass(slots=True, eq=False)
class Episode:
    """What the sampler knows of an episode.

    Attributes:
        number: As its requests name it.
        order: Its place in the order of arrival.
        prompt_ids: Those of its ids that are kept as a prompt.
        ids: All its tokens so far.
        left: How many tokens the running reply may still take; 0 between two requests.
        decoding: How they are drawn.
        new_ids: Tokens of the running reply.
        logprobs: Their log-probabilities.
        slot: Its slot; None without one.
        prompt: The kept prompt that it sits beside.
        pages: Pages of its own.
        cached: How many of its ids have their keys and values in pages.
    """

    number: int
    order: int
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    left: int = 0
    decoding: Decoding = field(default_factory=Decoding)
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    slot: int | None = None
    prompt: Prompt | None = None
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def own_tokens(self) -> int:
        """Return how many tokens are in pages of its own."""
        return self.cached - len(self.prompt_ids)

    def start(self, request: Request) -> None:
        """Begin a reply."""
        self.ids = list(request.ids)
        self.left, self.decoding = request.max_tokens, request.decoding
        self.new_ids, self.logprobs = [], []


class Seats:
    """The slots and pages of every part of the mesh, as the host sees them."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._slots: list[Episode | None] = [None] * (pools.parts * pools.slots)
        self._prompts = [
            PromptTable(pools.prompts, slots=pools.slots, group_size=pools.group_size)
            for _ in range(pools.parts)
        ]
        self._own = [FreePages(pools.own.pages) for _ in range(pools.parts)]

    def seated(self) -> list[Episode]:
        """Return the episodes that have a slot, by slot."""
        return [episode for episode in self._slots if episode is not None]

    def part(self, episode: Episode) -> int:
        """Return the part that an episode sits in."""
        assert episode.slot is not None
        return episode.slot // self._pools.slots

    def forget_prompts(self) -> None:
        """Drop the kept prompts; nobody may be sampling."""
        for prompts in self._prompts:
            prompts.forget()

    def pages_in_use(self) -> int:
        """Count the pages that seated episodes and their prompts have, in all parts."""
        of_prompts = sum(len(p.pages) for prompts in self._prompts for p in prompts.used)
        return of_prompts + sum(len(episode.pages) for episode in self.seated())

    def seat(self, episode: Episode) -> list[Job] | None:
        """Give an episode a slot, its place beside its prompt, and pages for all but its last id.

        Returns:
            What is to be computed for the prompt, nothing where it is kept; None without room.
        """
        # An episode that comes again brings what it had of its own.
        pages = self._pools.own.pages_for(len(episode.ids) - len(episode.prompt_ids))
        parts = [part for part in range(self._pools.parts) if self._has_room(part, episode, pages)]
        if not parts:
            return None
        part = min(parts, key=lambda part: self._rank(part, episode))
        slot = next(slot for slot in self._range(part) if self._slots[slot] is None)
        self._slots[slot], episode.slot = episode, slot
        prompt, is_new = self._prompts[part].join(episode.prompt_ids, slot)
        episode.prompt, episode.cached = prompt, len(episode.prompt_ids)
        episode.pages = self._own[part].take(pages)
        return [Job(part, prompt.ids, 0, prompt.pages)] if is_new and prompt.ids else []

    def leave(self, episode: Episode) -> None:
        """Take an episode's slot and pages away."""
        part = self.part(episode)
        assert episode.slot is not None
        assert episode.prompt is not None
        self._prompts[part].leave(episode.prompt, episode.slot)
        self._own[part].give(episode.pages)
        self._slots[episode.slot] = None
        episode.slot, episode.prompt, episode.pages, episode.cached = None, None, [], 0

    def reserve(self, episode: Episode, tokens: int) -> bool:
        """Give an episode pages for so many tokens of its own, if there are enough."""
        free = self._own[self.part(episode)]
        missing = self._pools.own.pages_for(tokens) - len(episode.pages)
        if missing > len(free):
            return False
        episode.pages += free.take(max(0, missing))
        return True

    def youngest(self, part: int) -> Episode:
        """Return whose pages are taken first: who waits for a request, then who came last."""
        here = [episode for episode in self.seated() if self.part(episode) == part]
        return max(here, key=lambda episode: (not episode.left, episode.order))

    def unfilled(self) -> list[Job]:
        """List the new tokens of later turns, all but the last of each, and count them as kept."""
        jobs = []
        for episode in self.seated():
            start, end = episode.own_tokens, len(episode.ids) - 1
            if episode.left and episode.cached < end:
                assert episode.prompt is not None
                ids = episode.ids[episode.cached : end]
                part, prompt = self.part(episode), episode.prompt
                jobs.append(
                    Job(part, ids, start, prompt.pages, len(prompt.ids), tuple(episode.pages))
                )
                episode.cached = end
        return jobs

    def owners(self) -> tuple[list[Owners], list[Owners]]:
        """Tell whose the pages are that active slots look at, by segment: prompts', own."""
        prompts = _Table(self._pools, self._pools.prompts, self._pools.group_size)
        for part, table in enumerate(self._prompts):
            for prompt in table.used:
                slots = {
                    place: slot % self._pools.slots
                    for place, slot in prompt.slots.items()
                    if self._is_active(slot)
                }
                prompts.add(part, prompt.pages, len(prompt.ids), slots)
        own = _Table(self._pools, self._pools.own, 1)
        for episode in self.seated():
            if episode.left and episode.slot is not None:
                slots = {0: episode.slot % self._pools.slots}
                own.add(self.part(episode), episode.pages, episode.own_tokens, slots)
        return prompts.segments(), own.segments()

    def draws(self) -> Draws:
        """Describe every slot to the decode loop."""
        draws = Draws.idle(self._pools)
        length = self._pools.own.page_tokens
        for episode in self.seated():
            s = episode.slot
            pages = episode.pages[episode.own_tokens // length :][: draws.pages_SM.shape[1]]
            draws.pages_SM[s, : len(pages)] = pages
            draws.prompt_tokens_S[s] = len(episode.prompt_ids)
            draws.own_tokens_S[s] = episode.own_tokens
            draws.token_S[s], draws.left_S[s] = episode.ids[-1], episode.left
            draws.is_active_S[s] = episode.left > 0
            draws.episode_S[s] = episode.number
            draws.temperature_S[s] = episode.decoding.temperature
            draws.top_p_S[s] = episode.decoding.top_p
        return draws

    def _range(self, part: int) -> range:
        return range(part * self._pools.slots, (part + 1) * self._pools.slots)

    def _is_active(self, slot: int) -> bool:
        episode = self._slots[slot]
        return episode is not None and episode.left > 0

    def _has_room(self, part: int, episode: Episode, pages: int) -> bool:
        """Tell whether an episode could sit in a part and leave a page to all that will need one:
        else it would soon have to go again.
        """
        here = [other for slot in self._range(part) if (other := self._slots[slot])]
        growing = sum(
            len(other.pages) < self._pools.own.pages_for(other.own_tokens + other.left)
            for other in here
        )
        return (
            len(here) < self._pools.slots
            and len(self._own[part]) >= pages + growing
            and self._prompts[part].has_room(episode.prompt_ids)
        )

    def _rank(self, part: int, episode: Episode) -> tuple[bool, bool, int]:
        """Prefer a part where the prompt is in use, then where it is kept, then the emptiest."""
        prompt = self._prompts[part].find(episode.prompt_ids)
        taken = sum(self._slots[slot] is not None for slot in self._range(part))
        return prompt is None or not prompt.slots, prompt is None, taken


class _Table:
    """The owners of a pool's pages, in the making."""

    def __init__(self, pools: Pools, pool: Pool, places: int) -> None:
        self._pool = pool
        self._slot = np.full((pools.parts, pool.pages, places), -1, np.int32)
        self._count = np.zeros((pools.parts, pool.pages), np.int32)

    def add(self, part: int, pages: Sequence[int], tokens: int, slots: dict[int, int]) -> None:
        """Give the first pages, which hold so many tokens, to slots by their place."""
        if not slots:
            return
        pages = pages[: self._pool.pages_for(tokens)]
        first = np.arange(len(pages)) * self._pool.page_tokens
        self._count[part, pages] = np.minimum(tokens - first, self._pool.page_tokens)
        for place, slot in slots.items():
            self._slot[part, pages, place] = slot

    def segments(self) -> list[Owners]:
        """Cut the table into the segments that anybody looks at."""
        used = np.flatnonzero(self._count.any(axis=0))
        count = self._pool.used_segments(int(used[-1]) + 1 if len(used) else 0)
        found, start = [], 0
        for pages in self._pool.segments[:count]:
            here = slice(start, start + pages)
            slot_XG = self._slot[:, here].reshape(-1, self._slot.shape[-1])
            found.append(Owners(slot_XG, self._count[:, here].reshape(-1)))
            start += pages
        return found
