"""Whose answers are judged: a file's, those of a model behind an endpoint, of a policy of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from launch.build import SqlSide, serving
from launch.config import JobConfig, Split
from launch.data.preflight import sample_numbers
from launch.data.prompts import read_tokenizer
from launch.evaluation.answers import (
    AnswerFile,
    Outcomes,
    Sampled,
    hint,
    look,
    parts_of,
    unread_of,
)
from launch.evaluation.endpoint import CachedClient, Endpoint, ModelResponse
from launch.evaluation.predictions import read_samples
from launch.evaluation.results import ModelFacts
from launch.policy import PolicySource
from minirl.exchange import UserError
from rewards import verbal
from rewards.verbal import ReplyRequest, Task
from sqlenv.dialects import run_many
from sqlenv.sql.answers import answer_of
from sqlenv.types import Example, Observation, Result, Wrapping

if TYPE_CHECKING:
    from launch.evaluation.answers import Decode
    from minirl.model.tokenizer import ChatTokenizer
    from minirl.types import Progress

_CHUNK = 128  # questions that are asked together
# How calls are made may change between two starts.
_MANNERS = {"parallel", "timeout_s", "retries"}

SourceOutput = tuple[Sequence[Sampled], Mapping[str, Any]]
"""What a source gives to all questions, and what it says of its work."""


@dataclass(frozen=True, slots=True)
class Source(ABC):
    """Whoever answers."""

    config: JobConfig
    decode: Decode
    facts: ModelFacts
    is_asked: ClassVar[bool] = True
    """Whether answers take time or money, and are kept."""

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

    @property
    def folder(self) -> Path | None:
        """Return the model's folder, if it is here."""
        return None

    def tokenizer(self) -> ChatTokenizer | None:
        """Return the model's tokenizer, if it is here."""
        return None

    @abstractmethod
    def answers(
        self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Progress
    ) -> SourceOutput:
        """Answer the questions, or what is left of them; a `UserError` if the model cannot."""

    @abstractmethod
    def deciding(self) -> Mapping[str, Any]:
        """List what decides the answers, beside the questions and the decoding."""

    def settings(self, data: str) -> Mapping[str, Any]:
        """List what decides the answers: an evaluation goes on where these are the same."""
        return {"split": data, "decode": self.decode.name, **self.deciding()}

    def _of_job(self, **sections: Any) -> dict[str, Any]:
        used = {"seed": True, "data": True, "prompt": True, "executor": True, **sections}
        return self.config.model_dump(mode="json", include=used)


@dataclass(frozen=True, slots=True)
class FileSource(Source):
    """A file of predictions; nobody knows how its model was asked."""

    path: Path
    every: tuple[Example, ...]
    is_asked: ClassVar[bool] = False

    def deciding(self) -> Mapping[str, Any]:
        """Name the file."""
        return {"predictions": str(self.path)}

    def questions(self, split: Split, sql: SqlSide) -> tuple[Example, ...]:
        """Take all questions of the test set, or a sample."""
        limit = self.config.evaluation.of(split)
        numbers = sample_numbers(len(self.every), limit, seed=self.config.seed)
        return tuple(self.every[number] for number in numbers)

    def answers(
        self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Progress
    ) -> SourceOutput:
        """Read the file."""
        read = read_samples(self.path, self.every, self.decode, asked=examples)
        return [Sampled(one, outcomes=Outcomes.total(map(Outcomes.of, one))) for one in read], {}


@dataclass(frozen=True, slots=True)
class CheckpointSource(Source):
    """A policy of ours, sampled in this process or by SGLang servers."""

    policy: PolicySource
    accelerator: str

    @classmethod
    def of(
        cls, config: JobConfig, decode: Decode, policy: PolicySource, accelerator: str
    ) -> CheckpointSource:
        """Take a policy as it was trained, or one that a job's settings did not train."""
        run, backend = policy.run, config.rollout.sampler
        base = run.model.path if run else policy.model
        facts = ModelFacts(
            policy.name,
            str(policy.model),
            str(policy.checkpoint) if policy.checkpoint else None,
            base.name if base else "tiny",
            run.reward.kind if run else None,
            None if backend == "native" else backend,
        )
        return cls(config if run else config.for_untrained(), decode, facts, policy, accelerator)

    @property
    def folder(self) -> Path:
        """Return the folder of structure, tokenizer and, without a checkpoint, weights."""
        return self.policy.model

    def tokenizer(self) -> ChatTokenizer:
        """Read the tokenizer from the policy's folder."""
        return read_tokenizer(self.config, self.policy.model)

    def deciding(self) -> Mapping[str, Any]:
        """Name the folder of the weights, and all settings of the sampler."""
        where = (self.policy.checkpoint or self.policy.model).resolve()
        how = {"model": {"dtype"}, "env": True, "sampler": True, "evaluation": True}
        return {
            "weights": str(where),
            "backend": self.config.rollout.sampler,
            "accelerator": self.accelerator,
            **self._of_job(**how),
        }

    def answers(
        self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Progress
    ) -> SourceOutput:
        """Sample replies to questions that have none yet; without any such nothing is loaded."""
        sampler, file = {"sampler": self.config.rollout.sampler}, AnswerFile(out)
        found, notes = file.read(examples), dict[str, Any]()
        show(len(found), len(examples), "")
        if len(found) < len(examples):
            found, notes = self._sample(examples, file, sql, out, show)
        told = hint(unread_of(found), self.config.answer_wrapping)
        return found, {**sampler, **notes, "hint": told}

    def _sample(
        self, examples: Sequence[Example], file: AnswerFile, sql: SqlSide, out: Path, show: Progress
    ) -> tuple[Sequence[Sampled], dict[str, Any]]:
        from launch.evaluation.sampling import Evaluator, TakenAsTheyAre
        from launch.weights import load_policy

        config = self.config
        # Weights that cannot be read leave nothing in the folder.
        model, tokenizer = load_policy(self.policy, config)
        sql.check_test_prompts(examples, tokenizer)
        # A run is asked as in its training, where replies have rewards.
        is_trained = self.policy.run is not None or sql.evaluation_turns > 1
        limits = config.evaluation_sampler
        # Few questions need no cache for more.
        slots = min(limits.slots, len(examples) * self.decode.samples)
        limits = limits.model_copy(update={"slots": slots})
        wrapping = config.answer_wrapping
        taken = TakenAsTheyAre(sql.evaluation_prompt, wrapping)
        with serving(config, self.policy.model, out, limits, lora=self.policy.lora) as servers:
            evaluator = Evaluator(
                model, tokenizer, sql.evaluation_environment() if is_trained else taken,
                limits, self.decode, seed=config.seed, max_turns=sql.evaluation_turns,
                servers=servers, record=sql.record_scored if is_trained else None,
                wrapping=wrapping,
            )  # fmt: skip
            samples = evaluator.answers(examples, file, show, stops=True)
            evaluator.free_memory()
            return samples, evaluator.notes()


@dataclass(frozen=True, slots=True)
class EndpointSource(Source):
    """A model behind an endpoint; every answer is paid for once.

    Its temperature is that of the decoding unless that of the settings is null, where none is sent.
    """

    url: str

    def deciding(self) -> Mapping[str, Any]:
        """Name the model, whose server may move, and how it is asked; not how replies are read."""
        calls = set(type(self.config.endpoint).model_fields) - _MANNERS
        limits = set(type(self.config.evaluation).model_fields) - {"wrapping"}
        return {
            "endpoint": self.facts.model,
            **self._of_job(endpoint=calls, evaluation=limits),
        }

    def answers(
        self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Progress
    ) -> SourceOutput:
        """Ask what has no answer yet."""
        config, decode, calls = self.config, self.decode, self.config.endpoint
        if not self.is_judge and calls.temperature is not None:
            calls = calls.model_copy(update={"temperature": decode.temperature})
        top_p = 1.0 if self.is_judge or not decode.temperature else decode.top_p
        endpoint = Endpoint(
            self.url, self.facts.model or "", calls, top_p=top_p, template=config.prompt.template
        )
        client = CachedClient(endpoint, AnswerFile(out), seed=config.seed)
        if self.is_judge:
            return deliberate(config, examples, client, sql, show)
        play = partial(_once, config=config, sql=sql, samples=decode.samples)
        found, unread = _ask(config, examples, client, show, play, first=decode.samples)
        return found, {"hint": hint(unread, config.answer_wrapping)}


Play = Generator[list[ReplyRequest], Sequence[ModelResponse], Sampled]
"""Asks about one question, is sent the answers, and returns what came of it."""
_COUNTS = ("attempts", "executable", "refused", "judged", "left_out")


def _outcomes(answers: Sequence[ModelResponse], wrapping: Wrapping) -> Outcomes:
    """Count what became of answers that were to hold a query."""
    return Outcomes.total(
        Outcomes.of(
            answer_of(one.text or "", wrapping).sql,
            one.end,
            prompt_tokens=one.prompt_tokens,
            reply_tokens=one.completion_tokens,
        )
        for one in answers
    )


def _unread(answers: Iterable[ModelResponse], wrapping: Wrapping) -> list[str]:
    """List the texts that hold no query."""
    texts = (one.text for one in answers if one.text)
    return [text for text in texts if not answer_of(text, wrapping).sql]


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
    found, wrapping = dict[str, Sampled](), config.answer_wrapping
    written: defaultdict[str, list[ModelResponse]] = defaultdict(list)  # that were to hold a query
    limit, is_seen = f"endpoint.max_tokens={config.endpoint.max_tokens}", False
    for part in parts_of(len(examples), first, size=_CHUNK):
        plays = {one.id: play(one) for one in examples[part]}
        wishes = {name: next(one) for name, one in plays.items()}
        is_few = waits and part.start == 0 and part.stop < len(examples)
        while wishes:
            answers = client.answers(list(wishes.items()))
            if client.refusal and not is_few:
                raise UserError(client.refusal)
            for name, each in zip(list(wishes), answers, strict=True):
                asked = zip(wishes.pop(name), each, strict=True)
                written[name] += [answer for ask, answer in asked if ask.kind == "generate"]
                try:
                    wishes[name] = plays[name].send(each)
                except StopIteration as end:
                    found[name] = end.value
            if not is_seen:
                first_ones = [*chain.from_iterable(written.values())]
                counted, unread = _outcomes(first_ones, wrapping), _unread(first_ones, wrapping)
                look(counted, unread, wrapping, limit=limit, stops=True)
                is_seen = True
            show(len(found), len(examples), f"{client.written:,} tokens written")
    samples = [
        replace(found[one.id], outcomes=_outcomes(written[one.id], wrapping)) for one in examples
    ]
    return samples, _unread(chain.from_iterable(written.values()), wrapping)


def _once(example: Example, config: JobConfig, sql: SqlSide, samples: int) -> Play:
    """Ask a question so many times, each for itself."""
    prompt = sql.prompts.single_turn(example)
    answers = yield [ReplyRequest("generate", number, prompt) for number in range(samples)]
    read = [answer_of(one.text or "", config.answer_wrapping) for one in answers]
    return Sampled.of(read, ends=tuple(one.end for one in answers))


def _judged(example: Example, config: JobConfig, sql: SqlSide) -> Play:
    """Let the model write several queries, judge them, and take the best."""
    game = verbal.deliberate(_task(example, config, sql), config.endpoint, seed=config.seed)
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
    play, first = partial(_judged, config=config, sql=sql), config.endpoint.candidates
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
