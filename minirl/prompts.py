"""Which prompt is kept in which row of the store, and which slots sample from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Seat:
    """A slot's place beside a prompt; `is_new` when the prompt must be computed first."""

    prompt: int
    place: int
    is_new: bool


class PromptTable:
    """Kept prompts, one a row, each with places for the G slots that sample from it.

    A prompt that nobody samples from stays until its row is needed, the longest unused first. The
    table starts with the rows that full groups need, and doubles when more prompts come together:
    every row and place costs time at each step.
    """

    def __init__(self, *, slots: int, group_size: int) -> None:
        self._group_size = min(group_size, slots)
        self._base, self._limit = -(-slots // self._group_size), slots
        self.forget()

    def forget(self) -> None:
        """Drop what is kept; nobody may be sampling."""
        self.rows = self._base
        self._ids: list[tuple[int, ...] | None] = [None] * self.rows
        self._slots: list[dict[int, int]] = [{} for _ in range(self.rows)]
        self._left_at = [0] * self.rows
        self._clock = 0

    @property
    def places(self) -> int:
        """Return the places that each prompt needs at the moment: G, or 1 for evaluations."""
        is_alone = not any(place for slots in self._slots for place in slots)
        return 1 if is_alone and self.rows > 2 * self._base else self._group_size

    def ids(self, prompt: int) -> tuple[int, ...]:
        """Return the tokens of a kept prompt."""
        ids = self._ids[prompt]
        assert ids is not None
        return ids

    def join(self, ids: tuple[int, ...], slot: int) -> Seat:
        """Seat a slot beside its prompt."""
        for prompt, (kept, slots) in enumerate(zip(self._ids, self._slots, strict=True)):
            if kept == ids and len(slots) < self._group_size:
                return self._sit(prompt, slot, is_new=False)
        free = [prompt for prompt in range(self.rows) if not self._slots[prompt]]
        if not free:
            free = [self.rows]
            self._grow()
        prompt = min(free, key=lambda p: (self._ids[p] is not None, self._left_at[p], p))
        self._ids[prompt] = ids
        return self._sit(prompt, slot, is_new=True)

    def leave(self, seat: Seat) -> None:
        """Take a slot away from its prompt."""
        del self._slots[seat.prompt][seat.place]
        self._clock += 1
        self._left_at[seat.prompt] = self._clock

    def lengths(self) -> np.ndarray:
        """Return the length of every row's prompt, N; 0 where there is none."""
        return np.array([len(ids or ()) for ids in self._ids], np.int32)

    def longest(self) -> int:
        """Return the length of the longest prompt that somebody samples from."""
        used = [len(ids or ()) for ids, s in zip(self._ids, self._slots, strict=True) if s]
        return max(used, default=0)

    def slots(self) -> np.ndarray:
        """Return the slots beside every prompt, NG; 0 where the place is empty."""
        slot_NG = np.zeros((self.rows, self.places), np.int32)
        for prompt, slots in enumerate(self._slots):
            for place, slot in slots.items():
                slot_NG[prompt, place] = slot
        return slot_NG

    def _sit(self, prompt: int, slot: int, *, is_new: bool) -> Seat:
        slots = self._slots[prompt]
        place = next(g for g in range(self._group_size) if g not in slots)
        slots[place] = slot
        return Seat(prompt, place, is_new)

    def _grow(self) -> None:
        more = min(self.rows, self._limit - self.rows)
        self.rows += more
        self._ids += [None] * more
        self._slots += [{} for _ in range(more)]
        self._left_at += [0] * more
