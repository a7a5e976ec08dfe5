"""The witnesses of a gold query: variants of its database that decide what it gives."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import apsw
from sqlglot import exp

from sqlenv.evaluators.equality import matches
from sqlenv.executor.database import with_memory
from sqlenv.sql.extraction import parse_copy
from sqlenv.types import MatchMode, Table
from sqlenv.witness.focus import focus_of
from sqlenv.witness.source import read_source
from sqlenv.witness.variants import make_variant

_log = logging.getLogger(__name__)

_MOST_DRAWN = 48  # variants, of a gold query with a condition that hardly ever matters
# A gold query may be a product of tables.
_STEPS, _STRIDE, _MOST_ROWS = 200_000, 1_000, 5_000
_NUMBERING = (exp.RowNumber, exp.Lag, exp.Lead)


def draw_witnesses(
    gold: str, database: Path, *, mode: MatchMode = "set", count: int = 8
) -> tuple[bytes, ...]:
    """Draw witnesses of a gold query of SQLite, at most `count`: those on which it finds something
    and most of its conditions matter. `mode` says when two results are the same.

    Returns the databases as SQLite serialises them; none where none can be made, which is logged.

    A variant on which the gold fails, or on which its result depends on the order in which SQLite
    reads rows (a tie at a LIMIT), is none.

    Raises:
        UserError: The file is no readable database.
        apsw.NoMemError: Queries of models have had all the memory for seconds.
    """
    try:
        found = with_memory(lambda: list(_draw(gold, database, mode, count)))
        why = "it cannot be parsed, fails or is undecided on every variant"
    except apsw.NoMemError:
        raise
    except (apsw.Error, UnicodeDecodeError) as error:
        found, why = [], f"SQLite cannot make a variant: {error}"
    if not found:
        _log.info("%s: no witness of the gold query %.100r: %s", database.stem, gold, why)
    found.sort(key=lambda one: one[0])
    return tuple(contents for _, contents in found[:count])


def _draw(gold: str, database: Path, mode: MatchMode, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield witnesses, each with how much is idle there: conditions without which the gold query
    gives the same, and the query itself if it finds nothing; until nothing is in `count` of them.
    """
    source = read_source(database)
    if (focus := focus_of(gold, source)) is None:
        return
    lively = 0
    for number in range(_MOST_DRAWN):
        with closing(make_variant(source, focus, seed=number)) as variant:
            if (result := decided_result(variant, gold, mode)) is not None:
                others = (run_bounded(variant, sql) for sql in focus.without_each)
                same = (matches(one, result, mode=mode, gold_sql=gold) for one in others if one)
                idle = sum(same) + ({value for row in result.rows for value in row} <= {0, None})
                if not (contents := variant.serialize("main")):
                    raise apsw.NoMemError("out of memory")
                yield idle, contents
                lively += not idle
                if lively == count:
                    return


def decided_result(variant: apsw.Connection, gold: str, mode: MatchMode) -> Table | None:
    """Run a gold query; None where it fails, or where SQLite may as well return something else:
    with tables scanned in reverse, or with the ties of each ORDER BY broken either way.
    """
    result = run_bounded(variant, gold)
    if result is None or _ties_at_a_limit(variant, gold, mode):
        return None
    variant.pragma("reverse_unordered_selects", 1)
    others = [run_bounded(variant, gold)]
    variant.pragma("reverse_unordered_selects", 0)
    others += [run_bounded(variant, query) for query in ties_broken(gold)]
    is_decided = all(one and matches(one, result, mode=mode, gold_sql=gold) for one in others)
    return result if is_decided else None


def run_bounded(connection: apsw.Connection, sql: str) -> Table | None:
    """Run a query within bounds; None where it fails or takes too much."""
    strides = itertools.count(1)
    connection.set_progress_handler(lambda: next(strides) * _STRIDE >= _STEPS, _STRIDE)
    try:
        rows = list(itertools.islice(connection.execute(sql), _MOST_ROWS + 1))
    except apsw.NoMemError:
        raise
    except (apsw.Error, UnicodeDecodeError):
        return None
    if len(rows) > _MOST_ROWS:
        return None
    return Table(("",) * (len(rows[0]) if rows else 0), tuple(rows))


@lru_cache(maxsize=8)
def ties_broken(sql: str) -> tuple[str, ...]:
    """Order what each ORDER BY leaves tied by the columns of the result: upwards, downwards.

    Returns:
        Two queries; none where the query has no ORDER BY, or cannot be parsed.
    """
    tree = parse_copy(sql) if "order" in sql.lower() else None
    if tree is None or tree.find(exp.Order) is None:
        return ()
    return tuple(_break_ties(tree.copy(), is_down=is_down) for is_down in (False, True))


def _break_ties(tree: exp.Expr, *, is_down: bool) -> str:
    for order in tree.find_all(exp.Order):
        for shown in _shown(order.parent):
            key = exp.Ordered(this=shown, desc=is_down, nulls_first=not is_down)
            order.append("expressions", key)
    return tree.sql(dialect="sqlite", normalize_functions=False)


def _ties_at_a_limit(connection: apsw.Connection, gold: str, mode: MatchMode) -> bool:
    """Tell whether rows that a LIMIT takes tie with rows that it leaves: other ones or, except for
    sets, the same ones. A subquery that needs the query around it does not run, and tells nothing.
    """
    for sql, keys, limit in _limited(gold):
        found = run_bounded(connection, sql)
        if found is None or not 0 < limit < len(found.rows):
            continue
        last, following = (row[-keys:] for row in found.rows[limit - 1 : limit + 1])
        tied = {row for row in found.rows if row[-keys:] == last}
        if last == following and (mode != "set" or len(tied) > 1):
            return True
    return False


@lru_cache(maxsize=8)
def _limited(gold: str) -> tuple[tuple[str, int, int], ...]:
    """List the queries in a query that have an ORDER BY and a LIMIT, none that is DISTINCT: without
    the LIMIT, and with what they order by behind what they show; with the number of that, and the
    LIMIT.
    """
    tree, found = parse_copy(gold), []
    for select in tree.find_all(exp.Select) if tree else ():
        limit, order = select.args.get("limit"), select.args.get("order")
        is_plain = not (select.args.get("distinct") or select.args.get("offset"))
        if order and is_plain and isinstance(limit, exp.Limit) and limit.expression.is_int:
            keys = [one.this for one in order.expressions]
            if select.is_star and any(key.is_int for key in keys):
                continue  # the number of a column of `*`
            keys = [select.selects[int(key.name) - 1] if key.is_int else key for key in keys]
            whole = select.select(*(key.unalias() for key in keys))
            whole.set("limit", None)
            sql = whole.sql(dialect="sqlite", normalize_functions=False)
            found.append((sql, len(keys), int(limit.expression.name)))
    return tuple(found)


def _shown(around: exp.Expr | None) -> list[exp.Expression]:
    """List the columns of a query's result, by number; for a window that numbers rows, those of
    the query around it: other windows give tied rows the same value.
    """
    if isinstance(around, exp.Query):
        return [exp.Literal.number(number) for number in range(1, len(around.selects) + 1)]
    if isinstance(around, exp.Window) and isinstance(around.this, _NUMBERING):
        select = around.find_ancestor(exp.Select)
        shown = select.selects if select else []
        return [one.copy() for one in shown if isinstance(one, exp.Column)]
    return []
