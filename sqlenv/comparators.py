"""Every evaluator by name: how its official program decides whether a prediction is right.

    with Executor(ExecutorConfig()) as executor:
        judged = executor.judge([Case(sql, gold_sql, database)], ("bird_ex", "spider_ex"))
    judged[0].scores["spider_ex"]  # 1.0 or 0.0

`COMPARATORS` is the table of them. A comparator is a function of a `Case` (the two queries, the
database files, for Spider 2 the gold results) and of `Runs`, which runs queries and remembers their
results, so that several comparators of one case share them. It gives a score: 1 or 0, or for
`bird_soft_f1` and `bird_r_ves` a number. `judge` asks several comparators about one case;
`Executor.judge` does so for many cases on all workers.

What the programs do by accident is kept, since a score is compared with theirs: see each function.
What they do and this does not: they run statements that write, and have no limit of size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from sqlenv.compare import MatchMode, matches
from sqlenv.official_sql import as_spider_runs, count_statements
from sqlenv.types import Result, SqlError, Status, Table, status_of

_ESCAPED = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True, slots=True)
class Case:
    """A prediction and what it is judged by.

    Attributes:
        predicted: The predicted query, as the official program's input file has it.
        gold: The gold query.
        database: The question's own database.
        suite: All database files of a test suite; those that `spider_ts` runs on.
    """

    predicted: str
    gold: str
    database: Path
    suite: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the comparators say of a case.

    Attributes:
        scores: By comparator.
        predicted: How the predicted query ended on its own database.
        gold: How the gold query ended there; where not `ok`, the official programs stop or score 0.
    """

    scores: Mapping[str, float]
    predicted: Status
    gold: Status


class Runner(Protocol):
    """What runs queries: an executor, or an environment's."""

    def execute(self, database: Path, sql: str, /) -> Result:
        """Run a query of the model."""
        ...

    def gold(self, database: Path, sql: str, /) -> Result:
        """Run a gold query, or return its cached result."""
        ...


class Runs:
    """Results of one case's queries, each run once."""

    def __init__(self, runner: Runner, known: Mapping[tuple[Path, str], Result] | None = None):
        self._runner = runner
        self._found = {key: (result, 0.0) for key, result in (known or {}).items()}

    def predicted(self, database: Path, sql: str) -> Result:
        """Run a predicted query."""
        return self._find(database, sql, self._runner.execute)

    def gold(self, database: Path, sql: str) -> Result:
        """Run a gold query."""
        return self._find(database, sql, self._runner.gold)

    def seconds(self, database: Path, *queries: str) -> float:
        """Sum the wall time that queries took when they were run; 0 for those that were not."""
        return sum(self._found.get((database, sql), (None, 0.0))[1] for sql in queries)

    def _find(self, database: Path, sql: str, run: Callable[[Path, str], Result]) -> Result:
        if (database, sql) not in self._found:
            start_s = time.perf_counter()
            result = run(database, sql)
            self._found[database, sql] = (result, time.perf_counter() - start_s)
        return self._found[database, sql][0]


Function = Callable[[Case, Runs], float]


@dataclass(frozen=True, slots=True)
class Comparator:
    """One way to decide whether a prediction is right.

    Attributes:
        name: Its key in `COMPARATORS`.
        source: Repository and file of the official program; empty for a rule of no program.
        version: Commit that it was checked against.
        function: Scores a case.
    """

    name: str
    source: str
    version: str
    function: Function = field(repr=False)


def judge(case: Case, names: Sequence[str], runs: Runs) -> Judgement:
    """Ask comparators about a case."""
    predicted = runs.predicted(case.database, case.predicted)
    gold = runs.gold(case.database, case.gold)
    scores = {name: COMPARATORS[name].function(case, runs) for name in names}
    return Judgement(scores, status_of(predicted), status_of(gold))


def _by_rule(case: Case, runs: Runs, *, mode: MatchMode) -> float:
    """Compare the results of both queries as they stand."""
    predicted = runs.predicted(case.database, case.predicted)
    gold = runs.gold(case.database, case.gold)
    return float(matches(predicted, gold, mode=mode, gold_sql=case.gold))


def _bird_tables(case: Case, runs: Runs, *, limit_s: float) -> tuple[Table, Table] | None:
    """Run both queries as BIRD's programs do; None where one fails or they pass their limit."""
    predicted = _ask(runs.predicted, case.database, case.predicted)
    gold = _ask(runs.gold, case.database, case.gold)
    if not (isinstance(predicted, Table) and isinstance(gold, Table)):
        return None
    is_slow = runs.seconds(case.database, case.predicted, case.gold) > limit_s
    return (
        None
        if is_slow or _is_undecodable(predicted) or _is_undecodable(gold)
        else (predicted, gold)
    )


def _is_undecodable(table: Table) -> bool:
    """Say whether a text holds bytes that are no UTF-8, which Python's sqlite3 module refuses."""
    return any(
        isinstance(value, str) and not value.isascii() and _ESCAPED.search(value)
        for row in table.rows
        for value in row
    )


def _bird_ex(case: Case, runs: Runs, *, limit_s: float) -> float:
    """Compare the sets of rows."""
    tables = _bird_tables(case, runs, limit_s=limit_s)
    return float(tables is not None and set(tables[0].rows) == set(tables[1].rows))


def _spider(
    case: Case, runs: Runs, *, suite: bool, keep_value: bool = False, keep_distinct: bool = False
) -> float:
    """Compare results as Spider's program does, on one database or on all of a suite.

    Args:
        case: What to score.
        runs: Runs queries.
        suite: Run on all files of the case's suite; all have to agree.
        keep_value: Leave the letters `value` of a prediction alone; the program makes them 1.
        keep_distinct: Keep DISTINCT, as the program does when told to (`--keep_distinct`).
    """
    text = case.predicted if keep_value else case.predicted.replace("value", "1")
    predicted = as_spider_runs(text, keep_distinct=keep_distinct)
    gold = as_spider_runs(case.gold, keep_distinct=keep_distinct)
    return float(
        all(
            matches(
                _ask(runs.predicted, database, predicted),
                _ask(runs.gold, database, gold),
                mode="test_suite",
                gold_sql=gold,
            )
            for database in (case.suite if suite else (case.database,))
        )
    )


def _ask(run: Callable[[Path, str], Result], database: Path, sql: str) -> Result:
    """Run a query as Python's sqlite3 module would, which all official programs use."""
    match count_statements(sql):
        case "none":
            return Table((), ())
        case "several":
            return SqlError("more than one statement")
        case _:
            return run(database, sql)


_RULES: tuple[MatchMode, ...] = ("set", "bag", "bag_ordered", "test_suite")
_SPIDER = ("taoyds/test-suite-sql-eval: evaluation.py, exec_eval.py", "e97acc546ecb")
_BIRD = ("bird-bench/mini_dev: evaluation/evaluation_ex.py", "4d970a9a97b1")

COMPARATORS: Mapping[str, Comparator] = {
    comparator.name: comparator
    for comparator in (
        *[Comparator(mode, "", "", partial(_by_rule, mode=mode)) for mode in _RULES],
        Comparator("bird_ex", *_BIRD, partial(_bird_ex, limit_s=30)),
        Comparator("spider_ex", *_SPIDER, partial(_spider, suite=False)),
        Comparator("spider_ts", *_SPIDER, partial(_spider, suite=True)),
    )
}
"""Every comparator by its name."""
