"""What models answer, and the cache of it: whatever was answered is not asked for again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import TypeAdapter

from launch.evaluation.replies import NO_REPLIES, End, Outcomes
from launch.files import short
from launch.run_folder import ANSWERS
from rewards.verbal import ReplyRequest
from sqlenv.cache import DiskCache
from sqlenv.executor.database import fingerprint
from sqlenv.types import Answer, Example, Observation

RECORDED_SAMPLES = 8
"""Samples of a question that `trajectories.jsonl` has."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a source gives to one question.

    Attributes:
        queries: One, or several samples.
        replies: The texts that they stand in; none in a file of predictions.
        turns: Turns of each episode, where the model may call a tool.
        line: Of `trajectories.jsonl`, where episodes have several turns.
        choice: How the query was chosen among the model's own, with `judge@K`.
        ends: How each reply ended.
        outcomes: What became of all replies to the question.
        places: Where each query begins in its reply, in characters; -1 where it does not.
        right: Which queries are right by the environment's rule, where it has judged them.
    """

    queries: tuple[str, ...]
    replies: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()
    line: Mapping[str, Any] | None = None
    choice: Mapping[str, Any] | None = None
    ends: tuple[End, ...] = ()
    outcomes: Outcomes = NO_REPLIES
    places: tuple[int, ...] = ()
    right: tuple[bool, ...] = ()

    @classmethod
    def of(cls, read: Sequence[Answer], **more: Any) -> Sampled:
        """Take the queries out of replies that were read."""
        return cls(
            tuple(one.sql for one in read),
            tuple(one.reply for one in read),
            places=tuple(one.place for one in read),
            **more,
        )

    @property
    def unread(self) -> list[str]:
        """List the replies that hold no query."""
        pairs = zip(self.queries, self.replies, strict=False)
        return [reply for sql, reply in pairs if reply and not sql]


class SampleCache:
    """Samples of questions in the cache of responses, by what decides them: settings, a question's
    number, which seeds them, its words, and the bytes of its database.
    """

    def __init__(self, folder: Path, settings: object = None) -> None:
        self._folder, self._settings = folder / ANSWERS, short(json.dumps(settings).encode())

    def read(self, examples: Sequence[Example]) -> list[Sampled]:
        """Read the samples of the first questions, as many as have theirs."""
        if not self._folder.exists():
            return []
        with closing(DiskCache(self._folder)) as cache:
            kept = (cache.get(self._key(*numbered)) for numbered in enumerate(examples))
            return [TypeAdapter(Sampled).validate_python(one) for one in takewhile(bool, kept)]

    def write(self, first: int, examples: Sequence[Example], new: Sequence[Sampled]) -> None:
        """Keep the samples of questions, from a number on."""
        with closing(DiskCache(self._folder)) as cache:
            for number, one in enumerate(new, first):
                cache[self._key(number, examples[number])] = asdict(one)

    def _key(self, number: int, example: Example) -> str:
        asked = [number, example.id, example.question, example.evidence]
        asked.append(fingerprint(example.database))
        return f"{self._settings} {short(json.dumps(asked).encode())}"


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
class ModelResponse:
    """A model's reply: its text and how it ended, or None and why there is none (`refusal`)."""

    text: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: str = ""
    end: End = "stop"


class Model(Protocol):
    """Whoever answers: an endpoint, or a policy in this process."""

    def answer(
        self,
        requests: Sequence[ModelRequest],
        record: Callable[[ModelRequest, ModelResponse], None],
        /,
    ) -> None:
        """Answer requests, recording each answer as soon as it is there."""
        ...


class CachedClient:
    """Asks a model only what it has not answered before.

    Answers are kept in `answers/` of the folder of results, by messages, seed and what else decides
    them (`settings`). A request without an answer costs nothing, and that is known until the end of
    the process only. `cost` counts calls and tokens by kind of request, thinking included; whoever
    answers may not count tokens.
    """

    def __init__(
        self, model: Model, folder: Path, settings: Iterable[tuple[str, Any]], *, seed: int
    ) -> None:
        self._model, self._settings, self._seed = model, tuple(settings), seed
        self._cache = DiskCache(folder / ANSWERS)
        self._refused: dict[str, ModelResponse] = {}
        self._reasons: dict[str, ModelResponse] = {}  # the first without a text of each kind
        self.cost: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for entry in self._cache.values():
            if isinstance(entry, list):  # else the samples of a question
                kind, fields = entry
                self._pay(kind, ModelResponse(**fields))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._cache.close()

    def answers(
        self, wishes: Sequence[tuple[str, Sequence[ReplyRequest]]]
    ) -> list[list[ModelResponse]]:
        """Return the answers to what is asked about each question, which is given by its name."""
        requests = [[self._request(name, ask) for ask in asks] for name, asks in wishes]
        every = [one for each in requests for one in each]
        found = {one.key: known for one in every if (known := self._find(one.key))}
        new = [one for one in every if one.key not in found]

        def record(request: ModelRequest, answer: ModelResponse) -> None:
            found[request.key] = answer
            if answer.text is None:
                self._refused[request.key] = answer
                self._reasons.setdefault(request.kind, answer)
                return
            self._cache[request.key] = [request.kind, asdict(answer)]
            self._pay(request.kind, answer)

        self._model.answer(new, record)
        return [[found[one.key] for one in each] for each in requests]

    @property
    def written(self) -> int:
        """Count the tokens of all answers."""
        return sum(cost["completion_tokens"] for cost in self.cost.values())

    @property
    def refusal(self) -> str:
        """Say of which kind no request has an answer, and why; empty where there is none."""
        for kind, answer in self._reasons.items():
            if kind not in self.cost:
                what = "failed" if answer.end == "failed" else "was refused"
                longer = "; lower verbal.max_tokens, or serve a longer context"
                advice = longer if answer.end == "too_long" else ""
                return f"every {kind} request {what}: {answer.refusal}{advice}"
        return ""

    def _pay(self, kind: str, answer: ModelResponse) -> None:
        tokens = {name: getattr(answer, name) for name in ("prompt_tokens", "completion_tokens")}
        self.cost[kind].update({"calls": 1, **tokens})

    def _find(self, key: str) -> ModelResponse | None:
        entry = self._cache.get(key)
        return ModelResponse(**entry[1]) if entry else self._refused.get(key)

    def _request(self, name: str, ask: ReplyRequest) -> ModelRequest:
        stream = f"{self._seed} {name} {ask.kind} {ask.number}"
        seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4]) % 2**31
        return ModelRequest(ask.kind, ask.messages, seed, self._settings)
