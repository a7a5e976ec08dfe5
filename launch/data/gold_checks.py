"""Gold queries that teach something wrong: they fail, return nothing, are slow, or do not decide
their own result.

Every gold query runs twice alike, then on tables that are read from their ends, then with rows that
tie in its ORDER BY put in either order. A result that changes is not decided by the query, and a
right prediction can look wrong.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from rewards.expo.clauses import scan_clauses
from rewards.expo.differences import differences
from sqlenv.config import ExecutorConfig
from sqlenv.data.issues import (
    BLANK_GOLD,
    EMPTY_GOLD,
    FAILING_GOLD,
    SLOW_GOLD,
    UNSTABLE_GOLD,
    Checked,
)
from sqlenv.data.sources import gold
from sqlenv.envs.diagnosed import describe_failure
from sqlenv.evaluators.equality import is_ordered
from sqlenv.executor import Executor
from sqlenv.executor.gold import TRANSIENT
from sqlenv.types import Example, Result, Table

_WORTH_KEEPING_S = 0.1
"""Gold results of a batch that took less are as quickly computed as read from their files."""


@contextmanager
def open_both(config: ExecutorConfig) -> Generator[tuple[Executor, Executor]]:
    """Open an executor, and one that reads tables from their ends."""
    reverse = config.model_copy(update={"reverse_unordered": True})
    with Executor(config) as plain, Executor(reverse) as backwards:
        yield plain, backwards


def check_golds(
    examples: Sequence[Example], plain: Executor, backwards: Executor, *, slow_s: float
) -> list[Checked]:
    """Run gold queries in all ways, each way for all of them together; keep results that took long.

    The notes are SQLite's messages, or how results change: `varies` (from run to run), `row_order`
    (with the order in which tables are read), `ties` (with rows that ORDER BY leaves open).
    """
    asked = [example for example in examples if example.gold_sql]
    results, together_s = _timed(asked, plain)
    seconds = [together_s] * len(asked)
    if together_s > slow_s:
        # Which one is slow? Perhaps none: the first one waits for the executor to start.
        alone = [_timed([example], plain) for example in asked]
        seconds = [min(together_s, alone_s) for _, alone_s in alone]
        results = [
            again[0] if result in TRANSIENT else result
            for result, (again, _) in zip(results, alone, strict=True)
        ]
    pairs = list(zip(asked, results, strict=True))
    if any(taken_s > _WORTH_KEEPING_S for taken_s in seconds):
        for example, result in pairs:
            plain.keep_gold(example.database, str(gold(example)), result)
    ran = [(example, result) for example, result in pairs if isinstance(result, Table)]
    changes = _changes(ran, plain, backwards)
    found = {id(example): Checked(example, (BLANK_GOLD,)) for example in examples}
    for (example, result), taken_s in zip(pairs, seconds, strict=True):
        slow, rows = (SLOW_GOLD,) * (taken_s > slow_s), None
        if isinstance(result, Table):
            rows, note = len(result.rows), next(changes)
            issues = (*slow, *(EMPTY_GOLD,) * (not rows), *(UNSTABLE_GOLD,) * bool(note))
        else:
            issues, note = (FAILING_GOLD, *slow), f"fails: {describe_failure(result)}"
        is_final = result not in TRANSIENT
        found[id(example)] = Checked(example, issues, note, rows=rows, is_final=is_final)
    return [found[id(example)] for example in examples]


def _timed(examples: Sequence[Example], executor: Executor) -> tuple[list[Result], float]:
    start = time.perf_counter()
    return _run(examples, executor), time.perf_counter() - start


def _run(examples: Sequence[Example], executor: Executor) -> list[Result]:
    written = [gold(example) for example in examples]
    pairs = zip(examples, written, strict=True)
    queries = [(example.database, sql) for example, sql in pairs if isinstance(sql, str)]
    results = iter(executor.execute_many(queries))
    return [next(results) if isinstance(sql, str) else sql for sql in written]


def _changes(
    ran: Sequence[tuple[Example, Table]], plain: Executor, backwards: Executor
) -> Iterator[str]:
    """Yield how each result changes when its query runs again in some way; mostly, not at all."""
    examples = [example for example, _ in ran]
    again, reverse = _run(examples, plain), _run(examples, backwards)
    variants = [
        break_ties(example.gold_sql, first.width) if example.dialect == "sqlite" else []
        for example, first in ran
    ]
    queries = zip(examples, variants, strict=True)
    ordered = iter(plain.execute_many([(one.database, sql) for one, two in queries for sql in two]))
    for (example, first), second, backward, two in zip(ran, again, reverse, variants, strict=True):
        in_order = is_ordered(example.gold_sql)
        changes = {
            "row_order": _difference(first, backward, in_order=in_order),
            "varies": _difference(first, second),
        }
        if first.nondeterministic:
            changes["varies"] = "depends on the clock or on chance"
        match [next(ordered) for _ in two]:
            case [Table() as upwards, Table() as downwards]:
                changes["ties"] = _difference(upwards, downwards)
            case _:  # no ORDER BY, or one that its columns cannot be added to
                pass
        kinds = ("varies", "row_order", "ties")
        yield next((f"{kind}: {changes[kind]}" for kind in kinds if changes.get(kind)), "")


def break_ties(sql: str, width: int) -> list[str]:
    """Order the rows that a query's own ORDER BY leaves open, by its columns: upwards, downwards.

    Returns:
        Two queries; none where the query has no ORDER BY of its own.
    """
    clauses = scan_clauses(sql)
    order = next((one for one in reversed(clauses) if one.kind == "ORDER BY"), None)
    if order is None or not is_ordered(sql):
        return []
    head, tail = sql[: order.stop], sql[order.stop :]
    columns = range(1, width + 1)
    return [
        f"{head}, {', '.join(f'{column} {direction}' for column in columns)}{tail}"
        for direction in ("ASC", "DESC")
    ]


def _difference(first: Table, second: Result, *, in_order: bool = True) -> str:
    """Name how a result differs from the first one; empty where it does not.

    Floats are compared to 6 decimals: a sum in another order is the same sum.
    """
    if not isinstance(second, Table):
        return describe_failure(second)
    found = differences(first, second)
    return " ".join(sorted(found if in_order else found - {"row_order"}))
