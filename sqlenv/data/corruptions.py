"""The errors of a weak annotator: a query that confuses or forgets one part of the right one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlglot import exp

from sqlenv.sql.extraction import clause, parse_copy

_PAIRS: Sequence[tuple[type[exp.Expr], type[exp.Expr]]] = (
    (exp.EQ, exp.NEQ),
    (exp.LT, exp.GT),
    (exp.LTE, exp.GTE),
    (exp.And, exp.Or),
    (exp.Max, exp.Min),
    (exp.Avg, exp.Sum),
    (exp.Union, exp.Intersect),
)
_CONTRARY = {exp.Except: exp.Intersect, **dict(_PAIRS), **{b: a for a, b in _PAIRS}}


def corrupt(sql: str) -> str | None:
    """Write a query as an annotator with fixed habits would get it wrong.

    The habit is the first of `_HABITS` that applies, so queries of one form have one mistake. None
    where the query does not parse or has nothing to get wrong.
    """
    tree = parse_copy(sql)
    query = tree.unnest() if isinstance(tree, exp.Subquery) else tree
    if query is None or (isinstance(query, exp.Select) and not clause(query, "from_")):
        return None
    holder = exp.Paren(this=query.copy())  # whose child can be replaced like any other node
    habits = _HABITS if isinstance(query, exp.Select) else (_take_for_contrary,)
    if not any(habit(holder.this) for habit in habits):
        return None
    return holder.this.sql(dialect="sqlite", normalize_functions=False)


# Each changes a query in place, and tells whether there was something to change.


def _take_for_contrary(node: exp.Expr) -> bool:
    kind = _CONTRARY.get(type(node))
    if kind:
        node.replace(kind(**node.args))
    return kind is not None


def _turn_last_condition(select: exp.Select) -> bool:
    for condition in clause(select, "having") or clause(select, "where"):
        last = condition.expression if isinstance(condition, exp.And | exp.Or) else condition
        if not _take_for_contrary(last):
            is_negated = isinstance(last, exp.Not)
            last.replace(last.this if is_negated else exp.Not(this=last.copy()))
        return True
    return False


def _forget_distinct(select: exp.Select) -> bool:
    count = select.selects[0].unalias()
    if select.args.get("distinct"):
        select.set("distinct", None)
    elif isinstance(count, exp.Count) and isinstance(count.this, exp.Distinct):
        count.set("this", count.this.expressions[0])
    else:
        return False
    return True


def _turn_order(select: exp.Select) -> bool:
    for key in clause(select, "order")[:1]:
        is_down = bool(key.args.get("desc"))
        # SQLite's own place of NULLs, so that none is written out.
        key.replace(exp.Ordered(this=key.this, desc=not is_down, nulls_first=is_down))
        return True
    return False


def _forget_groups(select: exp.Select) -> bool:
    return select.args.pop("group", None) is not None


def _take_aggregate_for_another(select: exp.Select) -> bool:
    shown = (column.unalias() for column in select.selects)
    # With several arguments MAX and MIN are no aggregates.
    return any(_take_for_contrary(one) for one in shown if not one.expressions)


def _show_all_columns(select: exp.Select) -> bool:
    is_star = select.is_star
    select.set("expressions", [exp.Star()])
    return not is_star


_HABITS: tuple[Callable[[exp.Select], bool], ...] = (
    _turn_last_condition,
    _forget_distinct,
    _turn_order,
    _forget_groups,
    _take_aggregate_for_another,
    _show_all_columns,
)
"""Which part of a query goes wrong; the first that there is."""
