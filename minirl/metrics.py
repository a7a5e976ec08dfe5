"""Numbers of a run: one JSON line a step, and TensorBoard beside it.

Keys that begin with `time/` depend on the clock; all others are the same in every run of one
configuration on one machine, also across a kill and a resume.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from tensorboardX import SummaryWriter


class JsonLines:
    """A file of JSON lines, each with the step it belongs to.

    Args:
        path: The file, made when the first line is written.
        resume_step: Lines of later steps, left by a run that was killed, are taken away.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= resume_step]
            scratch = path.with_suffix(".part")
            scratch.write_text("".join(kept), encoding="utf-8")
            scratch.replace(path)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one record."""
        line = json.dumps({"step": step} | _finite(record), ensure_ascii=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _whole_lines(path: Path) -> Iterator[str]:
    """Leave out a last line that a kill cut short."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def _finite(value: Any) -> Any:
    """Write what JSON has no number for as null, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """Writes `metrics.jsonl` and TensorBoard event files into a run folder."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        self._lines = JsonLines(folder / "metrics.jsonl", resume_step=resume_step)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of a step."""
        self._lines.write(step, dict(sorted(numbers.items())))
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._board.close()


class Stopwatch:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time spent inside to a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def numbers(self) -> dict[str, float]:
        """Return the seconds by metric name."""
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
