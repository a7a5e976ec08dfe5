"""The sources of samples: a file, an endpoint, a checkpoint. Whatever they give is judged alike.

An evaluation is known by contents: it is the same wherever weights and data lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from exchange import UserError
from launch.build import SqlSide
from launch.config import JobConfig
from launch.data.preflight import rooted
from launch.evaluation.predictions import read_samples
from launch.evaluation.questions import Split, sample_numbers
from launch.evaluation.replies import Outcomes, hint, look, parts_of
from launch.evaluation.responses import CachedClient, ModelResponse, Sampled
from launch.evaluation.results import ModelFacts
from launch.files import digest
from rewards import verbal
from rewards.verbal import ReplyRequest, Task
from sqlenv.config import AgenticConfig, SourceConfig
from sqlenv.data.index import index_of
from sqlenv.data.layouts import locate
from sqlenv.dialects import run_many
from sqlenv.sql.answers import answer_of
from sqlenv.types import Example, Observation, Result, Wrapping

if TYPE_CHECKING:
    from launch.evaluation.replies import Decode
    from minirl.model.tokenizer import ChatTokenizer
    from minirl.types import Progress

_CHUNK = 128  # questions that are asked together
# How calls are made may change between two starts, and so may the address of a server.
_MANNERS = {"parallel", "timeout_s", "retries"}

SourceOutput = tuple[Sequence[Sampled], Mapping[str, Any]]
"""What a source gives to all questions, and what it says of its work."""


@dataclass(frozen=True, slots=True)
class Source(ABC):
    """Whoever answers: a model behind an endpoint, a policy of ours (`checkpoint.py`), a file."""

    config: JobConfig
    decode: Decode
    facts: ModelFacts
    is_asked: ClassVar[bool] = True
    """Whether answers take time or money, and are kept."""

    @property
    def identity(self) -> str:
        """Return what decides the answers: the endpoint's model, not its address, since a server
        may move; of a policy the digest of its weights, not their path.
        """
        return self.facts.weights or self.facts.model or self.facts.name

    @property
    def is_judge(self) -> bool:
        """Tell whether the model judges queries of its own."""
        return self.decode.kind == "judge"

    def questions(self, split: Split, sql: SqlSide) -> tuple[Example, ...]:
        """Read the questions that are asked."""
        return sql.examples(split, limit=self.config.evaluation.of(split))

    def prompt(self, example: Example, sql: SqlSide) -> Observation:
        """Put a question as the model is shown it."""
        return (sql.prompts.single_turn if self.is_judge else sql.evaluation_prompt)(example)

    def tokenizer(self) -> ChatTokenizer | None:
        """Return the model's tokenizer, if it is here."""
        return None

    @abstractmethod
    def answers(
        self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Progress
    ) -> SourceOutput:
        """Answer the questions, or what is left of them; a `UserError` if the model cannot."""

    def _own_settings(self) -> Mapping[str, Any]:
        """List what decides the samples beside what all sources look at."""
        return {}

    def settings(self, split: Split, data: str) -> Mapping[str, Any]:
        """List what decides the samples: of the job, only what evaluation looks at."""
        own = {**self._own_settings(), "split": data}
        found = {**own, **self._job_settings(), "data": _data(self.config, split)}
        # For people; what it is is said by contents.
        found["places"] = {**found.get("places", {}), "data": str(self.config.data.root)}
        return found

    def _job_settings(self) -> Mapping[str, Any]:
        used = {"seed", "prompt", "env", "executor", "evaluation"}
        return {**self.config.model_dump(mode="json", include=used), "decode": self.decode.name}

    def _verbal_settings(self) -> Mapping[str, Any]:
        return {"verbal": self.config.verbal.model_dump(mode="json", exclude=_MANNERS)}

    def _client_settings(self, temperature: float | None, top_p: float = 1.0) -> list[tuple]:
        """List what decides an answer beside its messages and seed."""
        model = [("model", self.identity), ("temperature", temperature)]
        arguments = self.config.prompt.template
        top = [("top_p", top_p)] if top_p < 1 else []
        template = [("template", sorted(arguments.items()))] if arguments else []
        return [*model, ("max_tokens", self.config.verbal.max_tokens), *top, *template]


@dataclass(frozen=True, slots=True)
class EndpointSource(Source):
    """A model behind an endpoint; every answer is paid for once.

    Its temperature is that of the decoding unless that of `verbal` is null, where none is sent.
    """

    url: str

    def _own_settings(self) -> Mapping[str, Any]:
        places = {"model": self.identity}
        return {"endpoint": self.identity, **self._verbal_settings(), "places": places}

    def answers(
        self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Progress
    ) -> SourceOutput:
        """Ask what has no answer yet."""
        from launch.evaluation.endpoint import Endpoint

        config, decode, verbal = self.config, self.decode, self.config.verbal
        if isinstance(config.env, AgenticConfig) and config.evaluation.episode == "agentic":
            raise UserError("--endpoint: one reply a question; set evaluation.episode=single_turn")
        if not self.is_judge and verbal.temperature is not None:
            verbal = verbal.model_copy(update={"temperature": decode.temperature})
        top_p = 1.0 if self.is_judge or not decode.temperature else decode.top_p
        endpoint = Endpoint(
            self.url, self.identity, verbal, top_p=top_p, template=config.prompt.template
        )
        settings = self._client_settings(verbal.temperature, top_p)
        with CachedClient(endpoint, out, settings, seed=config.seed) as client:
            if self.is_judge:
                return deliberate(config, examples, client, sql, show)
            play = partial(_once, config=config, sql=sql, samples=decode.samples)
            found, unread = _ask(config, examples, client, show, play, first=decode.samples)
            return found, {"hint": hint(unread, config.answer_wrapping)}


@dataclass(frozen=True, slots=True)
class FileSource(Source):
    """A file of predictions; nobody knows how its model was asked."""

    path: Path
    every: tuple[Example, ...]
    is_asked: ClassVar[bool] = False

    def questions(self, split: Split, sql: SqlSide) -> tuple[Example, ...]:
        """Take all questions of the test set, or a sample."""
        limit = self.config.evaluation.of(split)
        numbers = sample_numbers(len(self.every), limit, seed=self.config.seed)
        return tuple(self.every[number] for number in numbers)

    def answers(
        self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Progress
    ) -> SourceOutput:
        """Read the file."""
        if self.is_judge:
            raise UserError(f"--decode {self.decode.name}: needs a model; a file takes vote@n")
        read = read_samples(self.path, self.every, self.decode, asked=examples)
        return [Sampled(one, outcomes=Outcomes.total(map(Outcomes.of, one))) for one in read], {}


def unread_of(found: Sequence[Sampled]) -> list[str]:
    """List the replies that hold no query."""
    return [reply for one in found for reply in one.unread]


def _data(config: JobConfig, split: Split) -> dict[str, Any]:
    """Give the settings of a job's data without its paths, and digests of what a split is read
    from. Of demo data the settings say it all.
    """
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
    location = locate(source)
    names = {kind.db_id for kind in index_of(location.files, source.layout).kinds}
    databases = [path for name in names if (path := location.database(name))]
    return {"files": digest(location.files), "databases": digest(databases)}


Play = Generator[list[ReplyRequest], Sequence[ModelResponse], Sampled]
"""Asks about one question, is sent the answers, and returns what came of it."""
_COUNTS = ("attempts", "executable", "refused", "judged", "left_out")


@dataclass(slots=True)
class _Tally:
    """What became of the answers so far, by question, and those that hold no query."""

    wrapping: Wrapping
    outcomes: defaultdict[str, list[Outcomes]]
    unread: list[str] = field(default_factory=list)

    def add(
        self, name: str, asked: Sequence[ReplyRequest], answers: Sequence[ModelResponse]
    ) -> None:
        """Count the answers that were to hold a query."""
        for ask, answer in zip(asked, answers, strict=True):
            if ask.kind == "generate":
                query = answer_of(answer.text or "", self.wrapping).sql
                read, written = answer.prompt_tokens, answer.completion_tokens
                self.outcomes[name].append(
                    Outcomes.of(query, answer.end, prompt_tokens=read, reply_tokens=written)
                )
                self.unread += [answer.text] if answer.text and not query else []


def _ask(
    config: JobConfig,
    examples: Sequence[Example],
    client: CachedClient,
    show: Progress,
    play: Callable[[Example], Play],
    *,
    first: int,
    waits: bool = False,
) -> tuple[list[Sampled], list[str]]:
    """Play for every question, many at a time, of which each asks `first` times at first; return
    what came of it, and the replies without a query.

    It is an error if no request of a kind has an answer; with `waits`, of the few questions that
    come first that may be their own fault.
    """
    found, tally = dict[str, Sampled](), _Tally(config.answer_wrapping, defaultdict(list))
    limit, is_seen = f"verbal.max_tokens={config.verbal.max_tokens}", False
    for part in parts_of(len(examples), first, size=_CHUNK):
        plays = {one.id: play(one) for one in examples[part]}
        wishes = {name: next(one) for name, one in plays.items()}
        is_few = waits and part.start == 0 and part.stop < len(examples)
        while wishes:
            answers = client.answers(list(wishes.items()))
            if client.refusal and not is_few:
                raise UserError(client.refusal)
            for name, each in zip(list(wishes), answers, strict=True):
                tally.add(name, wishes.pop(name), each)
                try:
                    wishes[name] = plays[name].send(each)
                except StopIteration as end:
                    found[name] = end.value
            if not is_seen:
                counted = Outcomes.total(chain.from_iterable(tally.outcomes.values()))
                look(counted, tally.unread, tally.wrapping, limit=limit, stops=True)
                is_seen = True
            show(len(found), len(examples), f"{client.written:,} tokens written")
    outcomes = {name: Outcomes.total(each) for name, each in tally.outcomes.items()}
    samples = [replace(found[one.id], outcomes=outcomes[one.id]) for one in examples]
    return samples, tally.unread


def _once(example: Example, config: JobConfig, sql: SqlSide, samples: int) -> Play:
    """Ask a question so many times, each for itself."""
    prompt = sql.prompts.single_turn(example)
    answers = yield [ReplyRequest("generate", number, prompt) for number in range(samples)]
    read = [answer_of(one.text or "", config.answer_wrapping) for one in answers]
    return Sampled.of(read, ends=tuple(one.end for one in answers))


def _judged(example: Example, config: JobConfig, sql: SqlSide) -> Play:
    """Let the model write several queries, judge them, and take the best."""
    game = verbal.deliberate(_task(example, config, sql), config.verbal, seed=config.seed)
    asked = next(game)
    while True:
        answers = yield asked
        try:
            asked = game.send([one.text for one in answers])
        except StopIteration as end:
            return Sampled((end.value.sql,), choice=asdict(end.value))


def deliberate(
    config: JobConfig,
    examples: Sequence[Example],
    client: CachedClient,
    sql: SqlSide,
    show: Progress,
) -> SourceOutput:
    """Answer every question with the query that the model itself judges best."""
    play, first = partial(_judged, config=config, sql=sql), config.verbal.candidates
    samples, unread = _ask(config, examples, client, show, play, first=first, waits=True)
    choices = [one.choice or {} for one in samples]
    return samples, {
        **{name: sum(choice[name] for choice in choices) for name in _COUNTS},
        "cost": {kind: dict(cost) for kind, cost in sorted(client.cost.items())},
        "hint": hint(unread, config.answer_wrapping),
    }


def _task(example: Example, config: JobConfig, sql: SqlSide) -> Task:
    def execute(queries: Sequence[str]) -> Sequence[Result]:
        return run_many(sql.executor.execute_many, [(example, query) for query in queries])

    return Task(
        prompt=sql.prompts.single_turn(example),
        judge_prompt=partial(sql.prompts.judge, example),
        extract=lambda text: answer_of(text, config.answer_wrapping).sql,
        execute=execute,
        name=example.id,
    )
