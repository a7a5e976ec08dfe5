"""Answers that were paid for: written down one by one as they arrive, and never asked for again."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from minirl.run.files import Joined, keep_lines, naming
from sqlenv.types import Observation


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a model; equal requests have equal keys, also on another day.

    Attributes:
        kind: What the answer is for, so that costs can be told apart.
        messages: What the model is shown.
        seed: Names the random stream: the same question is asked many times.
        settings: Model, temperature and whatever else decides the answer.
    """

    kind: str
    messages: Observation
    seed: int
    settings: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        """Name the request."""
        said = [(message.role, message.content) for message in self.messages]
        text = json.dumps([self.kind, said, self.seed, self.settings])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said.

    Attributes:
        text: The answer; None where the model would not take the request.
        prompt_tokens: Tokens read, as counted by whoever answered; 0 where it does not count.
        completion_tokens: Tokens written, thinking included.
        refusal: Why the request was not taken.
    """

    text: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class _Name:
    """Which request a line answers."""

    key: str
    kind: str


class _Line(Joined):
    """A line of the file."""

    name: _Name
    answer: Answer


@dataclass(slots=True)
class Cost:
    """Calls and tokens of one kind of request."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        self.calls += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens


class Journal:
    """A file of answers by request, only ever appended to. Threads may share one; of processes one
    at a time, which `launch.run_folder.claimed` sees to.

    Args:
        path: JSON lines; a last line that a kill cut short is taken away.

    Raises:
        UserError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self.cost: dict[str, Cost] = {}
        if path.exists():
            for line in keep_lines(path, _Line, advice="it is not a file of answers; move it away"):
                self._remember(line.name.key, line.name.kind, line.answer)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        with naming(Path(self._file.name)):
            self._file.close()

    def get(self, request: Request) -> Answer | None:
        """Return the answer to a request, if it is there."""
        return self._answers.get(request.key)

    def put(self, request: Request, answer: Answer) -> None:
        """Write an answer down, out of this process at once; a refusal, which cost nothing, is
        known until the end of the process only.
        """
        key = request.key
        line = json.dumps({"key": key, "kind": request.kind, **asdict(answer)})
        with self._lock:
            if answer.text is None:
                self._answers[key] = answer
                return
            with naming(Path(self._file.name)):
                self._file.write(line + "\n")
                self._file.flush()
            self._remember(key, request.kind, answer)

    @property
    def spent(self) -> Cost:
        """Add up what all kinds cost."""
        costs = self.cost.values()
        return Cost(
            sum(cost.calls for cost in costs),
            sum(cost.prompt_tokens for cost in costs),
            sum(cost.completion_tokens for cost in costs),
        )

    @property
    def refusal(self) -> str:
        """Say why the model took no request, where it took none."""
        if self.cost:
            return ""
        return next((answer.refusal for answer in self._answers.values()), "")

    def _remember(self, key: str, kind: str, answer: Answer) -> None:
        if key not in self._answers:
            self._answers[key] = answer
            self.cost.setdefault(kind, Cost()).add(answer)
