"""What a gold query looks at: the tables, values and links that witnesses have to have."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from sqlenv.schema.reading import ColumnKey
from sqlenv.sql.extraction import parse_copy, sources
from sqlenv.types import Value
from sqlenv.witness.source import SourceDatabase

ColumnNames = Mapping[str, tuple[str, ...]]
"""Each table's columns, both in lower case."""
_CODE = 3  # characters of a code at most
_COMPARISONS = (
    *(exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE),
    *(exp.In, exp.Between, exp.Like),
)


@dataclass(frozen=True, slots=True)
class Focus:
    """What a gold query looks at.

    Attributes:
        tables: Those it names. All names here are in lower case.
        constants: What it compares columns with, and the next numbers.
        longer_texts: Texts that contain one of its constants.
        links: Pairs of columns that it says to be equal.
        divisors: Columns that it divides by, to which no 0 is added.
        without_each: The query without each of its conditions, with TRUE in the place of one.
    """

    tables: frozenset[str]
    constants: Mapping[ColumnKey, tuple[Value, ...]]
    longer_texts: Mapping[ColumnKey, tuple[str, ...]]
    links: tuple[tuple[ColumnKey, ColumnKey], ...]
    divisors: frozenset[ColumnKey]
    without_each: tuple[str, ...]


def focus_of(sql: str, source: SourceDatabase) -> Focus | None:
    """Find what a query looks at; None for what cannot be parsed."""
    columns = source.column_names
    tree = read_tree(sql, columns)
    if tree is None:
        return None
    constants = _constants(tree, source)
    values = {
        (table.name.lower(), column.lower()): {row[at] for row in table.rows} - {None}
        for table in source.tables
        for at, column in enumerate(table.columns)
    }
    fitting = {place: _fitting(found, values[place]) for place, found in constants.items()}
    return Focus(
        tables=frozenset(relation.table for relation in sources(sql)),
        constants=fitting,
        longer_texts={
            place: tuple(_containing(found, values[place])) for place, found in fitting.items()
        },
        links=tuple(_links(tree, columns)),
        divisors=frozenset(
            place
            for division in tree.find_all(exp.Div)
            for column in division.expression.find_all(exp.Column)
            if (place := column_key(column, columns))
        ),
        without_each=tuple(_without_each(tree)),
    )


def _constants(tree: exp.Expression, source: SourceDatabase) -> Mapping[ColumnKey, list[Value]]:
    """Find what columns are compared with; what names a row and the row itself have one value."""
    columns = source.column_names
    found: dict[ColumnKey, list[Value]] = {}
    for literal in tree.find_all(exp.Literal):
        comparison = literal.find_ancestor(*_COMPARISONS, exp.Select)
        if isinstance(comparison, _COMPARISONS):
            for column in comparison.find_all(exp.Column):
                # A text beside a function, such as a year, is none of the column's.
                is_meant = not literal.is_string or literal.parent is column.parent
                if is_meant and (place := column_key(column, columns)):
                    found.setdefault(place, []).extend(_near(literal))
    for key in source.keys:
        for own, ref in zip(key.columns, key.ref_columns, strict=True):
            child, parent = (key.table.lower(), own.lower()), (key.ref_table.lower(), ref.lower())
            if both := [*found.get(child, ()), *found.get(parent, ())]:
                found[child] = found[parent] = both
    return found


def _near(literal: exp.Literal) -> Iterator[Value]:
    """Return a constant, and the numbers on both sides of one."""
    text = str(literal.this)
    if literal.is_string:
        yield text.strip("%")
        return
    number = int(text) if text.isdigit() else float(text)
    number = -number if isinstance(literal.parent, exp.Neg) else number
    if math.isinf(number):
        return
    number = int(number) if number == int(number) else number
    yield from (number, math.ceil(number) - 1, math.floor(number) + 1)


def _fitting(constants: Sequence[Value], values: Collection[Value]) -> tuple[Value, ...]:
    """Leave out what is of another type than all of a column's values, what begins as a date or a
    code but is longer or shorter than all of them, and any third value for a 0/1 column.
    """
    forms = set(map(_form, values))
    return tuple(
        value
        for value in dict.fromkeys(constants)
        if _form(value) in forms or (isinstance(value, int) and float in forms)
        if values != {0, 1} or value in values
    )


def _containing(constants: Sequence[Value], values: Collection[Value]) -> Iterator[str]:
    """Write a word of the column before and after each text; none of a code, which is short or in a
    column of texts of one length.
    """
    texts = sorted(value for value in values if isinstance(value, str))
    if len({len(text) for text in texts}) == 1:
        return
    words = [word for text in texts for word in text.split()]
    for constant in constants:
        if isinstance(constant, str) and len(constant) > _CODE and not constant[:1].isdigit():
            word = next((word for word in words if word.lower() not in constant.lower()), "x")
            yield from (f"{word} {constant}", f"{constant} {word}")


def _form(value: Value) -> object:
    is_dated = isinstance(value, str) and value[:1].isdigit()
    return len(value) if is_dated else type(value)


def _links(tree: exp.Expression, columns: ColumnNames) -> Iterator[tuple[ColumnKey, ColumnKey]]:
    """Find columns of two tables that are said to be equal, or to be IN the other's."""
    for node in tree.find_all(exp.EQ, exp.In):
        other = node.args.get("expression")
        if (query := node.args.get("query")) and isinstance(query.this, exp.Select):
            other = next(iter(query.this.selects), None)
        if isinstance(node.this, exp.Column) and isinstance(other, exp.Column):
            one, two = column_key(node.this, columns), column_key(other, columns)
            if one and two and one[0] != two[0]:
                yield one, two


def _without_each(tree: exp.Expression) -> Iterator[str]:
    for condition in list(tree.find_all(*_COMPARISONS)):
        condition.replace(always := exp.true())
        yield tree.sql(dialect="sqlite", normalize_functions=False)
        always.replace(condition)


def read_tree(sql: str, columns: ColumnNames) -> exp.Expression | None:
    """Parse a query, into a tree of the caller's own; None for what `parse` does not read.

    A name in double quotes that is no column's is text, as SQLite takes it.
    """
    tree = parse_copy(sql)
    if tree is None:
        return None
    known = {name for names in columns.values() for name in names}
    known |= {alias.alias.lower() for alias in tree.find_all(exp.Alias)}
    for column in list(tree.find_all(exp.Column)):
        is_quoted = column.this.args.get("quoted") and not column.table
        if is_quoted and column.name.lower() not in known:
            column.replace(exp.Literal.string(column.name))
    return tree


def column_key(column: exp.Column, columns: ColumnNames) -> ColumnKey | None:
    """Find the column that a query means, in its own FROM clause or in one around it: its names in
    lower case, or None.
    """
    name, alias = column.name.lower(), column.text("table").lower()
    select = column.find_ancestor(exp.Select)
    while select is not None:
        for table in select.find_all(exp.Table):
            own = table.name.lower()
            is_there = name in columns.get(own, ())
            if alias in (table.alias.lower(), own) if alias else is_there:
                return (own, name) if is_there else None
        select = select.find_ancestor(exp.Select)
    return None
