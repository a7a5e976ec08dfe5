"""How far a sampler is, in words: prompts, tokens, tokens a second."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from time import perf_counter

from minirl.types import Work

# Notes that the speed is measured over: the last ones.
_NOTES = 32


class Pace:
    """What a sampler has done since this was made; `note` it whenever it has done some more."""

    def __init__(self, work: Work) -> None:
        self._work, self._before = work, replace(work)
        self._notes: deque[tuple[float, int]] = deque(maxlen=_NOTES)

    def note(self) -> None:
        """Take the time of what has been done by now."""
        self._notes.append((perf_counter(), self._work.sampled))

    def words(self, *, prompts: int) -> list[str]:
        """Say what was done, for so many prompts; any thread may ask.

        The first note is where the speed is measured from: what comes before is compiling.
        """
        work, before, said = self._work, self._before, []
        if work.prompts is not None and before.prompts is not None:
            # One that is crowded out is computed again.
            said.append(f"prompts {min(work.prompts - before.prompts, prompts)}/{prompts}")
        if tokens := work.sampled - before.sampled:
            said.append(f"{tokens:,} tokens{self._speed()}")
        return said

    def _speed(self) -> str:
        notes = list(self._notes)
        if len(notes) < 2:
            return ""
        (start_s, first), (end_s, last) = notes[0], notes[-1]
        return f" ({(last - first) / (end_s - start_s):,.0f}/s)"
