"""One question, one reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from sqlenv.config import AnswerConfig, SingleTurnConfig
from sqlenv.dialects import run_in_dialect, transpile
from sqlenv.evaluators.comparators import Case, QueryRuns, ask
from sqlenv.evaluators.equality import like_gold
from sqlenv.sql.answers import answer_of
from sqlenv.types import (
    Answer,
    Attempt,
    Counterexample,
    Episode,
    Example,
    ExecutionMatch,
    Numbers,
    Observation,
    Result,
    SqlError,
    Table,
)
from sqlenv.witness.store import WitnessStore

Config = TypeVar("Config", bound=AnswerConfig)
Name = TypeVar("Name", bound=ExecutionMatch)
FirstPrompt = Callable[[Example], Observation]


class Runner(Protocol):
    """What environments and rewards need of the executor."""

    def execute(self, database: Path, sql: str, /, *, max_steps: int | None = None) -> Result:
        """Run a query of the model, or a part of one within fewer steps."""
        ...

    def gold(self, database: Path, sql: str, /) -> Result:
        """Run a gold query, or return its cached result."""
        ...


class BaseEnvironment(ABC, Generic[Config]):
    """How every environment begins. Stateless, so that threads can share one."""

    def __init__(
        self,
        config: Config,
        *,
        executor: Runner,
        first_prompt: FirstPrompt,
        witnesses: WitnessStore | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._first_prompt = first_prompt
        self._witnesses = witnesses

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        """Ask the question."""
        return Episode(example), self._first_prompt(example)

    @abstractmethod
    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply: return the new episode and the next observation, None at the end."""

    def _judge(self, example: Example, reply: str) -> Attempt:
        return self._ask_witnesses(
            example, judge_reply(example, reply, self._executor, self._config)
        )

    def _ask_witnesses(self, example: Example, attempt: Attempt) -> Attempt:
        if not (attempt.correct and self._witnesses):
            return attempt
        files = witnesses_of(example, self._witnesses)
        found = first_refuting(example, attempt.sql, files, self._executor, self._config)
        return replace(attempt, correct=found is None, refuted=found)


class SingleTurn(BaseEnvironment[SingleTurnConfig]):
    """Judges one reply by execution."""

    def step(self, episode: Episode, reply: str) -> tuple[Episode, None]:
        """Judge the reply; the episode is over."""
        attempt = self._judge(episode.example, reply)
        return Episode(episode.example, (*episode.attempts, attempt)), None


def judge_reply(example: Example, reply: str, executor: Runner, config: AnswerConfig) -> Attempt:
    """Run the SQL of a reply, and compare its result with the gold result; see `judge_answer`."""
    return judge_answer(example, answer_of(reply, config.wrapping), executor, config)


def judge_answer(
    example: Example, answer: Answer, executor: Runner, config: AnswerConfig
) -> Attempt:
    """Run the SQL that was read in a reply, and compare its result with the gold result.

    A reply without a query is an error and never runs; so is a query of another dialect that
    cannot be transpiled.
    """
    if not answer.sql:
        return Attempt(answer, SqlError("no SQL in the reply"), correct=False)
    result = run_in_dialect(executor.execute, example, answer.sql)
    return judge_result(example, answer, result, executor, config)


def judge_result(
    example: Example, answer: Answer, result: Result, executor: Runner, config: AnswerConfig
) -> Attempt:
    """Compare the result of a query with the gold result.

    A failing gold query matches nothing. What depends on the clock or on chance is not right, and
    its result stays marked, so that no reward pays for a part of it either. Numbers of the result
    that are the same as the gold result's are written as there, so that rewards compare them
    likewise.
    """
    if isinstance(result, Table):
        if result.nondeterministic:
            return Attempt(answer, result, correct=False)
        result = like_gold(
            result, run_in_dialect(executor.gold, example, example.gold_sql), config.compared
        )
    names = (config.match,)
    found = find_matches(example, answer.sql, result, executor, names, config.compared)
    return Attempt(answer, result, correct=found[config.match])


def witnesses_of(example: Example, witnesses: WitnessStore) -> tuple[Path, ...]:
    """Return the witnesses of a question's gold query; none of one that cannot be transpiled, or
    whose own rule may count the rows of the question's database.
    """
    gold = transpile(example.gold_sql, example.dialect)
    if example.grading_method or not isinstance(gold, str):
        return ()
    return witnesses.of(example.database, gold)


def first_refuting(
    example: Example, sql: str, files: Sequence[Path], executor: Runner, config: AnswerConfig
) -> Counterexample | None:
    """Return the first witness on which a query is wrong; None where it is right on all."""
    for number, file in enumerate(files, start=1):
        there = replace(example, database=file)
        attempt = judge_answer(there, Answer(sql, sql), executor, config)
        if not attempt.correct:
            return Counterexample(number, file, attempt.result)
    return None


def find_matches(
    example: Example,
    sql: str,
    result: Result,
    executor: Runner,
    names: Sequence[Name],
    numbers: Numbers,
) -> dict[Name, bool]:
    """Ask comparators whether a query is right, also where it is so by luck.

    A query whose result as it stands is no table is not right, also where an official program would
    mend its text first. Where a comparator changes the text, the query is run once more. Any of a
    question's gold queries may match, and its own rule goes before all comparators. The result has
    numbers as the first gold's has them already (`like_gold`).
    """
    predicted = transpile(sql, example.dialect)
    if not (isinstance(predicted, str) and isinstance(result, Table)):
        return dict.fromkeys(names, False)
    database, own = example.database, "graded" if example.grading_method else None
    golds = [transpile(text, example.dialect) for text in (example.gold_sql, *example.alternatives)]
    cases = [
        Case(
            predicted,
            gold,
            database,
            grading_method=example.grading_method,
            numbers=numbers if number else "exact",
        )
        for number, gold in enumerate(golds)
        if isinstance(gold, str)
    ]
    runs = QueryRuns(executor.execute, executor.gold, known={(database, predicted): result})
    return {name: any(ask(own or name, case, runs).score == 1 for case in cases) for name in names}
