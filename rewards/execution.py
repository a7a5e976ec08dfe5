"""What the families ask of execution, and what it says of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from minirl.exchange import Score, UserError
from sqlenv.dialects import run_in_dialect
from sqlenv.executor import Executor
from sqlenv.executor.database import Identity, identify
from sqlenv.schema.reading import read_schema
from sqlenv.types import Attempt, Episode, Example, Result, SqlError, Table


@dataclass(frozen=True, slots=True, eq=False)
class KnownColumns:
    """The columns of a database by table, all in lower case. Compared by identity, so that caches
    can use it as a key.
    """

    tables: Mapping[str, frozenset[str]]


def columns_of(example: Example) -> KnownColumns | None:
    """Return the columns of an example's database, the same for the same file; None where it cannot
    be read.
    """
    try:
        return _columns_in(identify(example.database))
    except UserError:
        return None


@lru_cache(maxsize=4096)
def _columns_in(identity: Identity) -> KnownColumns:
    found = read_schema(Path(identity[0]), examples=0).column_names()
    return KnownColumns(
        {table.lower(): frozenset(map(str.lower, names)) for table, names in found.items()}
    )


def gold_result(executor: Executor, example: Example) -> Result:
    """Return what the gold query gives, also where it is of another dialect."""
    return run_in_dialect(executor.gold, example, example.gold_sql)


def on_witness(example: Example, attempt: Attempt) -> tuple[Example, Attempt]:
    """Return a question and an attempt at it as families score them: on the question's own
    database or, where a witness refutes the query, on that witness. Whether the query runs is a
    matter of the question's own database.
    """
    if (found := attempt.refuted) is None:
        return example, attempt
    refuted = replace(attempt, result=found.result, refuted=None)
    return replace(example, database=found.database), refuted


def is_executable(attempt: Attempt) -> bool:
    """Tell whether the query ran: it gave a table, if an empty one."""
    return isinstance(attempt.result, Table)


def is_right_by_its_own(example: Example, attempt: Attempt) -> bool:
    """Tell whether an attempt is right, perhaps by an alternative gold query or by the question's
    own rule: then its columns need not be those of the first gold's result.
    """
    return attempt.correct and bool(example.alternatives or example.grading_method)


def is_nondeterministic(result: Result) -> bool:
    """Tell whether a result depends on the clock or on chance."""
    return isinstance(result, Table) and result.nondeterministic


def results_of(executor: Executor, example: Example, attempt: Attempt) -> tuple[Result, Result]:
    """Return the two results whose columns are compared, the attempt's and the gold query's: on the
    witness if one refutes the query. One that depends on the clock or on chance is an error.
    """
    example, attempt = on_witness(example, attempt)
    result, gold = attempt.result, gold_result(executor, example)
    return SqlError("not the same twice") if is_nondeterministic(result) else result, gold


def is_correct(episode: Episode) -> bool:
    """Tell whether the answer, the last attempt, matches the gold result."""
    return episode.final_attempt is not None and episode.final_attempt.correct


def execution_reward(episode: Episode) -> Score:
    """Reward a right answer with 1, anything else with 0; one part, `execution`."""
    correct = is_correct(episode)
    return Score(float(correct), correct, {"execution": float(correct)})


def first_match(episode: Episode) -> int | None:
    """Return the turn of the first match, counted from 1 (k* of Progress-SQL)."""
    return next((t for t, attempt in enumerate(episode.attempts, 1) if attempt.correct), None)
