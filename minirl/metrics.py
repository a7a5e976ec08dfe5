"""Numbers of a run: one JSON line a step, and TensorBoard beside it.

Keys that begin with `time/` depend on the clock; all others are the same in every run of one
configuration on one machine, also across a kill and a resume.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import BaseModel, ConfigDict
from tensorboardX import SummaryWriter

from minirl.errors import UserError
from minirl.reading import read_lines


class Line(BaseModel):
    """A line of a file of JSON lines; beside the step it may hold anything."""

    step: int


class Numbers(Line):
    """A line of `metrics.jsonl`; null stands for what JSON has no number for."""

    model_config = ConfigDict(extra="allow")
    # pydantic checks the other fields against this.
    __pydantic_extra__: dict[str, float | None]  # ty: ignore[incompatible-mutable-override]


_METRICS = "metrics.jsonl"
_ADVICE = "mend or delete that line, or set run.dir to another folder"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the numbers of each step of a run.

    Raises:
        UserError: There are none, or the file is damaged.
    """
    lines = read_lines(folder / _METRICS, Numbers, advice=_ADVICE)
    return [line.model_dump() for _, line in lines]


class JsonLines:
    """A file of JSON lines, each with the step it belongs to.

    Args:
        path: The file, made when the first line is written.
        resume_step: Lines of later steps, left by a run that was killed, are taken away.
        kind: What a line has to be.

    Raises:
        UserError: The file is damaged.
    """

    def __init__(self, path: Path, *, resume_step: int, kind: type[Line] = Line) -> None:
        self._path = path
        self.last_step = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = read_lines(path, kind, advice=_ADVICE)
            kept = [(text, line.step) for text, line in lines if line.step <= resume_step]
            self.last_step = kept[-1][1] if kept else 0
            scratch = path.with_suffix(".part")
            scratch.write_bytes(b"".join(text for text, _ in kept))
            scratch.replace(path)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one record."""
        line = json.dumps({"step": step} | _finite(record), ensure_ascii=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _finite(value: Any) -> Any:
    """Write what JSON has no number for as null, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """Writes `metrics.jsonl` and TensorBoard event files into a run folder.

    Raises:
        UserError: What an earlier start wrote is damaged, or is not there any more.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        path, board = folder / _METRICS, folder / "tensorboard"
        self._lines = JsonLines(path, resume_step=resume_step, kind=Numbers)
        if self._lines.last_step != resume_step:
            raise UserError(
                f"{path}: the numbers of step {resume_step} are not there, and the checkpoints "
                "go as far; bring them back, or set run.dir to another folder"
            )
        try:
            self._board = SummaryWriter(str(board), purge_step=resume_step + 1)
        except OSError as error:
            raise UserError(
                f"{board}: cannot be written ({error.strerror}); move it away"
            ) from None

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
