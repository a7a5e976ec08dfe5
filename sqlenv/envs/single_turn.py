"""One question, one reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar, cast, get_args

from sqlenv.config import AnswerConfig, SingleTurnConfig
from sqlenv.dialects import run_in_dialect, transpile
from sqlenv.evaluators.comparators import Case, QueryRuns, outcome_of
from sqlenv.evaluators.equality import like_gold, matches
from sqlenv.executor import Executor
from sqlenv.sql.answers import answer_of
from sqlenv.types import (
    Answer,
    Attempt,
    Counterexample,
    Episode,
    Example,
    ExecutionMatch,
    MatchMode,
    Numbers,
    Observation,
    Result,
    SqlError,
    Table,
)
from sqlenv.witness.store import WitnessStore

Config = TypeVar("Config", bound=AnswerConfig)
FirstPrompt = Callable[[Example], Observation]


@dataclass(frozen=True)
class BaseEnvironment(ABC, Generic[Config]):
    """How every environment begins. Stateless, so that threads can share one.

    An answer has to be right on all `witnesses` too, if there are any.
    """

    config: Config
    _: KW_ONLY
    executor: Executor
    first_prompt: FirstPrompt
    witnesses: WitnessStore | None = None

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        """Ask the question."""
        return Episode(example), self.first_prompt(example)

    @abstractmethod
    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply: return the new episode and the next observation, None at the end."""

    def _judge(
        self, example: Example, reply: str | Answer, result: Result | None = None
    ) -> Attempt:
        """Judge a reply as `judge_reply` does, and on the witnesses if there are any."""
        attempt = judge_reply(example, reply, self.executor, self.config, result=result)
        if not (attempt.correct and self.witnesses):
            return attempt
        files = witnesses_of(example, self.witnesses)
        found = first_refuting(example, attempt.sql, files, self.executor, self.config)
        return replace(attempt, correct=found is None, refuted=found)


class SingleTurn(BaseEnvironment[SingleTurnConfig]):
    """Judges one reply by execution."""

    def step(self, episode: Episode, reply: str) -> tuple[Episode, None]:
        """Judge the reply; the episode is over."""
        attempt = self._judge(episode.example, reply)
        return Episode(episode.example, (*episode.attempts, attempt)), None


def judge_reply(
    example: Example,
    reply: str | Answer,
    executor: Executor,
    config: AnswerConfig,
    *,
    result: Result | None = None,
    numbers: Numbers | None = None,
) -> Attempt:
    """Run the SQL of a reply and compare its result with the gold result. The reply may be read
    already and its query run already (`result`); `numbers` overrides the setting.

    A reply without a query is an error and never runs; so is a query of another dialect that
    cannot be transpiled. A failing gold query matches nothing. What depends on the clock or on
    chance is not right, and its result stays marked, so that no reward pays for a part of it
    either. Numbers of the result that are the same as the gold result's are written as there, so
    that rewards compare them likewise.
    """
    answer = answer_of(reply, config.wrapping) if isinstance(reply, str) else reply
    if not answer.sql:
        return Attempt(answer, SqlError("no SQL in the reply"), correct=False)
    if result is None:
        result = run_in_dialect(executor.execute, example, answer.sql)
    if not isinstance(result, Table) or result.nondeterministic:
        return Attempt(answer, result, correct=False)
    gold = run_in_dialect(executor.gold, example, example.gold_sql)
    numbers = numbers or config.compared
    result = like_gold(result, gold, numbers)
    correct = is_right(example, answer.sql, result, executor, config.match, numbers)
    return Attempt(answer, result, correct)


def witnesses_of(example: Example, witnesses: WitnessStore) -> tuple[Path, ...]:
    """Return the witnesses of a question's gold query; none of one that cannot be transpiled, or
    whose own rule may count the rows of the question's database.
    """
    gold = transpile(example.gold_sql, example.dialect)
    if example.grading_method or not isinstance(gold, str):
        return ()
    return witnesses.of(example.database, gold)


def first_refuting(
    example: Example, sql: str, files: Sequence[Path], executor: Executor, config: AnswerConfig
) -> Counterexample | None:
    """Return the first witness on which a query is wrong; None where it is right on all, there but
    for the last bits of numbers.
    """
    for number, file in enumerate(files, start=1):
        there = replace(example, database=file)
        attempt = judge_reply(there, Answer(sql, sql), executor, config, numbers="close")
        if not attempt.correct:
            return Counterexample(number, file, attempt.result)
    return None


def is_right(
    example: Example,
    sql: str,
    result: Result,
    executor: Executor,
    match: ExecutionMatch,
    numbers: Numbers,
) -> bool:
    """Tell whether a query is right by a rule, also where it is so by luck.

    A query whose result as it stands is no table is not right, also where an official program would
    mend its text first. Any of a question's gold queries may match, and its own rule goes before
    all others. The result has numbers as the first gold's has them already (`like_gold`).
    """
    if not isinstance(result, Table):
        return False
    database, rule = example.database, "graded" if example.grading_method else match
    predicted, *golds = (
        transpile(one, example.dialect) for one in (sql, example.gold_sql, *example.alternatives)
    )

    def run(path: Path, sql: str) -> Result:
        # Where the rule changes the text of a query, that is run once more.
        return result if sql == predicted else executor.execute(path, sql)

    for number, gold in enumerate(golds):
        compared = numbers if number else "exact"
        if not isinstance(gold, str):
            continue
        if rule in get_args(MatchMode):
            known = executor.gold(database, gold)
            found = like_gold(result, known, compared)
            right = matches(found, known, mode=cast(MatchMode, rule), gold_sql=gold)
        else:
            method = example.grading_method
            case = Case(str(predicted), gold, database, grading_method=method, numbers=compared)
            right = outcome_of(case, rule, QueryRuns(run, executor.gold)).score == 1
        if right:
            return True
    return False
