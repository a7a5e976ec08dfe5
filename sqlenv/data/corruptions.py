"""The errors of a weak annotator: a query that confuses or forgets one part of the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from sqlglot import exp

from sqlenv.sql.extraction import clause, from_table, parse

Change = Callable[[Any], Iterator[exp.Expression]]
"""From a node of a query to what may stand in its place; nothing for a node of another kind."""

# What is taken for what; the contrary, if there is one, goes first.
TAKEN_FOR: Mapping[type[exp.Expression], tuple[type[exp.Expression], ...]] = {
    exp.EQ: (exp.NEQ, exp.LTE, exp.GTE),
    exp.NEQ: (exp.EQ,),
    exp.LT: (exp.GT, exp.LTE, exp.EQ),
    exp.LTE: (exp.GTE, exp.LT, exp.EQ),
    exp.GT: (exp.LT, exp.GTE, exp.EQ),
    exp.GTE: (exp.LTE, exp.GT, exp.EQ),
    exp.And: (exp.Or,),
    exp.Or: (exp.And,),
    exp.Max: (exp.Min, exp.Avg, exp.Count),
    exp.Min: (exp.Max, exp.Avg, exp.Count),
    exp.Avg: (exp.Sum, exp.Max, exp.Min),
    exp.Sum: (exp.Avg, exp.Max, exp.Count),
    exp.Union: (exp.Intersect, exp.Except),
    exp.Intersect: (exp.Union, exp.Except),
    exp.Except: (exp.Intersect, exp.Union),
}
_AROUND_CONDITIONS = (exp.Where, exp.Having, exp.Join, exp.If, exp.And, exp.Or)


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
            if other := next((one for change in changes for one in change(part)), None):
                part.replace(other)
                return holder.this.sql(dialect="sqlite", normalize_functions=False)
    return None


def another_kind(node: exp.Expression) -> Iterator[exp.Expression]:
    """Take an operator, an aggregate or a set operation for another one."""
    if isinstance(node.args.get("expression"), exp.Column) and isinstance(
        node.find_ancestor(exp.Join, exp.Select), exp.Join
    ):
        return  # how two tables are joined
    for kind in TAKEN_FOR.get(type(node), ()):
        yield kind(**{name: _copied(value) for name, value in node.args.items()})


def negated(node: exp.Expression) -> Iterator[exp.Expression]:
    """Negate a condition; a comparison, a connector and a negation have changes of their own."""
    has_own = isinstance(node, (exp.Not, *TAKEN_FOR))
    if isinstance(node, exp.Condition) and isinstance(node.parent, _AROUND_CONDITIONS):
        yield from () if has_own else (exp.Not(this=node.copy()),)


def without_negation(node: exp.Expression) -> Iterator[exp.Expression]:
    """Leave out NOT."""
    if isinstance(node, exp.Not):
        yield node.this.copy()


def without(node: exp.Expression, *, clause: str) -> Iterator[exp.Expression]:
    """Leave out a clause of a SELECT."""
    if isinstance(node, exp.Select) and node.args.get(clause):
        yield with_argument(node, clause, None)


def other_count(node: exp.Expression) -> Iterator[exp.Expression]:
    """Count values once or often, or rows; or add them up."""
    if not isinstance(node, exp.Count):
        return
    inside = node.this
    if isinstance(inside, exp.Distinct) and len(inside.expressions) == 1:
        yield exp.Count(this=inside.expressions[0].copy())
    elif isinstance(inside, exp.Column):
        yield exp.Count(this=exp.Distinct(expressions=[inside.copy()]))
        yield exp.Count(this=exp.Star())
        yield exp.Sum(this=inside.copy())


def other_order(node: exp.Expression) -> Iterator[exp.Expression]:
    """Turn an order."""
    if isinstance(node, exp.Ordered):
        is_down = bool(node.args.get("desc"))
        # SQLite's own place of NULLs, so that none is written out.
        yield exp.Ordered(this=node.this.copy(), desc=not is_down, nulls_first=is_down)


def all_columns(node: exp.Expression) -> Iterator[exp.Expression]:
    """Show all columns."""
    if isinstance(node, exp.Select) and not node.is_star:
        yield with_argument(node, "expressions", [exp.Star()])


def with_argument(node: exp.Expression, name: str, value: Any) -> exp.Expression:
    """Copy a node with another value of one argument."""
    other = node.copy()
    other.set(name, value)
    return other


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, exp.Expression) else value


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


_CONTRARY: tuple[Change, ...] = (another_kind, negated, without_negation)
HABITS: tuple[tuple[Callable[..., Iterable[exp.Expr]], tuple[Change, ...]], ...] = (
    (partial(_last_condition, name="having"), _CONTRARY),
    (partial(_last_condition, name="where"), _CONTRARY),
    (_itself, (partial(without, clause="distinct"),)),
    (_counted_once, (other_count,)),
    (partial(clause, name="order"), (other_order,)),
    (_itself, (partial(without, clause="group"),)),
    (_shown, (another_kind,)),
    (_itself, (all_columns,)),
)
"""Which part of a query goes wrong, and by which changes; the first that there is."""
