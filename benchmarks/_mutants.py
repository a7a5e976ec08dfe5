"""Gold queries that are wrong in one place, and other texts of right ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
from sqlenv.witness.columns import ColumnNames, column_key, read_tree

_ORDER_BY = re.compile("order by", re.IGNORECASE)
_CLAUSES = {
    "DISTINCT": "distinct",
    "WHERE": "where",
    "GROUP BY": "group",
    "HAVING": "having",
    "ORDER BY": "order",
    "LIMIT": "limit",
}
_FUNCTIONS = (exp.Max, exp.Min, exp.Avg, exp.Sum, exp.Abs, exp.Lower)
_MOST_COLUMNS = 4  # of a table, that stand in for one
Shown = list[exp.Expression]


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


def _showing(node: exp.Expression, *, change: Callable[[Shown], Shown]) -> Iterator[exp.Expression]:
    if isinstance(node, exp.Select) and (changed := change(node.expressions)):
        yield with_argument(node, "expressions", [one.copy() for one in changed])


SHAPES: Mapping[str, Callable[[Shown], Shown]] = {
    "columns reversed": lambda shown: shown[::-1],
    "column dropped": lambda shown: shown[:-1],
    "column added": lambda shown: [*shown, exp.Literal.number(1)],
}
"""Changes of what a result shows, which no database is needed to see."""

CHANGES: Mapping[str, Change] = {
    "another operator": another_kind,
    "condition negated": negated,
    "negation dropped": without_negation,
    "function dropped": _inside,
    "one side alone": _one_side,
    **{f"{name} dropped": partial(without, clause=clause) for name, clause in _CLAUSES.items()},
    "DISTINCT added": _with_distinct,
    "all columns shown": all_columns,
    "join dropped": _without_join,
    "join changed": _other_join,
    "another group": _shown_keys,
    "key dropped": _without_key,
    "count of something else": other_count,
    "DISTINCT inside": _distinct_inside,
    "order turned": other_order,
    "another constant": _other_literal,
    "text as a pattern": _as_pattern,
}
"""Every way to change one part of a query so that it means something else; as `neighbours` adds,
also to another column."""

SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "semicolon": lambda sql: f"{sql.rstrip('; ')};",
    "two semicolons": lambda sql: f"{sql.rstrip('; ')};;",
    "a second query": lambda sql: f"{sql.rstrip('; ')}; SELECT 1",
    "comment behind": lambda sql: f"{sql.rstrip('; ')} -- distinct",
    "block comment before": lambda sql: f"/* it's DISTINCT */ {sql}",
    "comment alone": lambda _: "-- nothing",
    "upper case": lambda sql: sql.upper(),
    "blanks in ORDER BY": lambda sql: _ORDER_BY.sub("ORDER  BY", sql),
    "operators apart": lambda sql: re.sub("(>|<|!)=", r"\1 =", sql),
    "other quotes": lambda sql: sql.replace("'", '"'),
    "unknown column": lambda sql: re.sub("(?i)select", "SELECT no_such_column,", sql, count=1),
    "values as blobs": lambda sql: f"SELECT CAST(1 AS BLOB) FROM ({sql.rstrip('; ')})",
    "integers as floats": lambda sql: f"SELECT x.*, 1.0 FROM ({sql.rstrip('; ')}) AS x",
    "write": lambda sql: f"DELETE FROM sqlite_sequence WHERE 0; {sql}",
}
"""Other texts, many of the same meaning."""


def neighbours(
    sql: str, columns: ColumnNames, changes: Mapping[str, Change] = CHANGES
) -> list[tuple[str, str]]:
    """Return every query that differs from one in one place, with the name of the change, each text
    once; none of what does not parse.
    """
    tree = read_tree(sql, columns)
    if tree is None:
        return []
    holder = exp.Paren(this=tree)  # whose child can be replaced like any other node
    found = {_written(holder.this): ""}
    changes = {**changes, "another column": partial(_other_column, columns=columns)}
    for node in list(holder.this.walk()):
        made = [(name, other) for name, change in changes.items() for other in change(node)]
        for name, other in made:
            node.replace(other)
            found.setdefault(_written(holder.this), name)
            other.replace(node)
    return [(name, text) for text, name in found.items() if name]


def mutants(sql: str, columns: ColumnNames) -> Iterator[tuple[str, str]]:
    """Yield every mutant of a query, each text once, with what was changed."""
    shapes = {name: partial(_showing, change=change) for name, change in SHAPES.items()}
    spelled = ((name, write(sql)) for name, write in SPELLINGS.items())
    seen = {sql}
    for name, text in (*neighbours(sql, columns, {**CHANGES, **shapes}), *spelled):
        if text not in seen:
            seen.add(text)
            yield name, text


def _written(tree: exp.Expression) -> str:
    return tree.sql(dialect="sqlite", normalize_functions=False)
