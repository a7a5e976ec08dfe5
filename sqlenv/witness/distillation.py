"""The few variants that tell the most neighbours of a gold query apart.

Distilled as by Zhong, Yu and Klein (EMNLP 2020, section 3), from variants that keep what the
database promises: they draw values at random, and fuzz for hours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import apsw
from sqlglot import exp

from sqlenv.evaluators.equality import matches
from sqlenv.executor.database import reading
from sqlenv.sql.extraction import parse
from sqlenv.types import MatchMode, Table
from sqlenv.witness.focus import focus_of
from sqlenv.witness.neighbours import Neighbour, neighbours
from sqlenv.witness.source import read_source
from sqlenv.witness.variants import make_variant

_CANDIDATES = 24
# A query of a neighbour may be a product of tables; what takes longer tells nothing.
_STEPS, _STRIDE, _MOST_ROWS = 200_000, 1_000, 5_000
_MOST_KNOWN = 8  # rows of a result
_NUMBERING = (exp.RowNumber, exp.Lag, exp.Lead)


@dataclass(frozen=True, slots=True)
class Witnesses:
    """The witnesses of a gold query.

    Attributes:
        contents: Each database, as SQLite serialises it.
        neighbours: How many queries near the gold were tried.
        untold: Those that no witness tells from it: they mean the same, or lie in a blind spot.
        reason: Why there is no witness; empty where there is one.
    """

    contents: tuple[bytes, ...] = ()
    neighbours: int = 0
    untold: tuple[Neighbour, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Candidate:
    contents: bytes
    told: frozenset[int]
    is_empty: bool


def distil(gold: str, database: Path, *, mode: MatchMode = "set", count: int = 4) -> Witnesses:
    """Make witnesses of a gold query of SQLite.

    A variant on which the gold fails, or on which its result depends on the order in which SQLite
    reads rows (a tie at a LIMIT), is none.

    Args:
        gold: The query.
        database: Its database.
        mode: When two results are the same.
        count: The most witnesses.

    Raises:
        UserError: The file is no readable database.
    """
    try:
        source = read_source(database)
        focus = focus_of(gold, source, database)
        if focus is None:
            return Witnesses(reason="the gold query cannot be parsed")
        near = (*neighbours(gold, source.column_names), *_by_heart(gold, database))
        found: list[_Candidate] = []
        for number in range(_CANDIDATES):
            variant = make_variant(source, focus, seed=number)
            found += _candidate(variant, gold, near, mode)
            variant.close()
    except (apsw.Error, UnicodeDecodeError) as error:
        return Witnesses(reason=f"SQLite cannot make a variant: {error}")
    if not found:
        return Witnesses(reason="the gold query fails or is undecided on every variant")
    return _choose(found, near, count)


def _by_heart(gold: str, database: Path) -> Iterator[Neighbour]:
    """Write the gold's result as constants: what it gives on one database can be known."""
    with reading(database) as connection:
        result = _run(connection, gold)
    if result is not None and 0 < len(result.rows) <= _MOST_KNOWN:
        rows = (", ".join(map(apsw.format_sql_value, row)) for row in result.rows)
        yield Neighbour("result by heart", f"VALUES {', '.join(f'({row})' for row in rows)}")


def _candidate(
    variant: apsw.Connection, gold: str, near: Sequence[Neighbour], mode: MatchMode
) -> Iterator[_Candidate]:
    """Find what a variant tells apart, where it can be a witness."""
    wanted = _run(variant, gold)
    if wanted is None:
        return
    for result in _by_other_orders(variant, gold):
        if result is None or not matches(result, wanted, mode=mode, gold_sql=gold):
            return
    results = [_run(variant, neighbour.sql) for neighbour in near]
    told = frozenset(
        number
        for number, result in enumerate(results)
        if result is None or not matches(result, wanted, mode=mode, gold_sql=gold)
    )
    yield _Candidate(variant.serialize("main"), told, is_empty=not wanted.rows)


def _run(connection: apsw.Connection, sql: str) -> Table | None:
    """Run a query within bounds; None where it fails or takes too much."""
    strides = itertools.count(1)
    connection.set_progress_handler(lambda: next(strides) * _STRIDE >= _STEPS, _STRIDE)
    try:
        rows = []
        for row in connection.execute(sql):
            rows.append(row)
            if len(rows) > _MOST_ROWS:
                return None
    except (apsw.Error, UnicodeDecodeError):
        return None
    return Table(("",) * (len(rows[0]) if rows else 0), tuple(rows))


def _by_other_orders(connection: apsw.Connection, gold: str) -> Iterator[Table | None]:
    """Run a gold query as SQLite may as well: rows are read backwards, and those that an ORDER BY
    leaves alike come in the order of what is shown, up and down.
    """
    connection.pragma("reverse_unordered_selects", 1)
    yield _run(connection, gold)
    connection.pragma("reverse_unordered_selects", 0)
    if "order" in gold.lower():
        yield from (_run(connection, _with_ties_broken(gold, is_down)) for is_down in (False, True))


@lru_cache(maxsize=8)
def _with_ties_broken(gold: str, is_down: bool) -> str:  # noqa: FBT001
    """Let what is shown order what each ORDER BY leaves alike."""
    tree = parse(gold)
    assert tree is not None  # what cannot be parsed has no variant
    tree = tree.copy()
    for order in tree.find_all(exp.Order):
        for shown in _shown(order.parent):
            key = exp.Ordered(this=shown, desc=is_down, nulls_first=not is_down)
            order.append("expressions", key)
    return tree.sql(dialect="sqlite", normalize_functions=False)


def _shown(around: exp.Expr | None) -> list[exp.Expression]:
    """List what a query shows, by number, or what the query around a window that numbers rows does:
    other windows give rows that are alike the same value.
    """
    if isinstance(around, exp.Query):
        return [exp.Literal.number(number) for number in range(1, len(around.selects) + 1)]
    if isinstance(around, exp.Window) and isinstance(around.this, _NUMBERING):
        select = around.find_ancestor(exp.Select)
        shown = select.selects if select else []
        return [one.copy() for one in shown if isinstance(one, exp.Column)]
    return []


def _choose(found: Sequence[_Candidate], near: Sequence[Neighbour], count: int) -> Witnesses:
    """Take what tells the most apart, one by one; what is told already counts half each time, and
    so does a witness on which the gold returns nothing.
    """
    times = [0] * len(near)
    chosen: list[_Candidate] = []
    left = list(found)

    def gain(candidate: _Candidate) -> float:
        return sum(0.5 ** times[number] for number in candidate.told) / (1 + candidate.is_empty)

    while left and len(chosen) < count:
        best = max(left, key=gain)
        left.remove(best)
        chosen.append(best)
        for number in best.told:
            times[number] += 1
    untold = tuple(one for one, told in zip(near, times, strict=True) if not told)
    return Witnesses(tuple(one.contents for one in chosen), len(near), untold)
