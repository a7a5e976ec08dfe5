"""The SQL side of a job, built from its settings: data, prompts, environments, reward."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config import JobConfig, Split
from launch.data.preflight import sample, split_reader
from launch.data.prompts import Prompts
from launch.records import StepRecorder, episode_record
from minirl.config import SamplerConfig
from minirl.exchange import Score, UserError
from rewards.compose import build_reward
from rewards.execution import gold_result
from rewards.progress.diagnosis import feedback
from sqlenv.cache import shared_cache
from sqlenv.config import AgenticConfig, AnswerConfig, SingleTurnConfig
from sqlenv.demo import STAMP, generate
from sqlenv.envs.build import build_environment, max_replies
from sqlenv.envs.single_turn import BaseEnvironment
from sqlenv.executor import Executor
from sqlenv.prompts import ASKED_FOR
from sqlenv.schema.rendering import sample_columns
from sqlenv.types import Episode, Example, Observation, Table

# Evaluating an endpoint needs the SQL side alone, and no JAX.
if TYPE_CHECKING:
    from minirl.model.tokenizer import ChatTokenizer
    from minirl.train.rollouts import TrainingTask

_log = logging.getLogger(__name__)

# First prompts kept: those of a step.
_PROMPTS = 1024
_NO_QUERY = "rollout/no_query_share"
REFUTED = "rollout/refuted_share"
"""Metric: of the answers that look right, the share that a witness refutes."""


def _demo_folder(config: JobConfig, folder: Path) -> Path:
    """Name where demo data is: in the run, unless that has some of other settings."""
    own, demo = config.folder / "data", config.data.demo
    stamp = own / STAMP
    is_same = demo and stamp.is_file() and json.loads(stamp.read_bytes()) == demo.model_dump()
    return own if is_same else folder / "data"


class SqlSide(AbstractContextManager["SqlSide"]):
    """Data, environments and reward of a job; demo data is the run's own, or made in a folder.

    A context manager: it owns the executor.
    """

    def __init__(self, config: JobConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.root = config.data.root or _demo_folder(config, folder)
        if config.data.demo is not None:
            from minirl.run import distributed

            distributed.from_first(partial(generate, self.root, config.data.demo))
        self.executor = Executor(config.executor, shared_cache())
        self._read = split_reader(config, self.root, self.executor)
        self.prompts = Prompts(config.prompt, config.env)
        # What accuracy is measured in: one turn, or the tool-calling episode.
        is_agentic = config.evaluation.episode == "agentic"
        self.evaluation_prompt = self.prompts.training if is_agentic else self.prompts.single_turn
        self.evaluation_turns = max_replies(config.env) if is_agentic else 1
        self.reward = build_reward(config.reward, self.executor, config.env.compared)
        self._environment = partial(
            build_environment,
            executor=self.executor,
            feedback=partial(feedback, form=ASKED_FOR[config.prompt.style]),
        )

    def __exit__(self, *_exception: object) -> None:
        self.executor.close()

    def examples(self, split: Split, *, limit: int | None = None) -> tuple[Example, ...]:
        """Load and check the questions of a split, at most `limit` of them: a sample by seed, of
        test questions the same for all seeds and models.
        """
        loaded = self._read(split)
        for line in loaded.lines():
            _log.info(line)
        self.prompts.describe(loaded.descriptions)
        seed = 0 if split == "test" else self.config.seed
        found, count = sample(loaded.examples, limit, seed=seed), len(loaded.examples)
        if len(found) < count:
            _log.info("%s: a sample of %d of %d questions", split, len(found), count)
        return tuple(found)

    def environment(self, tokenizer: ChatTokenizer | None = None) -> BaseEnvironment:
        """Build the training environment; with a tokenizer, prompts are shortened to fit."""
        prompt = partial(self.training_prompt, tokenizer=tokenizer)
        # The episodes of a group ask the same question.
        first_prompt = lru_cache(maxsize=_PROMPTS)(prompt)
        return self._environment(self.config.env, first_prompt=first_prompt)

    def evaluation_environment(self) -> BaseEnvironment:
        """Build the environment of `evaluation.episode`: one turn, or the tool-calling episode."""
        env = self.config.env.model_copy(update={"wrapping": self.config.answer_wrapping})
        if self.evaluation_turns == 1:
            env = SingleTurnConfig(
                **{name: getattr(env, name) for name in AnswerConfig.model_fields}
            )
        return self._environment(env, first_prompt=self.evaluation_prompt)

    def task(
        self,
        train: Sequence[Example],
        tokenizer: ChatTokenizer,
        *,
        validate: Callable[[Any, int], float],
        log: Callable[[int, Mapping[str, float]], None],
    ) -> TrainingTask:
        """Give the learner what it sees of the job."""
        from minirl.train.rollouts import TrainingTask

        recorder = StepRecorder(self.folder, tokenizer.decode)
        return TrainingTask(
            environment=self.environment(tokenizer),
            score=self.reward,
            describe=self.describe,
            record=self.record,
            write=recorder.write,
            train=train,
            validate=validate,
            max_turns=max_replies(self.config.env),
            stratum=attrgetter("db_id"),
            shares={
                _NO_QUERY: "no query",
                **({REFUTED: "right by luck"} if self.config.env.witnesses else {}),
            },
            log=log,
        )

    def record(self, episode: Episode) -> Mapping[str, Any]:
        """Write a final episode as `trajectories.jsonl` shows it."""
        gold = gold_result(self.executor, episode.example)
        return episode_record(episode, gold, self.executor.execute)

    def record_scored(self, episode: Episode) -> tuple[Mapping[str, Any], Score]:
        """Write down a final episode of an evaluation, and what training would pay for it."""
        return self.record(episode), self.reward(episode)

    def training_prompt(self, example: Example, tokenizer: ChatTokenizer | None) -> Observation:
        """Put a question so that the prompt fits `sampler.max_prompt_tokens`, if it can be made to.

        Columns of the gold query and keys stay, others are dropped at random by seed. Only training
        does this; evaluation never looks at the gold query.
        """
        put, limit = partial(self.prompts.training, example), self.config.sampler.max_prompt_tokens

        def fits(prompt: Observation) -> bool:
            # A token is at least a byte, so most prompts need no count.
            is_short = sum(len(message.content.encode()) for message in prompt) < limit
            return is_short or tokenizer is None or len(tokenizer.encode_chat(prompt)) <= limit

        whole = put()
        if fits(whole):
            return whole
        schema, seed = self.prompts.schema(example), self.config.seed
        cut = sample_columns(schema, example.gold_sql, seed=seed, fits=lambda cut: fits(put(cut)))
        return put(cut)

    def check_training_prompts(self, train: Sequence[Example], tokenizer: ChatTokenizer) -> None:
        """Raise a `UserError` if no training prompt fits."""
        prompts = (self.training_prompt(example, tokenizer) for example in train)
        _check_prompts("sampler", self.config.sampler, prompts, tokenizer)

    def check_test_prompts(self, test: Sequence[Example], tokenizer: ChatTokenizer) -> None:
        """Raise a `UserError` if no prompt of an evaluation fits; one that does not is counted."""
        section = "sampler" if self.config.evaluation.max_prompt_tokens is None else "evaluation"
        prompts = map(self.evaluation_prompt, test)
        _check_prompts(section, self.config.evaluation_sampler, prompts, tokenizer)

    def describe(self, episode: Episode) -> Mapping[str, float]:
        """Say what a final episode adds to the metrics."""
        attempts, answer = episode.attempts, episode.final_attempt
        invalid = [not isinstance(attempt.result, Table) for attempt in attempts]
        numbers = {
            "rollout/accuracy_first": float(attempts[0].correct),
            "rollout/invalid_share": sum(invalid) / len(invalid),
            _NO_QUERY: float(not (answer and answer.sql)),
        }
        if self.config.env.witnesses and answer and (answer.correct or answer.refuted):
            numbers[REFUTED] = float(answer.refuted is not None)  # of those that look right
        diagnostics = getattr(self.reward, "diagnostics", None)  # of some families
        numbers |= diagnostics(episode) if diagnostics else {}
        if isinstance(self.config.env, AgenticConfig):
            kinds = [attempt.kind for attempt in attempts if attempt.kind != "answer"]
            numbers["rollout/calls"] = float(len(kinds))
            numbers["rollout/bad_calls"] = float(kinds.count("bad_call"))
        return numbers


def _check_prompts(
    section: str, limits: SamplerConfig, prompts: Iterable[Observation], tokenizer: ChatTokenizer
) -> None:
    limit = limits.max_prompt_tokens
    if all(len(tokenizer.encode_chat(prompt)) > limit for prompt in prompts):
        raise UserError(f"{section}.max_prompt_tokens: no prompt fits {limit} tokens; allow more")
