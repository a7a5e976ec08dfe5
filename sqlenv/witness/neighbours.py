"""The table of mutations: every way to change one part of a query so that it means something else.

A query that is right by luck is most often such a neighbour of the gold query: it forgets a
condition, takes another aggregate or column. The idea is that of Zhong, Yu and Klein (EMNLP 2020,
"Semantic Evaluation for Text-to-SQL with Distilled Test Suites"). Weak annotators make the same
mistakes (`sqlenv.data.corruptions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sqlglot import exp

from sqlenv.witness.columns import ColumnNames, column_key, read_tree


class Neighbour(NamedTuple):
    """A changed query, and the name of the change."""

    change: str
    sql: str


class Change(NamedTuple):
    """A way to change a query: its name, the kinds of node that it changes, and into what.

    `make` yields copies, which take the node's place one at a time.
    """

    name: str
    kinds: tuple[type[exp.Expr], ...]
    make: Callable[..., Iterator[exp.Expression]]


# What is taken for what; the contrary, if there is one, goes first.
_TAKEN_FOR: Mapping[type[exp.Expression], tuple[type[exp.Expression], ...]] = {
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
_CLAUSES = {
    "DISTINCT": "distinct",
    "WHERE": "where",
    "GROUP BY": "group",
    "HAVING": "having",
    "ORDER BY": "order",
    "LIMIT": "limit",
}
_AROUND_CONDITIONS = (exp.Where, exp.Having, exp.Join, exp.If, exp.And, exp.Or)
_MOST_COLUMNS = 4  # of a table, that stand in for one


def _another_kind(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    if isinstance(node.expression, exp.Column) and isinstance(
        node.find_ancestor(exp.Join, exp.Select), exp.Join
    ):
        return  # how two tables are joined
    for kind in _TAKEN_FOR[type(node)]:
        yield kind(**{name: _copied(value) for name, value in node.args.items()})


def _one_side(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    yield node.this.copy()
    yield node.expression.copy()


def _inside(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    if isinstance(node.this, exp.Expression) and not isinstance(node.this, exp.Star):
        yield node.this.copy()


def _negated(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    """Negate a condition; a comparison, a connector and a negation have changes of their own."""
    has_own = isinstance(node, (exp.Not, *_TAKEN_FOR))
    if isinstance(node.parent, _AROUND_CONDITIONS) and not has_own:
        yield exp.Not(this=node.copy())


def _without(
    node: exp.Expression, _columns: ColumnNames, *, clause: str
) -> Iterator[exp.Expression]:
    if node.args.get(clause):
        yield with_argument(node, clause, None)


def _with_distinct(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    if not node.args.get("distinct"):
        yield with_argument(node, "distinct", exp.Distinct())


def _with_all_columns(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    if not node.is_star:
        yield with_argument(node, "expressions", [exp.Star()])


def _without_join(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    for at in range(len(node.args.get("joins") or ())):
        other = node.copy()
        del other.args["joins"][at]
        yield other


def _other_grouping(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    """Group by one key less."""
    keys = node.expressions
    if len(keys) > 1:
        for at in range(len(keys)):
            yield with_argument(node, "expressions", [k.copy() for k in keys[:at] + keys[at + 1 :]])


def _other_join(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    if node.args.get("on"):
        yield with_argument(node, "on", None)
        if not node.args.get("side"):
            yield with_argument(node, "side", "LEFT")
        else:
            yield with_argument(node, "side", None)


def _other_count(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    inside = node.this
    if isinstance(inside, exp.Distinct) and len(inside.expressions) == 1:
        yield exp.Count(this=inside.expressions[0].copy())
    elif isinstance(inside, exp.Column):
        yield exp.Count(this=exp.Distinct(expressions=[inside.copy()]))
        yield exp.Count(this=exp.Star())
        yield exp.Sum(this=inside.copy())


def _distinct_inside(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    if isinstance(node.this, exp.Column):
        yield type(node)(this=exp.Distinct(expressions=[node.this.copy()]))


def _shown_keys(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    """Group by a column that is shown in place of the key."""
    select = node.parent
    if isinstance(select, exp.Select):
        for shown in select.selects:
            if isinstance(shown, exp.Column) and shown not in node.expressions:
                yield exp.Group(expressions=[shown.copy()])


def _other_order(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    is_down = bool(node.args.get("desc"))
    # SQLite's own place of NULLs, so that none is written out.
    yield exp.Ordered(this=node.this.copy(), desc=not is_down, nulls_first=is_down)


def _other_literal(node: exp.Expression, _columns: ColumnNames) -> Iterator[exp.Expression]:
    text = str(node.this)
    if node.args["is_string"]:
        if isinstance(node.parent, exp.Like):
            yield from (exp.Literal.string(one) for one in _patterns(text))
        else:
            yield exp.Literal.string(f"{text}x")
    elif text.isdigit():
        yield exp.Literal.number(int(text) + 1)
        if int(text):
            yield exp.Literal.number(int(text) - 1)
    else:
        yield exp.Literal.number(f"{text}1")


def _patterns(text: str) -> Iterator[str]:
    """Anchor a pattern of LIKE where it was not, or the other way."""
    core = text.strip("%")
    yield from (one for one in (f"%{core}%", f"{core}%", f"%{core}", core) if one != text)


def _other_column(node: exp.Expression, columns: ColumnNames) -> Iterator[exp.Expression]:
    """Take other columns of the column's own table, the nearest first."""
    assert isinstance(node, exp.Column)
    place = column_key(node, columns)
    if place is None:
        return
    names = columns[place[0]]
    at = names.index(place[1])
    others = [name for name in names if name != place[1]]
    for name in sorted(others, key=lambda name: abs(names.index(name) - at))[:_MOST_COLUMNS]:
        yield _renamed(node, name)


def _renamed(column: exp.Column, name: str) -> exp.Column:
    other = column.copy()
    other.set("this", exp.to_identifier(name, quoted=True))
    return other


def with_argument(node: exp.Expression, name: str, value: Any) -> exp.Expression:
    """Copy a node with another value of one argument."""
    other = node.copy()
    other.set(name, value)
    return other


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, exp.Expression) else value


CHANGES: tuple[Change, ...] = (
    Change("another operator", tuple(_TAKEN_FOR), _another_kind),
    Change("condition negated", (exp.Condition,), _negated),
    Change("negation dropped", (exp.Not,), _inside),
    Change("function dropped", (exp.Max, exp.Min, exp.Avg, exp.Sum, exp.Abs, exp.Lower), _inside),
    Change("one side alone", (exp.And, exp.Or, exp.SetOperation), _one_side),
    *(
        Change(f"{name} dropped", (exp.Select,), partial(_without, clause=clause))
        for name, clause in _CLAUSES.items()
    ),
    Change("DISTINCT added", (exp.Select,), _with_distinct),
    Change("all columns shown", (exp.Select,), _with_all_columns),
    Change("join dropped", (exp.Select,), _without_join),
    Change("join changed", (exp.Join,), _other_join),
    Change("another group", (exp.Group,), _shown_keys),
    Change("key dropped", (exp.Group, exp.Order), _other_grouping),
    Change("count of something else", (exp.Count,), _other_count),
    Change("DISTINCT inside", (exp.Sum, exp.Avg), _distinct_inside),
    Change("order turned", (exp.Ordered,), _other_order),
    Change("another constant", (exp.Literal,), _other_literal),
    Change("another column", (exp.Column,), _other_column),
)


def neighbours(
    sql: str, columns: ColumnNames, changes: Sequence[Change] = CHANGES
) -> list[Neighbour]:
    """Return every neighbour of a query, each text once; none of what does not parse."""
    tree = read_tree(sql, columns)
    if tree is None:
        return []
    holder = exp.Paren(this=tree)  # whose child can be replaced like any other node
    found = {_written(holder.this): ""}
    for node in list(holder.this.walk()):
        for name, other in list(changes_of(node, columns, changes)):
            node.replace(other)
            found.setdefault(_written(holder.this), name)
            other.replace(node)
    return [Neighbour(name, text) for text, name in found.items() if name]


def changes_of(
    node: exp.Expr, columns: ColumnNames, changes: Sequence[Change] = CHANGES
) -> Iterator[tuple[str, exp.Expression]]:
    """Yield what can take the place of one node, with the name of the change."""
    for change in changes:
        if isinstance(node, change.kinds):
            yield from ((change.name, other) for other in change.make(node, columns))


def _written(tree: exp.Expression) -> str:
    return tree.sql(dialect="sqlite", normalize_functions=False)
