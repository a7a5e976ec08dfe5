"""What a gold query looks at: the rows, columns and values that witnesses have to have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import apsw
from sqlglot import exp

from sqlenv.executor.database import reading
from sqlenv.schema.reading import ColumnKey
from sqlenv.types import Row, Value
from sqlenv.witness.columns import ColumnNames, column_key, read_tree
from sqlenv.witness.source import SourceDatabase, SourceTable

_ROWS = 12  # rows of its result, before it groups, that a query is asked for
_STEPS = 10_000_000  # half a second: a product of tables may have no such row
_COMPARISONS = (
    *(exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE),
    *(exp.In, exp.Between, exp.Like),
)
_NOT_CORE = ("distinct", "group", "having", "order", "limit", "offset", "windows")


@dataclass(frozen=True, slots=True)
class Focus:
    """What a gold query looks at.

    Attributes:
        tables: Those it names. All names here are in lower case.
        constants: What it compares columns with, and numbers beside them.
        links: Pairs of columns that it says to be equal.
        rows: Rows that it reads for its result, by table.
    """

    tables: frozenset[str]
    constants: Mapping[ColumnKey, tuple[Value, ...]]
    links: tuple[tuple[ColumnKey, ColumnKey], ...]
    rows: Mapping[str, tuple[Row, ...]]


def focus_of(sql: str, source: SourceDatabase, database: Path) -> Focus | None:
    """Find what a query looks at; None for what cannot be parsed."""
    columns = source.column_names
    tree = read_tree(sql, columns)
    if tree is None:
        return None
    with reading(database) as connection:
        rows = _rows(tree, source, connection)
    return Focus(
        tables=frozenset(table.name.lower() for table in tree.find_all(exp.Table)),
        constants=dict(_fitting(source, _constants(tree, source))),
        links=tuple(_links(tree, columns)),
        rows=rows,
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
        if "%" not in text:
            yield text
        return
    number = int(text) if text.isdigit() else float(text)
    number = -number if isinstance(literal.parent, exp.Neg) else number
    if math.isinf(number):
        return
    if number == int(number):
        yield from (int(number), int(number) - 1, int(number) + 1)
    else:
        yield from (number, math.floor(number), math.ceil(number))


def _fitting(
    source: SourceDatabase, constants: Mapping[ColumnKey, list[Value]]
) -> Iterator[tuple[ColumnKey, tuple[Value, ...]]]:
    """Leave out what is of another type than all of a column's values, what begins as a date or a
    code but is longer or shorter than all of them, and third values of what is 0 or 1.
    """
    for table in source.tables:
        for at, column in enumerate(table.columns):
            place = (table.name.lower(), column.lower())
            if place not in constants:
                continue
            there = {row[at] for row in table.rows} - {None}
            known = set(map(_form, there))
            values = [
                value
                for value in dict.fromkeys(constants[place])
                if _form(value) in known or (isinstance(value, int) and float in known)
                if there != {0, 1} or value in there
            ]
            if values:
                yield place, tuple(values)


def _form(value: Value) -> object:
    is_dated = isinstance(value, str) and value[:1].isdigit()
    return len(value) if is_dated else type(value)


def _links(tree: exp.Expression, columns: ColumnNames) -> Iterator[tuple[ColumnKey, ColumnKey]]:
    """Find columns of two tables that are said to be equal, or to be IN the other's."""
    for node in tree.find_all(exp.EQ, exp.In):
        other = node.args.get("expression")
        if (query := node.args.get("query")) and isinstance(query.this, exp.Select):
            other = query.this.selects[0]
        if isinstance(node.this, exp.Column) and isinstance(other, exp.Column):
            one, two = column_key(node.this, columns), column_key(other, columns)
            if one and two and one[0] != two[0]:
                yield one, two


def _rows(
    tree: exp.Expression, source: SourceDatabase, connection: apsw.Connection
) -> Mapping[str, tuple[Row, ...]]:
    """Run FROM and WHERE of each SELECT, and keep the rows of its tables."""
    by_name = {table.name.lower(): table for table in source.tables}
    found: dict[str, dict[Row, None]] = {}
    for select in tree.find_all(exp.Select):
        origin = select.args.get("from_")
        parts = [origin, *(select.args.get("joins") or ())] if origin else []
        named = [(p.this.alias_or_name, by_name.get(p.this.name.lower())) for p in parts]
        read = [(alias, table) for alias, table in named if table is not None]
        if read and len(read) == len(parts):
            for row in _core_rows(select, read, connection):
                at = 0
                for _, table in read:
                    width = len(table.columns)
                    part = row[at : at + width]
                    at += width
                    if any(value is not None for value in part):  # else of a LEFT JOIN
                        found.setdefault(table.name, {})[part] = None
    return {name: tuple(rows) for name, rows in found.items()}


def _core_rows(
    select: exp.Select, read: list[tuple[str, SourceTable]], connection: apsw.Connection
) -> list[Row]:
    """Return the joined rows that a SELECT keeps; none of one that needs the query around it."""
    cells = [
        exp.column(exp.to_identifier(column, quoted=True), table=exp.to_identifier(alias))
        for alias, table in read
        for column in table.columns
    ]
    core = select.copy()
    for name in _NOT_CORE:
        core.set(name, None)
    core.set("expressions", cells)
    connection.set_progress_handler(lambda: True, _STEPS)
    try:
        return list(connection.execute(f"{core.sql(dialect='sqlite')} LIMIT {_ROWS}"))
    except apsw.Error:
        return []
