"""Every evaluator by name: how its official program decides whether a prediction is right.

    with Executor(OFFICIAL) as executor:
        judged = compare_cases(executor, [Case(sql, gold_sql, database)], ("bird_ex", "spider_ex"))
    judged[0].scores["spider_ex"]  # 1.0 or 0.0

A comparator of `COMPARATORS` gives a score of which its program reports the mean, from a `Case` and
from `QueryRuns`, which runs queries and remembers their results. What the programs do by accident
is kept. Three things are not: they also run statements that write, they have no limit of size, and
Spider's has no limit of time that works and ends at a gold query that fails, which matches nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from sqlenv.evaluators.equality import like_gold, matches
from sqlenv.evaluators.graded import is_graded_right, is_strictly_equal, soft_f1
from sqlenv.evaluators.official import as_spider_runs, count_statements, same_query
from sqlenv.evaluators.spider2 import Reference, agrees, fenced_sql
from sqlenv.executor import Executor
from sqlenv.types import MatchMode, Numbers, Result, RunQuery, SqlError, Table, TimedOut, TooLarge

_BIRD_S = 30.0  # for both queries
_JUDGED_CHARS = 1_000_000
"""Longer predictions are wrong unread: the official programs' rewriting takes seconds for megabytes
of text, and the executor runs at most a tenth of this length."""
_REMEMBERED_CELLS = 1_000_000
"""Cells of the results that `QueryRuns` remembers, some 100 MB of short texts."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prediction, as the official program's input file has it, and what it is judged by.

    `suite` are all database files of the test suite (`spider_ts`), `reference` gold results
    (`spider2_local`), `alternatives` more gold queries, of which the best counts, and
    `grading_method` a question's own rule (`graded`). Official programs compare `numbers` exactly.
    """

    predicted: str
    gold: str
    database: Path
    suite: tuple[Path, ...] = ()
    reference: Reference | None = None
    alternatives: tuple[str, ...] = ()
    grading_method: str = ""
    numbers: Numbers = "exact"


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """What the comparators say of a case.

    Attributes:
        scores: By comparator.
        predicted, gold: What is kept of the results on their own database, as the first one runs
            the queries: by default how they ended.
    """

    scores: Mapping[str, float]
    predicted: Any
    gold: Any


class QueryRuns:
    """Results of queries, each of which runs once, as long as they are few or small. Thread-safe;
    threads that ask for one result at the same time may each run the query.
    """

    def __init__(self, execute: RunQuery, gold: RunQuery | None = None):
        self.predicted = partial(self._find, execute)
        self.gold = partial(self._find, gold or execute)
        self._results: dict[tuple[Path, str], Result] = {}
        self._seconds: dict[tuple[Path, str], float] = {}
        self._cells = 0

    def seconds(self, database: Path, *sqls: str) -> float:
        """Say how long queries that were run took together."""
        return sum(self._seconds.get((database, same_query(sql)), 0.0) for sql in sqls)

    def _find(self, run: RunQuery, database: Path, sql: str) -> Result:
        key = (database, same_query(sql))
        if (known := self._results.get(key)) is not None:
            return known
        start_s = time.perf_counter()
        result = run(database, sql)
        self._seconds[key] = time.perf_counter() - start_s
        self._cells += len(result.rows) * result.width if isinstance(result, Table) else 0
        if self._cells > _REMEMBERED_CELLS:
            self._results.clear()
            self._cells = 0
        self._results[key] = result
        return result


class Outcome(NamedTuple):
    """A score, and the results on the question's own database of what the program runs."""

    score: float
    predicted: Result
    gold: Result


@dataclass(frozen=True, slots=True)
class Comparator:
    """One way to decide whether a prediction is right.

    Attributes:
        program: Repository, files and commit of the official one; empty for a rule of none.
        function: Runs and scores a case.
        needs: The part of a case that it takes, beside the queries and the database.
    """

    program: str
    function: Callable[[Case, QueryRuns], Outcome] = field(repr=False)
    needs: Literal["", "suite", "reference"] = ""


Keep = Callable[[Result], Any]
"""Takes out of a result what a verdict keeps: results of many cases are not in memory together."""


def compare_cases(
    executor: Executor,
    cases: Sequence[Case],
    names: Sequence[str],
    *,
    keep: Keep = attrgetter("status"),
) -> list[CaseVerdict]:
    """Ask comparators about cases, on all workers; verdicts come in the cases' order."""
    runs = QueryRuns(executor.execute)
    return executor.map(lambda case: compare_case(case, names, runs, keep=keep), cases)


def compare_case(
    case: Case, names: Sequence[str], runs: QueryRuns, *, keep: Keep = attrgetter("status")
) -> CaseVerdict:
    """Ask comparators about a case."""
    if len(case.predicted) > _JUDGED_CHARS:
        judged = compare_case(replace(case, predicted=""), names, runs, keep=keep)
        scores, predicted = dict.fromkeys(names, 0.0), keep(TooLarge("sql"))
        return CaseVerdict(scores, predicted, judged.gold)
    outcomes = {name: outcome_of(case, name, runs) for name in names}
    first = outcomes[names[0]] if names else _by_rule(case, runs, mode="set")
    scores = {name: outcome.score for name, outcome in outcomes.items()}
    return CaseVerdict(scores, keep(first.predicted), keep(first.gold))


def outcome_of(case: Case, name: str, runs: QueryRuns) -> Outcome:
    """Ask a comparator about a case, by the gold query that the prediction agrees with most."""
    outcome = COMPARATORS[name].function(case, runs)
    for gold in case.alternatives:
        if outcome.score != 1:
            other = COMPARATORS[name].function(replace(case, gold=gold), runs)
            outcome = max(outcome, other, key=lambda one: one.score)
    return outcome


def _by_rule(case: Case, runs: QueryRuns, *, mode: MatchMode) -> Outcome:
    predicted = runs.predicted(case.database, case.predicted)
    gold = runs.gold(case.database, case.gold)
    predicted = like_gold(predicted, gold, case.numbers)
    score = float(matches(predicted, gold, mode=mode, gold_sql=case.gold))
    return Outcome(score, predicted, gold)


def _bird(
    case: Case, runs: QueryRuns, *, score: Callable[[Table, Table], float], limit_s: float = inf
) -> Outcome:
    """Score two results; text that is no UTF-8 fails, and both queries share the limit."""
    predicted, gold = _run_both(case, runs)
    if not (_is_clean(predicted) and _is_clean(gold)):
        return Outcome(0.0, predicted, gold)
    if runs.seconds(case.database, case.predicted, case.gold) > limit_s:
        return Outcome(0.0, TimedOut("wall"), gold)
    return Outcome(float(score(predicted, gold)), predicted, gold)


def _graded(case: Case, runs: QueryRuns) -> Outcome:
    """Ask a question's own rule."""
    return _bird(case, runs, score=partial(is_graded_right, method=case.grading_method))


def _spider(case: Case, runs: QueryRuns, *, suite: bool) -> Outcome:
    """Compare results on one database, or on all of a suite, where all have to agree.

    Spider's program writes `value` in a prediction as 1.
    """
    assert case.suite or not suite
    predicted = as_spider_runs(case.predicted.replace("value", "1"))
    gold = as_spider_runs(case.gold)
    case = replace(case, predicted=predicted, gold=gold)
    own = _run_both(case, runs)
    if suite and same_query(predicted) == same_query(gold):
        # The same query gives the same rows on every file.
        suite = isinstance(own[1], Table) and own[1].nondeterministic
    there = (_run_both(replace(case, database=file), runs) for file in case.suite)
    pairs = there if suite else [own]
    is_right = all(matches(*pair, mode="test_suite", gold_sql=gold) for pair in pairs)
    return Outcome(float(is_right), *own)


def _spider2(case: Case, runs: QueryRuns) -> Outcome:
    case = replace(case, predicted=fenced_sql(case.predicted))
    assert case.reference is not None
    predicted = runs.predicted(case.database, case.predicted)
    is_right = (
        count_statements(case.predicted) == "one"
        and _is_clean(predicted)
        and agrees(predicted, case.reference)
    )
    return Outcome(float(is_right), predicted, runs.gold(case.database, case.gold))


def _is_clean(result: Result) -> TypeGuard[Table]:
    """Say whether Python's sqlite3 module would read the result: it raises on invalid UTF-8."""
    return isinstance(result, Table) and not result.is_mended


def _run_both(case: Case, runs: QueryRuns) -> tuple[Result, Result]:
    """Run both queries on the case's database."""
    predicted = _run(runs.predicted, case.database, case.predicted)
    gold = _run(runs.gold, case.database, case.gold)
    return like_gold(predicted, gold, case.numbers), gold


def _run(run: RunQuery, database: Path, sql: str) -> Result:
    """Run a query as Python's sqlite3 module would, which all these programs use."""
    match count_statements(sql):
        case "none":
            return Table((), ())
        case "several":
            return SqlError("more than one statement")
        case _:
            return run(database, sql)


_BIRD = "bird-bench/mini_dev: evaluation/evaluation_{}.py @ 4d970a9a97b1"
_SPIDER = "taoyds/test-suite-sql-eval: evaluation.py, exec_eval.py @ e97acc546ecb"
_PLATINUM = "uiuc-kang-lab/BIRD-Platinum: evaluation/grade.py @ d6e0e96"
_REVISQL = "bifrost17/ReViSQL: tinker_cookbook/recipes/sql_rl/grader.py @ 7b79b16"
_SPIDER2 = "xlang-ai/Spider2: spider2-lite/evaluation_suite/evaluate.py @ e12c5f1e6550"


_same_rows = partial(matches, mode="set")
COMPARATORS: Mapping[str, Comparator] = {
    **{mode: Comparator("", partial(_by_rule, mode=mode)) for mode in get_args(MatchMode)},
    "bird_ex": Comparator(_BIRD.format("ex"), partial(_bird, score=_same_rows, limit_s=_BIRD_S)),
    "bird_soft_f1": Comparator(_BIRD.format("f1"), partial(_bird, score=soft_f1, limit_s=_BIRD_S)),
    "bird_strict": Comparator(_PLATINUM, partial(_bird, score=is_strictly_equal)),
    "graded": Comparator(_REVISQL, _graded),
    "spider_ex": Comparator(_SPIDER, partial(_spider, suite=False)),
    "spider_ts": Comparator(_SPIDER, partial(_spider, suite=True), "suite"),
    "spider2_local": Comparator(_SPIDER2, _spider2, "reference"),
}
"""Every comparator by its name."""
