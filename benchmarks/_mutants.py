"""Gold queries that are wrong in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from sqlglot import exp

from sqlenv.data.corruptions import (
    Change,
    all_columns,
    another_kind,
    negated,
    other_count,
    other_order,
    with_argument,
    without,
    without_negation,
)
from sqlenv.witness.focus import ColumnNames, column_key, read_tree

_CLAUSES = ("distinct", "where", "group", "having", "order", "limit")
_FUNCTIONS = (exp.Max, exp.Min, exp.Avg, exp.Sum, exp.Abs, exp.Lower)
_MOST_COLUMNS = 4  # of a table, that stand in for one


def _one_side(node: exp.Expression) -> Iterator[exp.Expression]:
    if isinstance(node, exp.And | exp.Or | exp.SetOperation):
        yield node.this.copy()
        yield node.expression.copy()


def _inside(node: exp.Expression) -> Iterator[exp.Expression]:
    if isinstance(node, _FUNCTIONS) and not isinstance(node.this, exp.Star):
        yield node.this.copy()


def _with_distinct(node: exp.Expression) -> Iterator[exp.Expression]:
    if isinstance(node, exp.Select) and not node.args.get("distinct"):
        yield with_argument(node, "distinct", exp.Distinct())


def _without_join(node: exp.Expression) -> Iterator[exp.Expression]:
    joins = node.args.get("joins") or () if isinstance(node, exp.Select) else ()
    for at in range(len(joins)):
        other = node.copy()
        del other.args["joins"][at]
        yield other


def _without_key(node: exp.Expression) -> Iterator[exp.Expression]:
    keys = node.expressions if isinstance(node, exp.Group | exp.Order) else ()
    if len(keys) > 1:
        for at in range(len(keys)):
            yield with_argument(node, "expressions", [k.copy() for k in keys[:at] + keys[at + 1 :]])


def _other_join(node: exp.Expression) -> Iterator[exp.Expression]:
    if isinstance(node, exp.Join) and node.args.get("on"):
        yield with_argument(node, "on", None)
        yield with_argument(node, "side", None if node.args.get("side") else "LEFT")


def _distinct_inside(node: exp.Expression) -> Iterator[exp.Expression]:
    if isinstance(node, exp.Sum | exp.Avg) and isinstance(node.this, exp.Column):
        yield type(node)(this=exp.Distinct(expressions=[node.this.copy()]))


def _shown_keys(node: exp.Expression) -> Iterator[exp.Expression]:
    """Group by a column that is shown in place of the key."""
    select = node.parent
    if isinstance(node, exp.Group) and isinstance(select, exp.Select):
        for shown in select.selects:
            if isinstance(shown, exp.Column) and shown not in node.expressions:
                yield exp.Group(expressions=[shown.copy()])


def _other_literal(node: exp.Expression) -> Iterator[exp.Expression]:
    if not isinstance(node, exp.Literal):
        return
    text = str(node.this)
    if node.is_string and isinstance(node.parent, exp.Like):
        core = text.strip("%")
        patterns = (f"%{core}%", f"{core}%", f"%{core}", core)
        yield from (exp.Literal.string(one) for one in patterns if one != text)
    elif node.is_string:
        yield exp.Literal.string(f"{text}x")
    elif text.isdigit():
        near = (int(text) + 1, int(text) - 1)
        yield from (exp.Literal.number(one) for one in near if one >= 0)
    else:
        yield exp.Literal.number(f"{text}1")


def _as_pattern(node: exp.Expression) -> Iterator[exp.Expression]:
    """Look for a text anywhere in place of the text."""
    text = node.expression if isinstance(node, exp.EQ) else None
    if isinstance(text, exp.Literal) and text.is_string:
        yield exp.Like(this=node.this.copy(), expression=exp.Literal.string(f"%{text.this}%"))


def _other_column(node: exp.Expression, columns: ColumnNames) -> Iterator[exp.Expression]:
    """Take other columns of the column's own table, the nearest first."""
    place = column_key(node, columns) if isinstance(node, exp.Column) else None
    if place is None:
        return
    names = columns[place[0]]
    at = names.index(place[1])
    others = [name for name in names if name != place[1]]
    for name in sorted(others, key=lambda name: abs(names.index(name) - at))[:_MOST_COLUMNS]:
        yield with_argument(node, "this", exp.to_identifier(name, quoted=True))


CHANGES: Sequence[Change] = (
    *(another_kind, negated, without_negation, _inside, _one_side),
    *(partial(without, clause=clause) for clause in _CLAUSES),
    *(_with_distinct, all_columns, _without_join, _other_join, _shown_keys, _without_key),
    *(other_count, _distinct_inside, other_order, _other_literal, _as_pattern),
)
"""Every way to change one part of a query so that it means something else; as `neighbours` adds,
also to another column."""


def neighbours(sql: str, columns: ColumnNames) -> list[str]:
    """Return every query that differs from one in one place, each text once; none of what does not
    parse.
    """
    tree = read_tree(sql, columns)
    if tree is None:
        return []
    holder = exp.Paren(this=tree)  # whose child can be replaced like any other node
    found = {(own := _written(holder.this)): None}
    for node in list(holder.this.walk()):
        for change in (*CHANGES, partial(_other_column, columns=columns)):
            for other in list(change(node)):
                node.replace(other)
                found.setdefault(_written(holder.this))
                other.replace(node)
    return [text for text in found if text != own]


def _written(tree: exp.Expression) -> str:
    return tree.sql(dialect="sqlite", normalize_functions=False)
