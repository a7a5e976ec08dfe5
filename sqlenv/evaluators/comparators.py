"""Every evaluator by name: how its official program decides whether a prediction is right.

    with Executor(ExecutorConfig(timeout_s=60)) as executor:
        judged = executor.judge([Case(sql, gold_sql, database)], ("bird_ex", "spider_ex"))
    judged[0].scores["spider_ex"]  # 1.0 or 0.0

A comparator of `COMPARATORS` gives a score of which its program reports the mean, from a `Case` and
from `Runs`, which runs queries and remembers their results. What the programs do by accident is
kept. Three things are not: they also run statements that write, they have no limit of size, and
Spider's has no limit of time that works and ends at a gold query that fails, which matches nothing.
"""

from __future__ import annotations

import filecmp
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, TypeGuard, get_args

from sqlenv.errors import UserError
from sqlenv.evaluators.bird import soft_f1, ves_reward
from sqlenv.evaluators.equality import matches
from sqlenv.evaluators.official import (
    as_omnisql_writes,
    as_spider_runs,
    count_statements,
    same_query,
)
from sqlenv.evaluators.spider2 import Reference, agrees, fenced_sql
from sqlenv.types import MatchMode, Result, SqlError, Status, Table, TimedOut, status_of

_LATE = TimedOut("wall")
_REPETITIONS = 100  # how often R-VES runs each query
_OMNISQL_S = 10.0
_JUDGED_CHARS = 1_000_000
"""Longer predictions are wrong unread: what official programs do to a text takes seconds where it
has megabytes, and the executor runs a tenth of it at most where nobody cuts it."""
_REMEMBERED_CELLS = 1_000_000
"""Cells of the results that `Runs` remembers, some 100 MB of short texts."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prediction, as the official program's input file has it, and what it is judged by.

    `suite` are all database files of the test suite (`spider_ts`), `reference` gold results
    (`spider2_local`).
    """

    predicted: str
    gold: str
    database: Path
    suite: tuple[Path, ...] = ()
    reference: Reference | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the comparators say of a case.

    Attributes:
        scores: By comparator.
        predicted, gold: How the queries ended on their own database, as the first one runs them.
        is_late: Whether a limit of time decided a score: a machine with less to do may differ.
    """

    scores: Mapping[str, float]
    predicted: Status
    gold: Status
    is_late: bool = False


Ask = Callable[[Path, str], Result]
"""Runs a query on a database: an executor's `execute` or `gold`."""


class Runs:
    """Results of queries, each of which runs once, as long as they are few or small.

    `known` are there already; `stopwatch` measures a query that is run on a connection of its own.
    """

    def __init__(
        self,
        execute: Ask,
        gold: Ask | None = None,
        *,
        known: Mapping[tuple[Path, str], Result] | None = None,
        stopwatch: Callable[[Path, str], float] | None = None,
    ):
        self._execute, self._gold = execute, gold or execute
        self._stopwatch = stopwatch
        self._results = {
            (database, same_query(sql)): result for (database, sql), result in (known or {}).items()
        }
        self._seconds: dict[tuple[Path, str], float] = {}
        self._cells = 0
        self.is_late = False
        """Whether a query or several together took longer than they may, since this was reset."""

    def predicted(self, database: Path, sql: str) -> Result:
        """Run a predicted query."""
        return self._find(database, sql, self._execute)

    def gold(self, database: Path, sql: str) -> Result:
        """Run a gold query."""
        return self._find(database, sql, self._gold)

    def in_time(self, database: Path, sqls: Sequence[str], limit_s: float) -> bool:
        """Say whether queries that were run took no longer than this together."""
        seconds = sum(self._seconds.get((database, same_query(sql)), 0.0) for sql in sqls)
        self.is_late |= seconds > limit_s
        return seconds <= limit_s

    def seconds_anew(self, database: Path, sql: str) -> float:
        """Run a query once more and say how long it takes."""
        if self._stopwatch:
            return self._stopwatch(database, sql)
        start_s = time.perf_counter()
        self._execute(database, sql)
        return time.perf_counter() - start_s

    def _find(self, database: Path, sql: str, run: Ask) -> Result:
        key = (database, same_query(sql))
        if (known := self._results.get(key)) is not None:
            self.is_late |= known == _LATE
            return known
        start_s = time.perf_counter()
        result = run(database, sql)
        self._seconds[key] = time.perf_counter() - start_s
        self.is_late |= result == _LATE
        self._cells += len(result.rows) * result.width if isinstance(result, Table) else 0
        if self._cells > _REMEMBERED_CELLS:
            self._results.clear()
            self._cells = 0
        self._results[key] = result
        return result


Function = Callable[[Case, Runs], float]
Results = Callable[[Case, Runs], tuple[Result, Result]]


@dataclass(frozen=True, slots=True)
class Comparator:
    """One way to decide whether a prediction is right.

    Attributes:
        source: Repository and files of the official program; empty for a rule of no program.
        version: Commit that it was checked against.
        function: Scores a case.
        results: Runs both queries on the question's own database, as the program writes them.
        needs: The part of a case that it takes, beside the queries and the database.
    """

    name: str
    source: str
    version: str
    function: Function = field(repr=False)
    results: Results = field(repr=False)
    needs: Literal["", "suite", "reference"] = ""


def check_case(case: Case, names: Sequence[str]) -> None:
    """Make sure that a case has what comparators need."""
    for name in names:
        needs = COMPARATORS[name].needs
        if needs and not getattr(case, needs):
            what = "files of a test suite" if needs == "suite" else "gold results"
            raise UserError(f"{case.database}: {name} needs {what}; give them, or leave it out")


def judge(case: Case, names: Sequence[str], runs: Runs) -> Judgement:
    """Ask comparators about a case."""
    if len(case.predicted) > _JUDGED_CHARS:
        judged = judge(replace(case, predicted=""), names, runs)
        return replace(judged, scores=dict.fromkeys(names, 0.0), predicted="too_large")
    runs.is_late = False
    results = COMPARATORS[names[0]].results if names else _as_they_stand
    predicted, gold = results(case, runs)
    scores = {name: COMPARATORS[name].function(case, runs) for name in names}
    return Judgement(scores, status_of(predicted), status_of(gold), runs.is_late)


def _as_they_stand(case: Case, runs: Runs) -> tuple[Result, Result]:
    predicted = runs.predicted(case.database, case.predicted)
    return predicted, runs.gold(case.database, case.gold)


def _by_rule(case: Case, runs: Runs, *, mode: MatchMode) -> float:
    return float(matches(*_as_they_stand(case, runs), mode=mode, gold_sql=case.gold))


def _as_bird_runs(case: Case, runs: Runs) -> tuple[Result, Result]:
    predicted = _ask(runs.predicted, case.database, case.predicted)
    return predicted, _ask(runs.gold, case.database, case.gold)


def _bird(
    case: Case, runs: Runs, *, score: Callable[[Table, Table], float], limit_s: float
) -> float:
    """Score two results; text that is no UTF-8 fails, and both queries share the limit."""
    predicted, gold = _as_bird_runs(case, runs)
    if not (_is_clean(predicted) and _is_clean(gold)):
        return 0.0
    is_in_time = runs.in_time(case.database, (case.predicted, case.gold), limit_s)
    return score(predicted, gold) if is_in_time else 0.0


def _same_rows(predicted: Table, gold: Table) -> float:
    return float(matches(predicted, gold, mode="set"))


def _bird_r_ves(case: Case, runs: Runs) -> float:
    """Return the root of the reward, whose mean the program reports."""
    if not _bird(case, runs, score=_same_rows, limit_s=30.0 * _REPETITIONS):
        return 0.0
    ratios = []
    for _ in range(_REPETITIONS):
        predicted_s = runs.seconds_anew(case.database, case.predicted)
        ratios.append(runs.seconds_anew(case.database, case.gold) / predicted_s)
    return math.sqrt(ves_reward(ratios))


def _as_spider_writes(
    case: Case, *, keep_value: bool = False, keep_distinct: bool = False
) -> tuple[str, str]:
    """Write both queries as Spider's program runs them: `value` in a prediction becomes 1."""
    text = case.predicted if keep_value else case.predicted.replace("value", "1")
    predicted = as_spider_runs(text, keep_distinct=keep_distinct)
    return predicted, as_spider_runs(case.gold, keep_distinct=keep_distinct)


def _as_spider_runs(case: Case, runs: Runs, **switch: bool) -> tuple[Result, Result]:
    predicted, gold = _as_spider_writes(case, **switch)
    return _as_bird_runs(replace(case, predicted=predicted, gold=gold), runs)


def _spider(case: Case, runs: Runs, *, suite: bool, **switch: bool) -> float:
    """Compare results on one database, or on all of a suite, where all have to agree."""
    predicted, gold = _as_spider_writes(case, **switch)
    find, know = _asking(runs.predicted, predicted), _asking(runs.gold, gold)
    if suite and same_query(predicted) == same_query(gold):
        result = know(case.database)
        # The same query gives the same rows on every file.
        suite = isinstance(result, Table) and result.nondeterministic
    databases = _as_known(case.suite, case.database) if suite else (case.database,)
    results = ((find(database), know(database)) for database in databases)
    return float(all(matches(*pair, mode="test_suite", gold_sql=gold) for pair in results))


@lru_cache(maxsize=1024)
def _as_known(suite: tuple[Path, ...], database: Path) -> tuple[Path, ...]:
    """Put a database in place of its copy in a suite, so that what ran on it is known."""
    return tuple([database if _is_copy(file, database) else file for file in suite])


def _is_copy(file: Path, database: Path) -> bool:
    same_size = file.stat().st_size == database.stat().st_size
    return same_size and filecmp.cmp(file, database, shallow=False)


def _omnisql_spider(case: Case, runs: Runs, *, suite: bool) -> float:
    """Ask Spider's program about a query that runs within 10 seconds, put on one line."""
    if not _runs_for_omnisql(case, runs):
        return 0.0
    return _spider(replace(case, predicted=as_omnisql_writes(case.predicted)), runs, suite=suite)


def _as_omnisql_runs(case: Case, runs: Runs) -> tuple[Result, Result]:
    """Give the prediction's first failure: it runs as it stands, and then as Spider's does."""
    first = _ask(runs.predicted, case.database, case.predicted)
    written = replace(case, predicted=as_omnisql_writes(case.predicted))
    predicted, gold = _as_spider_runs(written, runs)
    return (predicted if _is_clean(first) else first), gold


def _runs_for_omnisql(case: Case, runs: Runs) -> bool:
    result = _ask(runs.predicted, case.database, case.predicted)
    return _is_clean(result) and runs.in_time(case.database, (case.predicted,), _OMNISQL_S)


def _spider2(case: Case, runs: Runs) -> float:
    return _finds_gold(replace(case, predicted=fenced_sql(case.predicted)), runs, nan_is_zero=True)


def _as_spider2_runs(case: Case, runs: Runs) -> tuple[Result, Result]:
    return _as_they_stand(replace(case, predicted=fenced_sql(case.predicted)), runs)


def _omnisql_spider2(case: Case, runs: Runs) -> float:
    """Do as an older copy of that program does, with a query that runs within 10 seconds."""
    if not _runs_for_omnisql(case, runs):
        return 0.0
    return _finds_gold(case, runs, nan_is_zero=False)


def _finds_gold(case: Case, runs: Runs, *, nan_is_zero: bool) -> float:
    assert case.reference is not None  # `check_case`
    if count_statements(case.predicted) != "one":
        return 0.0
    result = runs.predicted(case.database, case.predicted)
    is_match = _is_clean(result) and agrees(result, case.reference, nan_is_zero=nan_is_zero)
    return float(is_match)


def _is_clean(result: Result) -> TypeGuard[Table]:
    """Say whether Python's sqlite3 module would read the result: it refuses what is no UTF-8."""
    return isinstance(result, Table) and not result.is_mended


def _ask(run: Ask, database: Path, sql: str) -> Result:
    return _asking(run, sql)(database)


def _asking(run: Ask, sql: str) -> Callable[[Path], Result]:
    """Run a query as Python's sqlite3 module would, which all these programs use."""
    match count_statements(sql):
        case "none":
            return lambda _: Table((), ())
        case "several":
            return lambda _: SqlError("more than one statement")
        case _:
            return lambda database: run(database, sql)


_BIRD, _BIRD_VERSION = "bird-bench/mini_dev: evaluation/evaluation_{}.py", "4d970a9a97b1"
_SPIDER = ("taoyds/test-suite-sql-eval: evaluation.py, exec_eval.py", "e97acc546ecb")
_SPIDER2 = ("xlang-ai/Spider2: spider2-lite/evaluation_suite/evaluate.py", "e12c5f1e6550")
_OMNISQL = "RUCKBReasoning/OmniSQL: train_and_evaluate/evaluate_{}.py"
_OMNISQL_VERSION = "a66d732010c8"
_KINDS = (("ex", False, ""), ("ts", True, "suite"))
_SWITCHES: tuple[dict[str, bool], ...] = ({}, {"keep_value": True}, {"keep_distinct": True})


def _all() -> Iterator[Comparator]:
    for mode in get_args(MatchMode):
        yield Comparator(mode, "", "", partial(_by_rule, mode=mode), _as_they_stand)
    same_rows, soft = (partial(_bird, score=score, limit_s=30.0) for score in (_same_rows, soft_f1))
    for name, file, function in (
        ("ex", "ex", same_rows),
        ("soft_f1", "f1", soft),
        ("r_ves", "ves", _bird_r_ves),
    ):
        source = _BIRD.format(file)
        yield Comparator(f"bird_{name}", source, _BIRD_VERSION, function, _as_bird_runs)
    for kind, suite, needs in _KINDS:
        for switch in _SWITCHES:
            score = partial(_spider, suite=suite, **switch)
            name = "_".join((f"spider_{kind}", *switch))
            yield Comparator(name, *_SPIDER, score, partial(_as_spider_runs, **switch), needs)
    yield Comparator("spider2_local", *_SPIDER2, _spider2, _as_spider2_runs, "reference")
    for name, function, results, needs in (
        ("bird", partial(_bird, score=_same_rows, limit_s=_OMNISQL_S), _as_bird_runs, ""),
        ("spider_ex", partial(_omnisql_spider, suite=False), _as_omnisql_runs, ""),
        ("spider_ts", partial(_omnisql_spider, suite=True), _as_omnisql_runs, "suite"),
        ("spider2", _omnisql_spider2, _as_they_stand, "reference"),
    ):
        source = _OMNISQL.format(name.removesuffix("_ex").removesuffix("_ts"))
        yield Comparator(f"omnisql_{name}", source, _OMNISQL_VERSION, function, results, needs)


COMPARATORS: Mapping[str, Comparator] = {comparator.name: comparator for comparator in _all()}
"""Every comparator by its name."""
