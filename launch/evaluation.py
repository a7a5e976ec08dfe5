"""Predictions of a model on questions, with one sampler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from launch.statistics import mean_interval
from launch.verdicts import Verdict, accuracy, read_verdicts
from launch.votes import Decode, majority
from minirl.config import SamplerConfig
from minirl.errors import UserError
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.tokenizer import ChatTokenizer
from minirl.run import distributed
from minirl.run.files import naming
from minirl.sample.rollout import rollout
from minirl.sglang.pool import EVENTS
from minirl.sglang.sampler import Servers
from minirl.train.recording import TRAJECTORIES, group_line, open_records
from minirl.train.rollouts import gather_metrics, make_sampler
from minirl.types import Decoding, Trajectory
from sqlenv.envs.agentic import Agentic
from sqlenv.envs.single_turn import SingleTurn
from sqlenv.evaluators.votes import ballot, without_rows
from sqlenv.types import Attempt, Episode, Example, Observation

# Episode numbers name random streams: those of evaluations lie above all of training.
_FIRST_EPISODE = 2**30
# Questions between two writes of the predictions: what an interruption may cost.
_CHUNK = 128
GREEDY = Decode(samples=1, temperature=0.0)
RECORDED_SAMPLES = 8
"""Samples of a question that are written down."""

Record = Callable[[Episode], Mapping[str, Any]]
Line = Mapping[str, Any]


class Evaluator:
    """Measures accuracy with one sampler, so that it compiles once.

    Args:
        model: Gives the structure and the first weights.
        tokenizer: Its tokenizer.
        environment: Judges replies.
        config: Slots and token limits.
        decode: How questions are answered.
        validation: How those of `accuracy` are; None for greedy.
        seed: Seed of samples.
        max_turns: The most replies to a question.
        servers: Those that sample in place of the native sampler.
        record: Writes an episode down for a person to look at; None for no record of any.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: ChatTokenizer,
        environment: SingleTurn | Agentic,
        config: SamplerConfig,
        decode: Decode,
        *,
        seed: int,
        validation: Decode | None = None,
        max_turns: int = 1,
        servers: Servers | None = None,
        record: Record | None = None,
    ) -> None:
        self._tokenizer, self._environment = tokenizer, WithoutRows(environment)
        self._recorded = WithoutRows(environment, record)
        self._config, self._decode = config, decode
        self._validation = validation or GREEDY
        self._choose = right_one if decode.kind == "pass" else vote
        self._max_turns = max_turns
        self._sampler = make_sampler(
            model, config, tokenizer, group_size=decode.samples, seed=seed, servers=servers
        )
        # Servers have other weights until they are told.
        self._start = None if servers is None else split(model)[1]

    def set_weights(self, params: Any, *, version: int) -> None:
        """Measure these weights next, once: the memory of their copy is given back then."""
        self._start = None
        self._sampler.set_weights(params, version=version)

    def notes(self) -> dict[str, Any]:
        """Say what else a result should tell: what befell servers. All processes have to ask."""
        told = gather_metrics(self._sampler)
        events = {name: int(told[name]) for name in EVENTS if told.get(name)}
        return {"servers": events} if events else {}

    def accuracy(self, examples: Sequence[Example]) -> float:
        """Return the share of correct answers, sampled as validations are; 0 for no question."""
        answered = self._sample(examples, self._validation, self._environment, first=0)
        self._free_memory()
        return accuracy([verdict for verdict, _ in answered])

    def predict(
        self,
        examples: Sequence[Example],
        path: Path,
        *,
        progress: Callable[[int, int, str], None],
    ) -> list[Verdict]:
        """Answer questions, writing each verdict to a file of JSON lines.

        Questions that the file already answers are not asked again.

        Raises:
            UserError: The file answers other questions.
        """
        done = distributed.from_first(lambda: _found(path))
        records = open_records(path.with_name(TRAJECTORIES), resume_step=len(done))
        asked = [(example.id, example.gold_sql) for example in examples[: len(done)]]
        if asked != [(verdict.id, verdict.gold) for verdict in done]:
            raise UserError(f"{path}: holds predictions for other questions; move it away")
        chunk = _CHUNK * distributed.count()
        for start in range(len(done), len(examples), chunk):
            new, lines = self._answer(examples[start : start + chunk], first=start)
            # Before the verdicts: a question that is done has its record.
            for number, line in enumerate(lines, start + 1):
                records.write(number, line)
            distributed.from_first(partial(_append, path, new))
            done += new
            progress(len(done), len(examples), f"accuracy {100 * accuracy(done):.1f} %")
        self._free_memory()
        return done

    def _free_memory(self) -> None:
        """Give back what is needed only to answer."""
        self._sampler.free_memory()

    def _answer(
        self, examples: Sequence[Example], *, first: int
    ) -> tuple[list[Verdict], list[Line]]:
        """Answer questions as the files of predictions and of trajectories have them."""
        answered = self._sample(examples, self._decode, self._recorded, first=first)
        lines = [line for _, line in answered if line is not None]
        return [verdict for verdict, _ in answered], lines

    def _sample(
        self, examples: Sequence[Example], decode: Decode, environment: WithoutRows, *, first: int
    ) -> list[tuple[Verdict, Line | None]]:
        """Answer questions, each process its share of them."""
        if self._start is not None:
            self.set_weights(self._start, version=0)
        share = distributed.own_share(len(examples))
        own = [examples[place] for place in share]
        parts = distributed.gather(
            lambda: self._sample_own(own, decode, environment, first=first + share.start)
        )
        return [answer for part in parts for answer in part]

    def _sample_own(
        self, examples: Sequence[Example], decode: Decode, environment: WithoutRows, *, first: int
    ) -> list[tuple[Verdict, Line | None]]:
        groups = rollout(
            self._sampler,
            self._tokenizer,
            environment,
            examples,
            config=self._config,
            group_size=decode.samples,
            first_episode=_FIRST_EPISODE + first * decode.samples,
            decoding=Decoding(decode.temperature, decode.top_p),
            max_turns=self._max_turns,
        )
        return [
            (
                self._verdict(example, [trajectory.episode for trajectory in group]),
                _line(group, self._tokenizer.decode),
            )
            for example, group in zip(examples, groups, strict=True)
        ]

    def _verdict(self, example: Example, episodes: Sequence[Episode]) -> Verdict:
        """Choose among the answers of a question; an episode may have none."""
        answers = [episode.answer for episode in episodes]
        chosen = self._choose([answer for answer in answers if answer is not None])
        sql, correct = (chosen.sql, chosen.correct) if chosen else ("", False)
        # A reply without an answer is a sample too, of which nothing runs.
        sampled = [answer.sql if answer else "" for answer in answers]
        turns = [len(one.attempts) for one in episodes] if self._environment.has_calls else ()
        return Verdict.of(example, sql, correct=correct, samples=sampled, turns=turns)


class WithoutRows:
    """An environment whose episodes, when they are over, hold votes in place of rows: those of all
    samples of many questions are in memory together.

    Args:
        environment: It.
        record: Writes an episode down while it has rows; None for no record.
    """

    def __init__(self, environment: SingleTurn | Agentic, record: Record | None = None) -> None:
        self._environment, self._record = environment, record
        self.has_calls = isinstance(environment, Agentic)

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        """Start an episode."""
        return self._environment.reset(example)

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply."""
        after, observation = self._environment.step(episode, reply)
        if observation is None:
            kept = (replace(one, result=without_rows(one.result)) for one in after.attempts)
            record = self._record(after) if self._record is not None else None
            after = Answered(after.example, tuple(kept), record)
        return after, observation


@dataclass(frozen=True, slots=True)
class Answered(Episode):
    """An episode that is over, with what is written down of it."""

    record: Mapping[str, Any] | None = None


def _line(group: Sequence[Trajectory], decode: Callable[[Sequence[int]], str]) -> Line | None:
    """Write down the first samples of a question; None where none was recorded."""
    kept = [one for one in group if isinstance(one.episode, Answered) and one.episode.record]
    kept = kept[:RECORDED_SAMPLES]
    return group_line(kept, [one.episode.record for one in kept], decode) if kept else None


def vote(attempts: Sequence[Attempt]) -> Attempt | None:
    """Choose the first attempt of the commonest result (`votes.majority`).

    Without a query that runs, the first attempt is chosen; without any attempt (a prompt too long,
    a budget spent on calls), none.
    """
    winner = majority([ballot(attempt.result) for attempt in attempts])
    return attempts[winner or 0] if attempts else None


def right_one(attempts: Sequence[Attempt]) -> Attempt | None:
    """Choose the first attempt that is right, as an oracle would: pass@n. Else the first one."""
    return next((attempt for attempt in attempts if attempt.correct), next(iter(attempts), None))


def _found(path: Path) -> list[Verdict]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return read_verdicts(path) if path.exists() else []


def _append(path: Path, verdicts: Sequence[Verdict]) -> None:
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(verdict)) + "\n" for verdict in verdicts)


def ci95(verdicts: Sequence[Verdict]) -> list[float]:
    """Return the interval of an accuracy, rounded for a report."""
    low, high = mean_interval([float(verdict.correct) for verdict in verdicts])
    return [round(low, 6), round(high, 6)]
