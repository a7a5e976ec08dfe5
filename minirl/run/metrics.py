"""Metrics of a run: one JSON line a step.

Keys that begin with `time/` depend on the clock and the process; all others are the same in every
run of one configuration on one machine, also across a kill and a resume.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from minirl.exchange import UserError
from minirl.run import distributed
from minirl.run.files import naming, read_lines, sync, whole_file


class StepRecord(BaseModel):
    """A line of a file of JSON lines; beside the step it may hold anything."""

    step: int


_ADVICE = "fix or delete that line, or set run.dir to another folder"


class JsonLines:
    """A file of JSON lines, each with the step it belongs to, made with the first one.

    Lines after `resume_step`, left by a run that was killed, are removed; a `UserError` names one
    without a step.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self._path, self._is_writer = path, distributed.is_first()
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_writer and path.exists():
            lines = read_lines(path, StepRecord, advice=_ADVICE)
            kept = [text.decode() for text, line in lines if line.step <= resume_step]
            with whole_file(path) as file:
                file.writelines(kept)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one record; of several processes the first does."""
        if not self._is_writer:
            return
        # JSON has no number for what is not finite.
        values = to_jsonable_python({"step": step, **record}, inf_nan_mode="null")
        with naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, ensure_ascii=False) + "\n")
        # A checkpoint that outlives a power failure needs the numbers up to it to be resumed.
        sync(self._path)


class Metrics:
    """Writes `metrics.jsonl` into a run folder.

    A `UserError` tells where lines of an earlier start are damaged, or gone.

    Attributes:
        steps: The numbers of each step so far, also of earlier starts.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        path = folder / "metrics.jsonl"
        self._lines = JsonLines(path, resume_step=resume_step)
        kind, lines = dict[str, float | None], []  # null stands for what JSON has no number for
        if path.exists():
            lines = [line for _, line in read_lines(path, kind, advice=_ADVICE)]
        # Another process may not have removed the later ones yet.
        self.steps: list[Mapping[str, Any]] = [
            one for one in lines if (one["step"] or 0) <= resume_step
        ]
        if (self.steps[-1]["step"] if self.steps else 0) != resume_step:
            raise UserError(
                f"{path}: the numbers of step {resume_step} are not there, and the checkpoints "
                "go as far; restore them, or set run.dir to another folder"
            )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of a step."""
        self._lines.write(step, dict(sorted(numbers.items())))
        self.steps.append(numbers)


class Stopwatch:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = perf_counter()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time spent inside to a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def numbers(self) -> dict[str, float]:
        """Return the seconds by metric name, and those of the whole step up to now."""
        whole = {"step": perf_counter() - self._began}
        return {f"time/{name}_s": seconds for name, seconds in (self.seconds | whole).items()}
