"""What the families ask of execution, and what it says of an episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from exchange import Score
from sqlenv.dialects import run_in_dialect
from sqlenv.envs.single_turn import Runner
from sqlenv.schema.reading import read_schema
from sqlenv.types import Attempt, Episode, Example, Result, SqlError, Table

ColumnsOf = Callable[[Example], Mapping[str, Sequence[str]] | None]
"""Column names by table of an example's database, None where unknown."""


class StepRunner(Runner, Protocol):
    """What a reward that runs parts of queries needs of the executor."""

    def execute(self, database: Path, sql: str, /, *, max_steps: int | None = None) -> Result:
        """Run a query."""
        ...


def columns_of() -> ColumnsOf:
    """Return what reads the columns of an example's database, each file once."""

    @cache
    def read(database: Path) -> Mapping[str, Sequence[str]]:
        return read_schema(database, examples=0).column_names()

    return lambda example: read(example.database)


def gold_result(executor: Runner, example: Example) -> Result:
    """Return what the gold query gives, also where it is of another dialect."""
    return run_in_dialect(executor.gold, example, example.gold_sql)


def is_executable(attempt: Attempt) -> bool:
    """Tell whether the query ran: it gave a table, if an empty one."""
    return isinstance(attempt.result, Table)


def is_right_by_its_own(example: Example, attempt: Attempt) -> bool:
    """Tell what is right by another of the question's gold queries or by its own rule, so that it
    need not have the columns of the first gold's result.
    """
    return attempt.correct and bool(example.alternatives or example.grading_method)


def is_nondeterministic(result: Result) -> bool:
    """Tell whether a result depends on the clock or on chance."""
    return isinstance(result, Table) and result.nondeterministic


def payable(result: Result) -> Result:
    """Return what a family may pay for: no result that depends on the clock or on chance."""
    return SqlError("not the same twice") if is_nondeterministic(result) else result


def is_correct(episode: Episode) -> bool:
    """Tell whether the answer, the last attempt, matches the gold result."""
    return episode.answer is not None and episode.answer.correct


def execution_reward(episode: Episode) -> Score:
    """Reward a right answer with 1, anything else with 0; one part, `execution`."""
    correct = is_correct(episode)
    return Score(float(correct), correct, {"execution": float(correct)})


def first_match(episode: Episode) -> int | None:
    """Return the turn of the first match, counted from 1 (k* of Progress-SQL)."""
    return next((t for t, attempt in enumerate(episode.attempts, 1) if attempt.correct), None)
