"""The sources of samples: a file, an endpoint, a checkpoint. Whatever they give is judged alike.

An evaluation is known by contents: it is the same wherever weights and data lie.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from exchange import UserError
from launch.evaluation.digests import short
from launch.evaluation.outcomes import NO_REPLIES, End, Outcomes, hint, look, parts_of
from sqlenv.cache import DiskCache
from sqlenv.types import Example

if TYPE_CHECKING:
    from launch.build import SqlSide
    from launch.config import JobConfig
    from launch.evaluation.client import Answer, CachedClient
    from launch.evaluation.decoding import Decode
    from launch.evaluation.results import ModelFacts
    from launch.evaluation.testsets import Split
    from minirl.model.tokenizer import ChatTokenizer
    from sqlenv.config import SourceConfig
    from sqlenv.types import Answer as ReadReply
    from sqlenv.types import Observation, Wrapping

ANSWERS = "answers"
"""The cache of responses in a folder of results."""
RECORDED_SAMPLES = 8
"""Samples of a question that `trajectories.jsonl` has."""
_CHUNK = 128  # questions that are asked together
# How calls are made may change between two starts, and so may the address of a server.
_MANNERS = {"parallel", "timeout_s", "retries"}

Show = Callable[[int, int, str], None]


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
    def of(cls, read: Sequence[ReadReply], **more: Any) -> Sampled:
        """Take the queries out of replies that were read."""
        return cls(
            tuple(one.sql for one in read),
            tuple(one.reply for one in read),
            places=tuple(one.place for one in read),
            **more,
        )

    @classmethod
    def kept(cls, fields: Mapping[str, Any]) -> Sampled:
        """Read what `asdict` has written as JSON."""
        return TypeAdapter(cls).validate_python(fields)

    @property
    def unread(self) -> list[str]:
        """List the replies that hold no query."""
        pairs = zip(self.queries, self.replies, strict=False)
        return [reply for sql, reply in pairs if reply and not sql]


class SampleCache:
    """Samples of questions in the cache of responses, by what decides them."""

    def __init__(self, folder: Path, settings: object = None) -> None:
        self._folder, self._settings = folder / ANSWERS, short(json.dumps(settings).encode())

    def read(self, examples: Sequence[Example]) -> list[Sampled]:
        """Read the samples of the first questions, as many as have theirs."""
        if not self._folder.exists():
            return []
        with closing(DiskCache(self._folder)) as cache:
            kept = (cache.get(self._key(*numbered)) for numbered in enumerate(examples))
            return [Sampled.kept(one) for one in takewhile(bool, kept)]

    def write(self, first: int, examples: Sequence[Example], new: Sequence[Sampled]) -> None:
        """Keep the samples of questions, from a number on."""
        with closing(DiskCache(self._folder)) as cache:
            for number, one in enumerate(new, first):
                cache[self._key(number, examples[number])] = asdict(one)

    def _key(self, number: int, example: Example) -> str:
        return f"{self._settings} {number} {example.id}"


@dataclass(frozen=True, slots=True)
class Answers:
    """What a source gives to all questions, and what it says of its work."""

    samples: Sequence[Sampled]
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source(ABC):
    """A model that is asked: behind an endpoint, or a policy of ours (`policy_source.py`).

    The name is for folders. The identity is what decides the answers: the endpoint's model, not its
    address, since a server may move; of a policy the digest of its weights, not their path.
    """

    config: JobConfig
    decode: Decode
    name: str
    identity: str

    @property
    def is_judge(self) -> bool:
        """Tell whether the model judges queries of its own."""
        return self.decode.kind == "judge"

    def prompt(self, example: Example, sql: SqlSide) -> Observation:
        """Put a question as the model is shown it."""
        return (sql.prompts.single_turn if self.is_judge else sql.evaluation_prompt)(example)

    @abstractmethod
    def tokenizer(self) -> ChatTokenizer | None:
        """Return the model's tokenizer, if it is here."""

    @abstractmethod
    def facts(self) -> ModelFacts:
        """Describe the model, as a table of runs has to know it."""

    @abstractmethod
    def answers(self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Show) -> Answers:
        """Answer the questions, or what is left of them; a `UserError` if the model cannot."""

    @abstractmethod
    def _own_settings(self) -> Mapping[str, Any]:
        """List what decides the samples beside what all sources look at."""

    def settings(self, split: Split, data: str) -> Mapping[str, Any]:
        """List what decides the samples: of the job, only what evaluation looks at."""
        used = {"seed", "prompt", "env", "executor", "evaluation"}
        found = {
            **self._own_settings(),
            "decode": self.decode.name,
            "split": data,
            **self.config.model_dump(mode="json", include=used),
            "data": _data(self.config, split),
        }
        # For people; what it is is said by contents.
        found["places"] = {**found.get("places", {}), "data": str(self.config.data.root)}
        return found

    def _verbal_settings(self) -> Mapping[str, Any]:
        return {"verbal": self.config.verbal.model_dump(mode="json", exclude=_MANNERS)}

    def _client_settings(self, temperature: float | None, top_p: float = 1.0) -> list[tuple]:
        """List what decides an answer beside its messages and seed."""
        model = [("model", self.identity), ("temperature", temperature)]
        top = [("top_p", top_p)] if top_p < 1 else []
        return [*model, ("max_tokens", self.config.verbal.max_tokens), *top]


@dataclass(frozen=True, slots=True)
class EndpointSource(Source):
    """A model behind an endpoint; every answer is paid for once.

    Its temperature is that of the decoding unless that of `verbal` is null, where none is sent.
    """

    url: str

    def tokenizer(self) -> None:
        """Return none: an endpoint counts tokens itself."""

    def facts(self) -> ModelFacts:
        """Describe the model."""
        from launch.evaluation.results import ModelFacts

        return ModelFacts(self.name, self.identity)

    def _own_settings(self) -> Mapping[str, Any]:
        places = {"model": self.identity}
        return {"endpoint": self.identity, **self._verbal_settings(), "places": places}

    def answers(self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Show) -> Answers:
        """Ask what has no answer yet."""
        from launch.evaluation.client import CachedClient
        from launch.evaluation.deliberation import deliberate
        from launch.evaluation.endpoint import Endpoint
        from sqlenv.config import AgenticConfig

        config, decode, verbal = self.config, self.decode, self.config.verbal
        if isinstance(config.env, AgenticConfig) and config.evaluation.episode == "agentic":
            raise UserError("--endpoint: one reply a question; set evaluation.episode=single_turn")
        if not self.is_judge and verbal.temperature is not None:
            verbal = verbal.model_copy(update={"temperature": decode.temperature})
        top_p = 1.0 if self.is_judge or not decode.temperature else decode.top_p
        endpoint = Endpoint(self.url, self.identity, verbal, top_p=top_p)
        settings = self._client_settings(verbal.temperature, top_p)
        try:
            with CachedClient(endpoint, out, settings, seed=config.seed) as client:
                if self.is_judge:
                    return deliberate(config, examples, client, sql, show)
                return _ask(config, examples, client, sql, show, samples=decode.samples)
        finally:
            endpoint.close()


def _ask(
    config: JobConfig,
    examples: Sequence[Example],
    client: CachedClient,
    sql: SqlSide,
    show: Show,
    *,
    samples: int,
) -> Answers:
    from rewards.verbal import Ask

    wrapping, found = config.answer_wrapping, list[Sampled]()
    for part in parts_of(len(examples), samples, size=_CHUNK):
        asked = [(one.id, sql.prompts.single_turn(one)) for one in examples[part]]
        answers = client.answers(
            [(name, [Ask("generate", n, prompt) for n in range(samples)]) for name, prompt in asked]
        )
        if client.refusal:
            raise UserError(client.refusal)
        found += [_read(each, wrapping) for each in answers]
        if part.start == 0:
            look_at(found, wrapping, limit=token_limit(config))
        show(len(found), len(examples), f"{client.spent.completion_tokens:,} tokens written")
    return Answers(found, {"hint": hint(unread_of(found), wrapping)})


def _read(answers: Sequence[Answer], wrapping: Wrapping) -> Sampled:
    """Take the queries out of the answers to a question."""
    from sqlenv.sql.answers import answer_of

    read = [answer_of(one.text or "", wrapping) for one in answers]
    outcomes = Outcomes.total(
        outcome_of(one, found.sql) for one, found in zip(answers, read, strict=True)
    )
    return Sampled.of(read, ends=tuple(one.end for one in answers), outcomes=outcomes)


def outcome_of(answer: Answer, sql: str) -> Outcomes:
    """Count an answer, in which there is this query."""
    tokens = {"prompt_tokens": answer.prompt_tokens, "reply_tokens": answer.completion_tokens}
    return Outcomes.of(sql, answer.end, **tokens)


def token_limit(config: JobConfig) -> str:
    """Name the setting that bounds what an endpoint writes."""
    return f"verbal.max_tokens={config.verbal.max_tokens}"


def look_at(
    found: Sequence[Sampled], wrapping: Wrapping, *, limit: str, stops: bool = True
) -> None:
    """Say what became of the first replies, and stop where none of them holds a query."""
    outcomes = Outcomes.total(one.outcomes for one in found)
    look(outcomes, unread_of(found), wrapping, limit=limit, stops=stops)


def unread_of(found: Sequence[Sampled]) -> list[str]:
    """List the replies that hold no query."""
    return [reply for one in found for reply in one.unread]


def _data(config: JobConfig, split: Split) -> dict[str, Any]:
    """Give the settings of a job's data without its paths, and digests of what a split is read
    from. Of demo data the settings say it all.
    """
    from launch.data.preflight import rooted

    settings = config.data.model_dump(mode="json", exclude={"root": True})
    for section in settings.values():
        for source in section.get("sources", ()) if isinstance(section, dict) else ():
            source.pop("path")
    if config.data.root is None:
        return settings
    sources = rooted(config.data.of(split), config.data.root).sources
    return {**settings, "measured": [_contents(source) for source in sources]}


def _contents(source: SourceConfig) -> dict[str, str]:
    """Digest the question files and databases of a source."""
    from launch.evaluation.digests import digest
    from sqlenv.data.index import index_of
    from sqlenv.data.layouts import locate

    location = locate(source)
    indexes = (index_of(file, location.layout) for file in location.files)
    names = {kind.db_id for index in indexes for kind in index.kinds}
    databases = [path for name in names if (path := location.database(name))]
    return {"files": digest(location.files), "databases": digest(databases)}
