"""Gold queries that teach something wrong: they fail, return nothing, or do not decide their own
result.

Every gold query runs twice alike, then on tables that are read from their ends, then with rows that
tie in its ORDER BY put in either order. A result that changes is not decided by the query, and a
right prediction can look wrong. What was found is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import apsw

from rewards.expo.clauses import scan_clauses
from rewards.expo.differences import differences
from sqlenv.cache import DiskCache, content_key
from sqlenv.config import DataConfig
from sqlenv.data.sources import Check, Checked, by_running, issues_of
from sqlenv.dialects import transpile
from sqlenv.evaluators.equality import is_ordered
from sqlenv.executor import Executor
from sqlenv.executor.database import fingerprint
from sqlenv.executor.gold import LIMITS, TRANSIENT
from sqlenv.types import Example, Result, SqlError, Table, describe_failure

_VERSION = 2
"""Of the rules below."""
_RERUN = frozenset({"varying", "tied"})


def check_for(data: DataConfig, executor: Executor | None, disk: DiskCache) -> Check | None:
    """Make the check that tells what `data.exclude` names; None without an executor."""
    if executor is None or _RERUN.isdisjoint(data.exclude):
        return by_running(executor)
    plain = executor

    def look(examples: Sequence[Example]) -> Iterator[Checked]:
        with ThreadPoolExecutor(plain.config.threads) as threads:
            yield from threads.map(lambda one: check_gold(one, plain, disk), examples)

    return look


def check_gold(example: Example, plain: Executor, disk: DiskCache) -> Checked:
    """Run a gold query in all ways, if what comes of it is not known yet.

    The note is SQLite's message, or how results change: `varies` (from run to run), `row_order`
    (with the order in which tables are read), `ties` (with rows that ORDER BY leaves open).
    """
    facts = (fingerprint(example.database), example.gold_sql, example.dialect)
    limits = plain.config.model_dump(mode="json", include=LIMITS)
    key = content_key("gold check", *facts, _VERSION, apsw.sqlite_lib_version(), limits)
    if (known := disk.get(key)) is None:
        known, is_final = _check(example, plain)
        if is_final:
            disk[key] = known
    issues, note = known
    return Checked(example, tuple(issues), note)


def _check(example: Example, plain: Executor) -> tuple[tuple[tuple[str, ...], str], bool]:
    """Return the issues of a gold query and a note, and whether a machine with less to do would
    find the same.
    """
    sql = transpile(example.gold_sql, example.dialect)
    first = sql if isinstance(sql, SqlError) else plain.gold(example.database, sql)
    if not isinstance(sql, str) or not isinstance(first, Table):
        return (issues_of(first), f"fails: {describe_failure(first)}"), first not in TRANSIENT
    note = _change(example, sql, first, plain)
    changed = ("tied" if note.startswith("ties") else "varying",) * bool(note)
    return ((*issues_of(first), *changed), note), True


def _change(example: Example, sql: str, first: Table, plain: Executor) -> str:
    """Say how a result changes when its query runs again in some way; mostly, not at all."""
    if first.nondeterministic:
        return "varies: depends on the clock or on chance"
    if varies := _difference(first, plain.execute(example.database, sql)):
        return f"varies: {varies}"
    backward = plain.execute(example.database, sql, reverse_unordered=True)
    if changed := _difference(first, backward, in_order=is_ordered(sql)):
        return f"row_order: {changed}"
    variants = break_ties(sql, first.width) if example.dialect == "sqlite" else []
    match [plain.execute(example.database, variant) for variant in variants]:
        case [Table() as upwards, Table() as downwards]:
            ties = _difference(upwards, downwards)
            return f"ties: {ties}" if ties else ""
        case _:  # no ORDER BY, or one that its columns cannot be added to
            return ""


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
