"""Choose the few variants that tell the most neighbours of a gold query apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import apsw
from sqlglot import exp

from sqlenv.evaluators.equality import matches
from sqlenv.sql.extraction import parse
from sqlenv.types import MatchMode, Result, SqlError, Table, TooLarge
from sqlenv.witness.neighbours import Neighbour, neighbours
from sqlenv.witness.source import read_source
from sqlenv.witness.variants import focus_of, make_variant

_STEPS = 200_000
_ROWS = 5_000
_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Witness:
    """A variant, as SQLite serialises it, and the gold's result on it."""

    contents: bytes
    gold: Table


@dataclass(frozen=True, slots=True)
class Witnesses:
    """The witnesses of a question, and the neighbours that none of them tells apart."""

    chosen: tuple[Witness, ...]
    neighbours: int
    untold: tuple[Neighbour, ...]


def run(connection: apsw.Connection, sql: str) -> Result:
    """Run a query within bounds."""
    left = [_STEPS]

    def is_over() -> bool:
        left[0] -= 1000
        return left[0] <= 0

    connection.set_progress_handler(is_over, 1000)
    try:
        cursor = connection.execute(sql)
        rows = []
        for row in cursor:
            rows.append(row)
            if len(rows) > _ROWS:
                return TooLarge("rows")
        width = len(rows[0]) if rows else 0
        return Table(("",) * width, tuple(rows))
    except apsw.Error as error:
        return SqlError(str(error))


def distil(
    gold: str,
    database: Path,
    *,
    mode: MatchMode,
    count: int = 4,
    seed: int = 0,
    breaks_uniqueness: bool = False,
) -> Witnesses:
    """Make the witnesses of a gold query."""
    source = read_source(database)
    focus = focus_of(gold, source, database)
    near = neighbours(gold, source.column_names)
    tie = _tie_probe(gold)
    found: list[tuple[apsw.Connection, Table, frozenset[int]]] = []
    for at in range(_CANDIDATES):
        variant = make_variant(
            source, focus, seed=seed * 1000 + at, breaks_uniqueness=breaks_uniqueness
        )
        wanted = run(variant, gold)
        if not isinstance(wanted, Table):
            continue
        variant.pragma("reverse_unordered_selects", 1)
        other = run(variant, gold)
        variant.pragma("reverse_unordered_selects", 0)
        if not matches(other, wanted, mode=mode, gold_sql=gold):
            continue  # undecided: it depends on the order in which SQLite reads
        if tie and _is_tied(run(variant, tie[0]), tie[1]):
            continue
        told = frozenset(
            n
            for n, one in enumerate(near)
            if not matches(run(variant, one.sql), wanted, mode=mode, gold_sql=gold)
        )
        found.append((variant, wanted, told))
    return _choose(found, near, count)


def _tie_probe(sql: str) -> tuple[str, int] | None:
    """Return a query for the keys by which a query with a LIMIT is ordered, and how many of them."""
    tree = parse(sql)
    if not isinstance(tree, exp.Select) or not tree.args.get("limit") or not tree.args.get("order"):
        return None
    count = tree.args["limit"].expression
    if not isinstance(count, exp.Literal) or not str(count.this).isdigit():
        return None
    probe = tree.copy()
    keys = [one.this.copy() for one in tree.args["order"].expressions]
    probe.set("expressions", [*probe.expressions, *keys])
    probe.set("limit", exp.Limit(expression=exp.Literal.number(int(str(count.this)) + 1)))
    return probe.sql(dialect="sqlite", normalize_functions=False), len(keys)


def _is_tied(result: Result, keys: int) -> bool:
    """Say whether the last row that a LIMIT keeps and the first that it drops are ordered alike."""
    if not isinstance(result, Table) or len(result.rows) < 2:
        return False
    return result.rows[-1][-keys:] == result.rows[-2][-keys:]


def _choose(
    found: list[tuple[apsw.Connection, Table, frozenset[int]]], near: list[Neighbour], count: int
) -> Witnesses:
    """Take greedily what tells the most apart; a neighbour that is told again counts half."""
    times = [0] * len(near)
    chosen: list[Witness] = []
    left = list(found)
    while left and len(chosen) < count:
        best = max(
            left,
            key=lambda one: sum(0.5 ** times[n] for n in one[2]) * (1.0 if one[1].rows else 0.5),
        )
        left.remove(best)
        for n in best[2]:
            times[n] += 1
        chosen.append(Witness(best[0].serialize("main"), best[1]))
    untold = tuple(one for one, told in zip(near, times, strict=True) if not told)
    return Witnesses(tuple(chosen), len(near), untold)
