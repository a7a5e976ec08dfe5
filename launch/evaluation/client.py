"""A client that pays for every answer once: requests, answers, and the cache of them on disk."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from launch.evaluation.cache import DiskCache
from rewards.verbal import Ask
from sqlenv.types import Observation

ANSWERS = "answers"
"""The folder of answers in a folder of results."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One call of a model; equal requests have equal keys, also on another day.

    Attributes:
        kind: What the answer is for, so that costs can be told apart.
        seed: Names the random stream: the same question is asked many times.
        settings: Model, temperature and whatever else decides the answer.
    """

    kind: str
    messages: Observation
    seed: int
    settings: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        """Digest the request."""
        said = [(message.role, message.content) for message in self.messages]
        text = json.dumps([self.kind, said, self.seed, self.settings])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's reply.

    Attributes:
        text: None where the model refused the request.
        prompt_tokens: 0 where whoever answered does not count.
        completion_tokens: Thinking included.
        refusal: Why the request was refused.
    """

    text: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: str = ""


@dataclass(slots=True)
class Cost:
    """Calls and tokens of one kind of request."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Model(Protocol):
    """Whoever answers: an endpoint, or a policy in this process."""

    def answer(
        self, requests: Sequence[ModelRequest], record: Callable[[ModelRequest, Answer], None], /
    ) -> None:
        """Answer requests, recording each answer as soon as it is there."""
        ...


class CachedClient:
    """Asks a model only what it has not answered before. Threads may share one.

    Answers are kept in `answers/` of the folder of results, by messages, seed and what else decides
    them (`settings`).
    """

    def __init__(
        self, model: Model, folder: Path, settings: Iterable[tuple[str, Any]], *, seed: int
    ) -> None:
        self._model, self._settings, self._seed = model, tuple(settings), seed
        self._cache = DiskCache(folder / ANSWERS)
        self._lock = threading.Lock()
        self._refused: dict[str, Answer] = {}
        self.cost: dict[str, Cost] = {}
        for kind, fields in self._cache.values():
            self._count(kind, Answer(**fields))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._cache.close()

    def texts(self, wishes: Sequence[tuple[str, Sequence[Ask]]]) -> list[list[str | None]]:
        """Return the answers to what is asked about each question, None where one is refused.

        A refusal costs nothing and is known until the end of the process only.

        Args:
            wishes: The question's name and what is asked about it.
        """
        requests = [[self._request(name, ask) for ask in asks] for name, asks in wishes]
        found = {one.key: self._find(one.key) for each in requests for one in each}
        new = [one for each in requests for one in each if found[one.key] is None]

        def record(request: ModelRequest, answer: Answer) -> None:
            found[request.key] = answer
            if answer.text is None:
                self._refused[request.key] = answer
                return
            self._cache[request.key] = [request.kind, asdict(answer)]
            self._count(request.kind, answer)

        self._model.answer(new, record)
        answers = [[found[one.key] for one in each] for each in requests]
        return [[one.text if one else None for one in each] for each in answers]

    def release(self) -> None:
        """Close what this thread has open of the cache."""
        self._cache.close()

    @property
    def spent(self) -> Cost:
        """Add up what all kinds of requests cost."""
        costs = self.cost.values()
        return Cost(
            sum(cost.calls for cost in costs),
            sum(cost.prompt_tokens for cost in costs),
            sum(cost.completion_tokens for cost in costs),
        )

    @property
    def refusal(self) -> str:
        """Say why the model refused every request, where it did; empty elsewhere."""
        if self.cost:
            return ""
        return next((answer.refusal for answer in self._refused.values()), "")

    def _find(self, key: str) -> Answer | None:
        entry = self._cache.get(key)
        return Answer(**entry[1]) if entry else self._refused.get(key)

    def _count(self, kind: str, answer: Answer) -> None:
        with self._lock:
            cost = self.cost.setdefault(kind, Cost())
            cost.calls += 1
            cost.prompt_tokens += answer.prompt_tokens
            cost.completion_tokens += answer.completion_tokens

    def _request(self, name: str, ask: Ask) -> ModelRequest:
        stream = f"{self._seed} {name} {ask.kind} {ask.number}"
        seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4]) % 2**31
        return ModelRequest(ask.kind, ask.messages, seed, self._settings)
