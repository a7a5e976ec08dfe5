"""Replies of a policy to questions, from one sampler: in a run of launch.train, and alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.build import SqlSide
from launch.config import JobConfig
from launch.evaluation.answers import (
    FIRST,
    AnswerFile,
    Decode,
    End,
    ModelFacts,
    Outcomes,
    Sampled,
    Source,
    SourceOutput,
    look,
    unread_of,
)
from launch.learner import load_model, serving
from launch.policy import PolicySource
from launch.records import RECORDED_SAMPLES, group_line
from minirl.config import SamplerConfig
from minirl.exchange import LostError, Score, UserError
from minirl.model.decoder import Decoder
from minirl.model.lora import trained
from minirl.model.tokenizer import ChatTokenizer
from minirl.run import distributed
from minirl.sample.rollout import Rollout
from minirl.sglang import EVENTS
from minirl.train.rollouts import gather_metrics, make_sampler
from minirl.types import Environment, Progress, Trajectory
from sqlenv.envs.single_turn import FirstPrompt
from sqlenv.sql.answers import answer_of
from sqlenv.types import Answer, Attempt, Episode, Example, Observation, SqlError, Wrapping

if TYPE_CHECKING:
    from minirl.sglang.sampler import Servers

_log = logging.getLogger(__name__)
FIRST_EPISODE = 2**30
"""Episode numbers name random streams: those of evaluations lie above all of training."""
# Replies between two writes of the predictions: what an interruption may cost.
CHUNK = 128
_ROUNDS = 4  # of all slots that a chunk fills at least: at its end slots stand empty

_NO_ANSWER = Answer("")

Recorder = Callable[[Episode], tuple[Mapping[str, Any], Score]]


def _fail(_number: int, error: Exception) -> None:
    """End an evaluation whose environment has failed by an error before which a run is saved: an
    accuracy over fewer questions would be another one.
    """
    words = f"{error}"
    if not isinstance(error, UserError):
        _log.error("the error of an environment", exc_info=error)
        words = f"an environment has failed: {error!r}; mend that"
    raise LostError(words)


@dataclass(frozen=True, slots=True)
class Answered:
    """What is kept of a final episode: no rows of its results, since all samples of many questions
    are in memory together.

    Attributes:
        answer: The last reply; an empty one if that does not answer the question.
        turns: Its answers, or, as SQL-ASTRA's appendices D and F count, its calls of the tool, to
            the last of which the answer belongs.
        record, score: What is written down of it, and what training would pay.
    """

    answer: Answer = _NO_ANSWER
    is_correct: bool = False
    turns: int = 1
    record: Mapping[str, Any] | None = None
    score: Score | None = None

    @classmethod
    def of(cls, episode: Episode, *, record: Recorder | None) -> Answered:
        """Record an episode, if that is asked for."""
        final, attempts = episode.final_attempt, episode.attempts
        turns = sum(attempt.kind != "answer" for attempt in attempts) or len(attempts)
        answer, is_correct = (final.answer, final.correct) if final else (_NO_ANSWER, False)
        return cls(answer, is_correct, turns, *(record(episode) if record else ()))


class Evaluator:
    """Samples replies with one sampler, so that it compiles once.

    Servers, if there are any, sample in place of the native sampler. `group_size` replies to a
    question share one kept prompt, `record` writes an episode down.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: ChatTokenizer,
        environment: Environment,
        limits: SamplerConfig,
        config: JobConfig,
        *,
        group_size: int = 1,
        max_turns: int = 1,
        servers: Servers | None = None,
        record: Recorder | None = None,
    ) -> None:
        self._tokenizer, self._environment, self._record = tokenizer, environment, record
        self._limits, self._config, self._max_turns = limits, config, max_turns
        self._sampler = make_sampler(
            model, limits, tokenizer, group_size=group_size, seed=config.seed, servers=servers
        )
        # Pushed on first use, so that callers who set other weights never copy these.
        self._start: Any = trained(model)

    def set_weights(self, params: Any, *, version: int) -> None:
        """Measure these weights next, once: the memory of their copy is given back then."""
        self._start = None
        self._sampler.set_weights(params, version=version)

    def free_memory(self) -> None:
        """Give back what is needed only to sample."""
        self._sampler.free_memory()

    def notes(self) -> dict[str, Any]:
        """Report failures of servers. All processes have to ask."""
        told = gather_metrics(self._sampler)
        events = {name: int(told[name]) for name in EVENTS if told.get(name)}
        return {"servers": events} if events else {}

    def accuracy(self, examples: Sequence[Example]) -> float:
        """Return the share of correct answers, sampled as validations are; 0 for no question."""
        own = self._config.evaluation
        validation = Decode(1, own.validation_temperature, top_p=own.top_p)
        found = self.sample(examples, validation, first=0, has_records=False)
        self.free_memory()
        return sum(one.right[0] for one in found) / max(len(found), 1)

    def answers(
        self,
        examples: Sequence[Example],
        decode: Decode,
        file: AnswerFile,
        show: Progress,
        *,
        stops: bool,
        first: int = 0,
    ) -> list[Sampled]:
        """Answer questions, or what is left of them: each answer is in the file.

        What became of the first replies is told; with `stops` it is an error if none has a query.
        The number of the first question names random streams. Weights stay until `free_memory`.
        """
        found = distributed.from_first(lambda: file.read(examples))
        replies = max(CHUNK, _ROUNDS * self._limits.slots) * distributed.count()
        while (done := len(found)) < len(examples):
            show(done, len(examples), "")
            # Of the first questions so many that they have the first replies.
            size = -(-(replies if done else FIRST) // decode.samples)
            part = examples[done : done + size]
            new = self.sample(part, decode, first=first + done)
            if done == 0:  # nothing is kept of what is asked in another way
                counted = Outcomes.total(one.outcomes for one in new)
                look(counted, unread_of(new), self._config.answer_wrapping, stops=stops)
            distributed.from_first(partial(file.write, part, new))
            found += new
        show(len(found), len(examples), "")
        return found

    def sample(
        self, examples: Sequence[Example], decode: Decode, *, first: int, has_records: bool = True
    ) -> list[Sampled]:
        """Sample replies to questions, of which the first has this number; each process samples
        those of its share.
        """
        if self._start is not None:
            self.set_weights(self._start, version=0)
        record = self._record if has_records else None
        share = distributed.process_share(len(examples))

        def groups() -> list[Sampled]:
            found = Rollout(
                self._sampler,
                self._tokenizer,
                self._environment,
                [examples[place] for place in share],
                config=self._limits.model_copy(
                    update={"temperature": decode.temperature, "top_p": decode.top_p}
                ),
                group_size=decode.samples,
                first_episode=FIRST_EPISODE + (first + share.start) * decode.samples,
                max_turns=self._max_turns,
                failed=_fail,
                finish=partial(Answered.of, record=record),
            ).play()
            return [self._read(group, decode.samples) for group in found]

        return [one for part in distributed.gather(groups) for one in part]

    def _read(self, group: Sequence[Trajectory], samples: int) -> Sampled:
        """Keep of episodes what evaluations look at; there are none where the prompt is too long.

        A reply without an answer is a sample too, of which nothing runs.
        """
        ends: tuple[End, ...] = tuple("length" if one.is_cut_off else "stop" for one in group)
        answered = [one.episode for one in group] or [Answered()] * samples
        recorded = [one for one in group[:RECORDED_SAMPLES] if one.episode.record]
        outcomes = [
            Outcomes.of(
                one.episode.answer.sql,
                end,
                prompt_tokens=sum(len(turn.observation_ids) for turn in one.turns),
                reply_tokens=sum(len(turn.reply.ids) for turn in one.turns),
            )
            for one, end in zip(group, ends, strict=True)
        ]
        return Sampled.of(
            [one.answer for one in answered],
            ends=ends or ("too_long",) * samples,
            outcomes=Outcomes.total(outcomes or [Outcomes.of("", "too_long")] * samples),
            turns=tuple(one.turns for one in answered) if self._max_turns > 1 else (),
            line=group_line(recorded, self._tokenizer.decode) if recorded else None,
            right=tuple(one.is_correct for one in answered),
        )


_NOT_RUN = SqlError("not run")


class TakenAsTheyAre:
    """An environment of one reply, which it does not judge: the evaluation does, once."""

    def __init__(self, first_prompt: FirstPrompt, wrapping: Wrapping) -> None:
        self._first_prompt, self._wrapping = first_prompt, wrapping

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        """Ask the question."""
        return Episode(example), self._first_prompt(example)

    def step(self, episode: Episode, reply: str) -> tuple[Episode, None]:
        """Take the query out of a reply."""
        attempt = Attempt(answer_of(reply, self._wrapping), _NOT_RUN, correct=False)
        return Episode(episode.example, (attempt,)), None


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

    def answers(self, examples: Sequence[Example], sql: SqlSide, show: Progress) -> SourceOutput:
        """Sample replies to questions that have none yet; without any such nothing is loaded."""
        sampler, file = {"sampler": self.config.rollout.sampler}, AnswerFile(sql.folder)
        found, notes = file.read(examples), dict[str, Any]()
        show(len(found), len(examples), "")
        if len(found) < len(examples):
            found, notes = self._sample(examples, file, sql, show)
        return found, {**sampler, **notes}

    def _sample(
        self, examples: Sequence[Example], file: AnswerFile, sql: SqlSide, show: Progress
    ) -> tuple[Sequence[Sampled], dict[str, Any]]:
        config = self.config
        # Weights that cannot be read leave nothing in the folder.
        where, lora, checkpoint = self.policy.model, self.policy.lora, self.policy.checkpoint
        model, tokenizer = load_model(config, where, lora=lora, checkpoint=checkpoint)
        sql.check_test_prompts(examples, tokenizer)
        # A run is asked as in its training, where replies have rewards.
        is_trained = self.policy.run is not None or sql.evaluation_turns > 1
        limits = config.evaluation_sampler
        # Few questions need no cache for more.
        slots = min(limits.slots, len(examples) * self.decode.samples)
        limits = limits.model_copy(update={"slots": slots})
        taken = TakenAsTheyAre(sql.evaluation_prompt, config.answer_wrapping)
        with serving(config, where, sql.folder, limits, lora=lora) as servers:
            evaluator = Evaluator(
                model, tokenizer, sql.evaluation_environment() if is_trained else taken,
                limits, config, group_size=self.decode.samples, max_turns=sql.evaluation_turns,
                servers=servers, record=sql.record_scored if is_trained else None,
            )  # fmt: skip
            samples = evaluator.answers(examples, self.decode, file, show, stops=True)
            evaluator.free_memory()
            return samples, evaluator.notes()
