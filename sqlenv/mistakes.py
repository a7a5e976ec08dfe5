"""The mistakes of a weak annotator: a query that confuses or forgets one part of the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sqlglot import exp

from sqlenv.parse import clause, from_table, is_distinct, parse

# Each changes a copy of a query in place, or says that it has nothing to change.
Habit = Callable[[exp.Select], bool]

_SWAPPED = (
    (exp.Union, exp.Intersect),
    (exp.Intersect, exp.Union),
    (exp.Except, exp.Intersect),
)
_TURNED = (
    *((exp.EQ, exp.NEQ), (exp.NEQ, exp.EQ)),
    *((exp.LT, exp.GT), (exp.GT, exp.LT), (exp.LTE, exp.GTE), (exp.GTE, exp.LTE)),
)
_CONFUSED = ((exp.Max, exp.Min), (exp.Min, exp.Max), (exp.Avg, exp.Sum), (exp.Sum, exp.Avg))


def mistake(sql: str) -> str | None:
    """Write a query as an annotator with fixed habits would get it wrong.

    The habit is the first of `HABITS` that applies, so queries of one form have one mistake; a set
    operation is taken for another one. A few mistakes do not change the result.

    Returns:
        The query with its mistake; None where it does not parse or has nothing to get wrong.
    """
    tree = parse(sql)
    if tree is None:
        return None
    wrong = _spoil(tree.copy())
    if wrong == tree or (isinstance(wrong, exp.Select) and from_table(wrong) is None):
        return None
    return wrong.sql(dialect="sqlite", normalize_functions=False)


def _spoil(tree: exp.Expr) -> exp.Expr:
    query = tree.unnest() if isinstance(tree, exp.Subquery) else tree
    for right, wrong in _SWAPPED:
        if isinstance(query, right):
            return wrong(**query.args)
    if isinstance(query, exp.Select):
        next(habit for habit in HABITS if habit(query))
    return query


def _confuse_having(select: exp.Select) -> bool:
    return _confuse_last(select, "having")


def _confuse_where(select: exp.Select) -> bool:
    return _confuse_last(select, "where")


def _confuse_last(select: exp.Select, name: Literal["where", "having"]) -> bool:
    """Turn the last condition of a clause into its contrary."""
    for condition in clause(select, name):
        last = condition.expression if isinstance(condition, exp.And | exp.Or) else condition
        last.replace(_contrary(last))
        return True
    return False


def _contrary(condition: exp.Expr) -> exp.Expr:
    if isinstance(condition, exp.Not):
        return condition.this
    for right, wrong in _TURNED:
        if isinstance(condition, right):
            return wrong(this=condition.this, expression=condition.expression)
    return exp.Not(this=condition.copy())


def _forget_distinct(select: exp.Select) -> bool:
    if is_distinct(select):
        select.set("distinct", None)
        return True
    counted = select.selects[0].unalias()
    inside = counted.this
    if not isinstance(counted, exp.Count) or not isinstance(inside, exp.Distinct):
        return False
    if inside.expressions:
        inside.replace(inside.expressions[0])
    return bool(inside.expressions)


def _turn_order(select: exp.Select) -> bool:
    keys = clause(select, "order")
    for key in keys:
        # SQLite's own place of NULLs, so that none is written out.
        key.set("nulls_first", bool(key.args.get("desc")))
        key.set("desc", not key.args.get("desc"))
    return bool(keys)


def _forget_group(select: exp.Select) -> bool:
    return select.args.pop("group", None) is not None


def _confuse_aggregate(select: exp.Select) -> bool:
    for column in [selected.unalias() for selected in select.selects]:
        for right, wrong in _CONFUSED:
            # With several arguments MAX and MIN are no aggregates.
            if isinstance(column, right) and not column.expressions:
                column.replace(wrong(this=column.this))
                return True
    return False


def _take_all(select: exp.Select) -> bool:
    select.set("expressions", [exp.Star()])
    return True


HABITS: tuple[Habit, ...] = (
    _confuse_having,
    _confuse_where,
    _forget_distinct,
    _turn_order,
    _forget_group,
    _confuse_aggregate,
    _take_all,
)
