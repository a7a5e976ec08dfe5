"""The errors of a weak annotator: a query that confuses or forgets one part of the right one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from sqlglot import exp

from sqlenv.sql.extraction import clause, from_table, is_distinct, parse

# Each changes a copy of a query in place, or says that it has nothing to change.
Habit = Callable[[exp.Select], bool]

# What is taken for what: set operations, comparisons, aggregates.
_TAKEN_FOR = (
    *((exp.Union, exp.Intersect), (exp.Intersect, exp.Union), (exp.Except, exp.Intersect)),
    *((exp.EQ, exp.NEQ), (exp.NEQ, exp.EQ)),
    *((exp.LT, exp.GT), (exp.GT, exp.LT), (exp.LTE, exp.GTE), (exp.GTE, exp.LTE)),
    *((exp.Max, exp.Min), (exp.Min, exp.Max), (exp.Avg, exp.Sum), (exp.Sum, exp.Avg)),
)


def corrupt(sql: str) -> str | None:
    """Write a query as an annotator with fixed habits would get it wrong.

    The habit is the first of `HABITS` that applies, so queries of one form have one mistake. None
    where the query does not parse or has nothing to get wrong.
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
    if isinstance(query, exp.SetOperation):
        return _other(query) or query
    if isinstance(query, exp.Select):
        next(habit for habit in HABITS if habit(query))
    return query


def _other(node: exp.Expr) -> exp.Expr | None:
    """Return what a node is taken for, over the same arguments; None where it is never confused."""
    for right, wrong in _TAKEN_FOR:
        if isinstance(node, right):
            return wrong(**node.args)
    return None


def _confuse_last(select: exp.Select, name: Literal["where", "having"]) -> bool:
    """Turn the last condition of a clause into its contrary."""
    conditions = clause(select, name)
    for condition in conditions:
        last = condition.expression if isinstance(condition, exp.And | exp.Or) else condition
        is_negated = isinstance(last, exp.Not)
        last.replace(last.this if is_negated else _other(last) or exp.Not(this=last.copy()))
    return bool(conditions)


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
        # With several arguments MAX and MIN are no aggregates.
        wrong = None if column.expressions else _other(column)
        if wrong is not None:
            column.replace(wrong)
            return True
    return False


def _take_all(select: exp.Select) -> bool:
    select.set("expressions", [exp.Star()])
    return True


HABITS: tuple[Habit, ...] = (
    partial(_confuse_last, name="having"),
    partial(_confuse_last, name="where"),
    _forget_distinct,
    _turn_order,
    _forget_group,
    _confuse_aggregate,
    _take_all,
)
