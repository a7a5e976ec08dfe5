"""Which prompt is kept in which row of the store, and which slots sample from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Seat:
    """A place beside a prompt; `is_new` when the prompt must be computed first."""

    prompt: int
    cell: int
    is_new: bool


class PromptTable:
    """N kept prompts, each with room for the G slots that sample from it.

    A prompt that nobody samples from stays until its row is needed, the longest unused first.
    """

    def __init__(self, *, prompts: int, group_size: int) -> None:
        self.size = prompts
        self.group_size = group_size
        self._slots: list[dict[int, int]] = [{} for _ in range(prompts)]
        self._left_at = [0] * prompts
        self._clock = 0
        self.forget()

    def forget(self) -> None:
        """Drop what is kept; nobody may be sampling."""
        self._ids: list[tuple[int, ...] | None] = [None] * self.size

    def ids(self, prompt: int) -> tuple[int, ...]:
        """Return the tokens of a kept prompt."""
        ids = self._ids[prompt]
        assert ids is not None
        return ids

    def length(self, prompt: int) -> int:
        """Return the tokens of a kept prompt, counted."""
        return len(self.ids(prompt))

    def join(self, ids: tuple[int, ...], slot: int) -> Seat | None:
        """Seat a slot beside its prompt; None when no row is free."""
        for prompt, (kept, slots) in enumerate(zip(self._ids, self._slots, strict=True)):
            if kept == ids and len(slots) < self.group_size:
                return self._sit(prompt, slot, is_new=False)
        free = [prompt for prompt in range(self.size) if not self._slots[prompt]]
        if not free:
            return None
        prompt = min(free, key=lambda p: (self._ids[p] is not None, self._left_at[p], p))
        self._ids[prompt] = ids
        return self._sit(prompt, slot, is_new=True)

    def leave(self, prompt: int, cell: int) -> None:
        """Take a slot away from its prompt."""
        del self._slots[prompt][cell % self.group_size]
        self._clock += 1
        self._left_at[prompt] = self._clock

    def lengths(self) -> np.ndarray:
        """Return the length of every row, N; 0 where there is none."""
        return np.array([len(ids or ()) for ids in self._ids], np.int32)

    def slots(self) -> np.ndarray:
        """Return the slots beside every prompt, NG; 0 where the place is empty."""
        slot_NG = np.zeros((self.size, self.group_size), np.int32)
        for prompt, slots in enumerate(self._slots):
            for place, slot in slots.items():
                slot_NG[prompt, place] = slot
        return slot_NG

    def used_rows(self) -> int:
        """Return the rows up to the last one that somebody samples from."""
        return max((n + 1 for n, slots in enumerate(self._slots) if slots), default=0)

    def longest(self) -> int:
        """Return the length of the longest prompt that somebody samples from."""
        used = [len(ids or ()) for ids, s in zip(self._ids, self._slots, strict=True) if s]
        return max(used, default=0)

    def _sit(self, prompt: int, slot: int, *, is_new: bool) -> Seat:
        slots = self._slots[prompt]
        place = next(g for g in range(self.group_size) if g not in slots)
        slots[place] = slot
        return Seat(prompt, prompt * self.group_size + place, is_new)
