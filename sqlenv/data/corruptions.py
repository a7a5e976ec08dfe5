"""The errors of a weak annotator: a query that confuses or forgets one part of the right one.

What is taken for what stands in the table of mutations (`sqlenv.witness.neighbours`); here is which
part of a query goes wrong first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

from sqlglot import exp

from sqlenv.sql.extraction import clause, from_table, parse
from sqlenv.witness.neighbours import changes_of


def corrupt(sql: str) -> str | None:
    """Write a query as an annotator with fixed habits would get it wrong.

    The habit is the first of `HABITS` that applies, so queries of one form have one mistake. None
    where the query does not parse or has nothing to get wrong.
    """
    tree = parse(sql)
    query = tree.unnest() if isinstance(tree, exp.Subquery) else tree
    if query is None or (isinstance(query, exp.Select) and from_table(query) is None):
        return None
    holder = exp.Paren(this=query.copy())  # whose child can be replaced like any other node
    for parts, changes in HABITS if isinstance(query, exp.Select) else [(_itself, _CONTRARY)]:
        for part in parts(holder.this):
            for change, other in changes_of(part, {}):
                if change in changes:
                    part.replace(other)
                    return holder.this.sql(dialect="sqlite", normalize_functions=False)
    return None


def _last_condition(select: exp.Select, name: Literal["where", "having"]) -> Iterable[exp.Expr]:
    for condition in clause(select, name):
        yield condition.expression if isinstance(condition, exp.And | exp.Or) else condition


def _shown(select: exp.Select) -> Iterable[exp.Expr]:
    """List what is shown; with several arguments MAX and MIN are no aggregates."""
    shown = (column.unalias() for column in select.selects)
    return (one for one in shown if not one.expressions)


def _counted_once(select: exp.Select) -> Iterable[exp.Expr]:
    first = select.selects[0].unalias()
    return [first] if isinstance(first.this, exp.Distinct) else []


def _itself(select: exp.Select) -> Iterable[exp.Expr]:
    return [select]


_CONTRARY = ("another operator", "condition negated", "negation dropped")
HABITS: tuple[tuple[Callable[..., Iterable[exp.Expr]], tuple[str, ...]], ...] = (
    (partial(_last_condition, name="having"), _CONTRARY),
    (partial(_last_condition, name="where"), _CONTRARY),
    (_itself, ("DISTINCT dropped",)),
    (_counted_once, ("count of something else",)),
    (partial(clause, name="order"), ("order turned",)),
    (_itself, ("GROUP BY dropped",)),
    (_shown, ("another operator",)),
    (_itself, ("all columns shown",)),
)
"""Which part of a query goes wrong, and by which changes; the first that there is."""
