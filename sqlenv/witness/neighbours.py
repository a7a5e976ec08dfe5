"""Queries near another one that mean something else: every way to change one part of it.

A query that is right by luck is most often such a neighbour: it forgets a condition, takes another
aggregate or column. The idea is that of Zhong, Yu and Klein (EMNLP 2020, "Semantic Evaluation for
Text-to-SQL with Distilled Test Suites").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sqlglot import exp

from sqlenv.sql.extraction import parse

Columns = Mapping[str, tuple[str, ...]]
"""Each table's columns, both in lower case."""


class Neighbour(NamedTuple):
    """A changed query, and the name of the change."""

    change: str
    sql: str


_TAKEN_FOR: Mapping[type[exp.Expression], tuple[type[exp.Expression], ...]] = {
    exp.EQ: (exp.NEQ, exp.LTE, exp.GTE),
    exp.NEQ: (exp.EQ,),
    exp.LT: (exp.LTE, exp.GT, exp.EQ),
    exp.LTE: (exp.LT, exp.GTE, exp.EQ),
    exp.GT: (exp.GTE, exp.LT, exp.EQ),
    exp.GTE: (exp.GT, exp.LTE, exp.EQ),
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
_CLAUSES = ("where", "group", "having", "order", "limit", "distinct")
_CONDITIONS = (exp.In, exp.Like, exp.Between, exp.Is, exp.Exists)
_MOST_COLUMNS = 4  # of a table, that stand in for one
_MOST_KEYS = 2


def _another_kind(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    is_join = isinstance(node, exp.EQ) and isinstance(node.this, exp.Column)
    if is_join and isinstance(node.expression, exp.Column):
        return
    for kind in _TAKEN_FOR[type(node)]:
        yield kind(**{name: _copied(value) for name, value in node.args.items()})


def _one_side(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    yield node.this.copy()
    yield node.expression.copy()


def _inside(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    if isinstance(node.this, exp.Expression) and not isinstance(node.this, exp.Star):
        yield node.this.copy()


def _negated(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    if not isinstance(node.parent, exp.Not):
        yield exp.Not(this=node.copy())


def _without_clauses(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    for name in _CLAUSES:
        if node.args.get(name):
            yield _changed(node, name, None)
    if not node.args.get("distinct"):
        yield _changed(node, "distinct", exp.Distinct())
    for at in range(len(node.args.get("joins") or ())):
        other = node.copy()
        del other.args["joins"][at]
        yield other


def _other_grouping(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    """Group by one key less."""
    keys = node.expressions
    if len(keys) > 1:
        for at in range(len(keys)):
            yield _changed(node, "expressions", [k.copy() for k in keys[:at] + keys[at + 1 :]])


def _other_join(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    if node.args.get("on"):
        yield _changed(node, "on", None)
        if not node.args.get("side"):
            yield _changed(node, "side", "LEFT")
        else:
            yield _changed(node, "side", None)


def _other_count(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    inside = node.this
    if isinstance(inside, exp.Distinct) and len(inside.expressions) == 1:
        yield exp.Count(this=inside.expressions[0].copy())
    elif isinstance(inside, exp.Column):
        yield exp.Count(this=exp.Distinct(expressions=[inside.copy()]))
        yield exp.Count(this=exp.Star())
        yield exp.Sum(this=inside.copy())


def _distinct_inside(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    if isinstance(node.this, exp.Column):
        yield type(node)(this=exp.Distinct(expressions=[node.this.copy()]))


def _by_key(node: exp.Expression, columns: Columns) -> Iterator[exp.Expression]:
    """Intersect or subtract rows by another column of theirs, and show the column of those left."""
    left, right = node.this, node.expression
    if not (_is_plain(left) and _is_plain(right)):
        return
    shown, other = left.selects[0], right.selects[0]
    own = _own_table(shown, columns)
    if own is None or own != _own_table(other, columns) or shown.name.lower() != other.name.lower():
        return
    is_except = isinstance(node, exp.Except)
    for key in [name for name in columns[own] if name != shown.name.lower()][:_MOST_KEYS]:
        sides = []
        for side in (left, right):
            keyed = side.copy()
            keyed.selects[0].set("this", exp.to_identifier(key, quoted=True))
            sides.append(exp.In(this=exp.column(key, quoted=True), query=exp.Subquery(this=keyed)))
        if is_except:
            sides[1] = exp.Not(this=sides[1])
        yield (
            exp.select(exp.column(shown.name, quoted=True))
            .from_(exp.to_table(exp.to_identifier(own, quoted=True).sql()))
            .where(exp.and_(*sides))
        )


def _is_plain(node: exp.Expression) -> bool:
    """Say whether a query selects one column and nothing else."""
    is_select = isinstance(node, exp.Select) and len(node.selects) == 1
    return is_select and isinstance(node.selects[0], exp.Column)


def _other_keys(node: exp.Expression, columns: Columns) -> Iterator[exp.Expression]:
    """Ask whether another column of both tables' rows is among them."""
    query = node.args.get("query")
    inside = query.this if query is not None else None
    if not isinstance(node.this, exp.Column) or inside is None or not _is_plain(inside):
        return
    own, other = _own_table(node.this, columns), _own_table(inside.selects[0], columns)
    for key in columns.get(own or "", ()):
        if own == other and key != node.this.name.lower():
            changed = node.copy()
            changed.this.set("this", exp.to_identifier(key, quoted=True))
            changed.args["query"].this.selects[0].set("this", exp.to_identifier(key, quoted=True))
            yield changed


def _own_table(column: exp.Expression, columns: Columns) -> str | None:
    name = column.name.lower()
    found = [one for one in ([table_of(column)] if table_of(column) else sources(column))]
    return next((one for one in found if name in columns.get(one, ())), None)


def _shown_keys(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    """Group by a column that is shown in place of the key."""
    select = node.parent
    if isinstance(select, exp.Select):
        for shown in select.selects:
            if isinstance(shown, exp.Column) and shown not in node.expressions:
                yield exp.Group(expressions=[shown.copy()])


def _other_order(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
    is_down = bool(node.args.get("desc"))
    # SQLite's own place of NULLs, so that none is written out.
    yield exp.Ordered(this=node.this.copy(), desc=not is_down, nulls_first=is_down)


def _other_literal(node: exp.Expression, _columns: Columns) -> Iterator[exp.Expression]:
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


def _other_column(node: exp.Expression, columns: Columns) -> Iterator[exp.Expression]:
    """Take other columns of the column's own table, the nearest first."""
    name = node.name.lower()
    table = table_of(node)
    tables = [table] if table else [one for one in sources(node) if name in columns.get(one, ())]
    for own in tables[:1]:
        names = columns.get(own, ())
        if name not in names:
            continue
        at = names.index(name)
        others = sorted((other for other in names if other != name), key=lambda o: abs(names.index(o) - at))
        for other in others[:_MOST_COLUMNS]:
            yield exp.column(exp.to_identifier(other, quoted=True), table=node.args.get("table") and node.args["table"].copy())


def sources(node: exp.Expression) -> Iterator[str]:
    """Name the tables that the query around a node reads, from the inside out."""
    scope = node.find_ancestor(exp.Select)
    while scope is not None:
        for table in scope.find_all(exp.Table):
            yield table.name.lower()
        scope = scope.find_ancestor(exp.Select)


def table_of(node: exp.Expression) -> str:
    """Name the table that a column's qualifier means; empty without one."""
    alias = node.text("table").lower()
    scope = node.find_ancestor(exp.Select)
    while alias and scope is not None:
        for table in scope.find_all(exp.Table):
            if alias in (table.alias.lower(), table.name.lower()):
                return table.name.lower()
        scope = scope.find_ancestor(exp.Select)
    return ""


def _changed(node: exp.Expression, name: str, value: Any) -> exp.Expression:
    other = node.copy()
    other.set(name, value)
    return other


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, exp.Expression) else value


_CHANGES: tuple[
    tuple[str, tuple[type[exp.Expression], ...], Callable[..., Iterator[exp.Expression]]], ...
] = (
    ("another operator", tuple(_TAKEN_FOR), _another_kind),
    ("one side alone", (exp.And, exp.Or, exp.Union, exp.Intersect, exp.Except), _one_side),
    ("function dropped", (exp.Max, exp.Min, exp.Avg, exp.Sum, exp.Not, exp.Abs, exp.Lower), _inside),
    ("condition negated", _CONDITIONS, _negated),
    ("clause dropped or DISTINCT added", (exp.Select,), _without_clauses),
    ("other keys", (exp.Intersect, exp.Except), _by_key),
    ("other keys", (exp.In,), _other_keys),
    ("another group", (exp.Group,), _shown_keys),
    ("key of a group dropped", (exp.Group, exp.Order), _other_grouping),
    ("join changed", (exp.Join,), _other_join),
    ("count of something else", (exp.Count,), _other_count),
    ("DISTINCT inside", (exp.Sum, exp.Avg), _distinct_inside),
    ("order turned", (exp.Ordered,), _other_order),
    ("another constant", (exp.Literal,), _other_literal),
    ("another column", (exp.Column,), _other_column),
)


def neighbours(sql: str, columns: Columns) -> list[Neighbour]:
    """Return every neighbour of a query, each text once; none of what does not parse."""
    tree = read_tree(sql, columns)
    if tree is None:
        return []
    holder = exp.Paren(this=tree)  # whose child can be replaced like any other node
    found = {_written(holder.this): ""}
    for node in list(holder.this.walk()):
        for name, kinds, change in _CHANGES:
            if not isinstance(node, kinds):
                continue
            for other in list(change(node, columns)):
                node.replace(other)
                found.setdefault(_written(holder.this), name)
                other.replace(node)
    return [Neighbour(name, text) for text, name in found.items() if name]


def read_tree(sql: str, columns: Columns) -> exp.Expression | None:
    """Parse a query; a name in double quotes that is no column's is text, as SQLite takes it."""
    tree = parse(sql)
    if tree is None:
        return None
    tree = tree.copy()
    known = {name for names in columns.values() for name in names}
    known |= {alias.alias.lower() for alias in tree.find_all(exp.Alias)}
    for column in list(tree.find_all(exp.Column)):
        if column.this.args.get("quoted") and not column.table and column.name.lower() not in known:
            column.replace(exp.Literal.string(column.name))
    return tree


def _written(tree: exp.Expression) -> str:
    return tree.sql(dialect="sqlite", normalize_functions=False)
