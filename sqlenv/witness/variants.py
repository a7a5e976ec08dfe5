"""Variants of a database: few rows, what its schema and its rows promise, and everything else new.

A variant takes some rows of each table, and then: values of a column change places or repeat,
constants of the gold query and numbers beside them come in, NULLs where the column has some, rows
go whose absence leaves others without a partner. A promise that breaks so (a key, NOT NULL, CHECK)
takes the row away.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import apsw
from sqlglot import exp

from sqlenv.executor.database import reading
from sqlenv.schema.reading import quoted
from sqlenv.types import Row, Value
from sqlenv.witness.neighbours import read_tree, sources, table_of
from sqlenv.witness.source import Source, SourceTable

_SIZES = (4, 8, 15, 30, 50)
_TOUCHED = 12
Constants = Mapping[tuple[str, str], tuple[Value, ...]]
"""Values that a query compares with a column, by table and column in lower case."""


@dataclass(frozen=True, slots=True)
class Focus:
    """What a gold query looks at.

    Attributes:
        tables: Those it names, in lower case.
        columns: Those it names, in lower case, of whatever table.
        constants: What it compares columns with.
        links: Columns that it says to be equal, each with its table, in lower case.
        rows: Rows that it reads for its result, by table.
    """

    tables: frozenset[str]
    columns: frozenset[str]
    constants: Constants
    links: tuple[tuple[tuple[str, str], tuple[str, str]], ...]
    rows: Mapping[str, tuple[Row, ...]]


def focus_of(sql: str, source: Source, database: Path) -> Focus:
    """Find what a query looks at."""
    tree = read_tree(sql, source.column_names)
    if tree is None:
        return Focus(frozenset(), frozenset(), {}, (), {})
    tables = frozenset(table.name.lower() for table in tree.find_all(exp.Table))
    columns = frozenset(column.name.lower() for column in tree.find_all(exp.Column))
    with reading(database) as connection:
        rows = _touched(tree, source, connection)
    return Focus(tables, columns, _constants(tree, source), tuple(_links(tree, source)), rows)


def _links(
    tree: exp.Expression, source: Source
) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Find what joins: columns of two tables that are said to be equal, or IN a query's column."""
    for equal in tree.find_all(exp.EQ):
        if isinstance(equal.this, exp.Column) and isinstance(equal.expression, exp.Column):
            one, two = (_place(side, source) for side in (equal.this, equal.expression))
            if one and two and one[0] != two[0]:
                yield one, two
    for inside in tree.find_all(exp.In):
        query = inside.args.get("query")
        if isinstance(inside.this, exp.Column) and query and isinstance(query.this, exp.Select):
            selected = query.this.selects[0]
            if isinstance(selected, exp.Column):
                one, two = _place(inside.this, source), _place(selected, source)
                if one and two and one[0] != two[0]:
                    yield one, two


def _place(column: exp.Column, source: Source) -> tuple[str, str] | None:
    """Name the table and column that a column of a query means, in lower case."""
    name = column.name.lower()
    having = {t.name.lower() for t in source.tables if name in [c.lower() for c in t.columns]}
    table = table_of(column)
    found = [one for one in ([table] if table else sources(column)) if one in having]
    return (found[0], name) if found else None


def _constants(tree: exp.Expression, source: Source) -> Constants:
    found: dict[tuple[str, str], list[Value]] = {}
    for literal in tree.find_all(exp.Literal):
        place = literal.find_ancestor(
            exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.In, exp.Between, exp.Like, exp.Select
        )
        if place is None or isinstance(place, exp.Select):
            continue
        for column in place.find_all(exp.Column):
            if key := _place(column, source):
                found.setdefault(key, []).extend(_near(literal))
    for key in source.keys:  # what names a row and the row have one value
        for own, ref in zip(key.columns, key.ref_columns, strict=True):
            child, parent = (key.table.lower(), own.lower()), (key.ref_table.lower(), ref.lower())
            both = [*found.get(child, ()), *found.get(parent, ())]
            if both:
                found[child] = found[parent] = both
    fitting = {}
    for table in source.tables:
        for at, column in enumerate(table.columns):
            key = (table.name.lower(), column.lower())
            kinds = {isinstance(row[at], str) for row in table.rows if row[at] is not None}
            values = dict.fromkeys(
                value for value in found.get(key, ()) if isinstance(value, str) in (kinds or {True})
            )
            if values:
                fitting[key] = tuple(values)
    return fitting


def _near(literal: exp.Literal) -> Iterator[Value]:
    text = str(literal.this)
    if literal.is_string:
        if "%" not in text:
            yield text
        return
    number = float(text)
    if number.is_integer():
        yield from (int(number), int(number) - 1, int(number) + 1)
    else:
        yield from (number, number - 0.5, number + 0.5)


def _touched(
    tree: exp.Expression, source: Source, connection: apsw.Connection
) -> Mapping[str, tuple[Row, ...]]:
    """Run the FROM and WHERE of each SELECT, and keep the rows of its tables."""
    by_name = {table.name.lower(): table for table in source.tables}
    found: dict[str, dict[Row, None]] = {}
    for select in tree.find_all(exp.Select):
        origin = select.args.get("from_") or select.args.get("from")
        if origin is None:
            continue
        parts = [origin.this, *(join.this for join in select.args.get("joins") or ())]
        tables = [by_name.get(part.name.lower()) for part in parts if isinstance(part, exp.Table)]
        if len(tables) < len(parts) or None in tables:
            continue
        cells = [
            f"{quoted(part.alias_or_name)}.{quoted(column)}"
            for part, table in zip(parts, tables, strict=True)
            for column in table.columns
        ]
        core = select.copy()
        for name in ("distinct", "group", "having", "order", "limit", "offset", "windows", "with", "with_"):
            core.args.pop(name, None)
        core.set("expressions", [exp.Star()])
        text = core.sql(dialect="sqlite").replace("SELECT *", f"SELECT {', '.join(cells)}", 1)
        try:
            rows = list(connection.execute(f"{text} LIMIT {_TOUCHED}"))
        except apsw.Error:
            continue
        for row in rows:
            at = 0
            for table in tables:
                width = len(table.columns)
                found.setdefault(table.name, {})[row[at : at + width]] = None
                at += width
    return {name: tuple(rows) for name, rows in found.items()}


def make_variant(
    source: Source, focus: Focus, *, seed: int, breaks_uniqueness: bool = False
) -> apsw.Connection:
    """Make one variant, in memory; the same seed makes the same.

    Raises:
        apsw.Error: SQLite here cannot make this schema, such as one of a missing module.
    """
    draw = random.Random(seed)
    if not breaks_uniqueness:
        source = replace(source, tables=tuple(map(_strict, source.tables)))
    tables = {
        table.name: _rows(table, focus, draw)
        for table in source.tables
    }
    _mix_keys(source, focus, tables, draw)
    _close(source, tables)
    return _build(source, tables)


def _strict(table: SourceTable) -> SourceTable:
    """Forbid what the rows never repeat, as if it were declared."""
    unique = {*table.unique, *((at,) for at in table.distinct)}
    smallest = [part for part in unique if not any(set(other) < set(part) for other in unique)]
    return replace(table, unique=tuple(sorted(smallest)))


def _rows(table: SourceTable, focus: Focus, draw: random.Random) -> list[list[Value]]:
    is_read = table.name.lower() in focus.tables
    size = draw.choice(_SIZES) if is_read else 12
    touched = list(focus.rows.get(table.name, ()))
    draw.shuffle(touched)
    touched = touched[: draw.randint(0, len(touched))] if touched else []
    others = draw.sample(table.rows, min(size, len(table.rows)))
    rows = [list(row) for row in dict.fromkeys((*touched, *others))]
    if not is_read or not rows:
        return rows
    rows += _more(table, rows, size - len(rows), draw)
    alone = {at for part in table.unique for at in part}
    for at, column in enumerate(table.columns):
        key = (table.name.lower(), column.lower())
        if at in alone:
            for value in focus.constants.get(key, ()):
                if value not in [row[at] for row in rows] and draw.random() < 0.5:
                    draw.choice(rows)[at] = value
            continue
        how = draw.random()
        is_named = column.lower() in focus.columns
        values = [row[at] for row in rows]
        if how < 0.35:
            draw.shuffle(values)
        elif how < 0.6:
            values = [draw.choice(values) for _ in values]
        elif how < 0.75 and is_named:  # few distinct values: groups, ties
            few = draw.sample(values, min(3, len(values)))
            values = [draw.choice(few) for _ in values]
        if (constants := focus.constants.get(key)) and draw.random() < 0.8:
            share = draw.choice((0.15, 0.3, 0.6))
            values = [draw.choice(constants) if draw.random() < share else v for v in values]
        if table.has_null[at] and draw.random() < 0.4:
            values = [None if draw.random() < 0.15 else v for v in values]
        for row, value in zip(rows, values, strict=True):
            row[at] = value
    return rows


def _more(
    table: SourceTable, rows: list[list[Value]], count: int, draw: random.Random
) -> list[list[Value]]:
    """Make rows where a table has few, with numbers of their own as keys."""
    keys = []
    for part in table.unique:
        numbers = [at for at in part if all(isinstance(row[at], int) for row in table.rows)]
        if not numbers:
            return []
        keys.append(numbers[-1])
    last = {at: max(row[at] for row in table.rows) for at in keys}
    made = []
    for number in range(max(count, 0)):
        row = list(draw.choice(rows))
        for at in keys:
            row[at] = last[at] + 1 + number
        made.append(row)
    return made


def _mix_keys(
    source: Source, focus: Focus, tables: dict[str, list[list[Value]]], draw: random.Random
) -> None:
    """Let rows name other rows: some often, some never."""
    by_name = {table.name: table for table in source.tables}
    for key in source.keys:
        child, parent = by_name[key.table], by_name[key.ref_table]
        own = [child.columns.index(column) for column in key.columns]
        refs = [parent.columns.index(column) for column in key.ref_columns]
        if any(set(part) <= set(own) for part in child.unique):
            continue
        _relink(tables[child.name], own, tables[parent.name], refs, draw)
    lower = {table.name.lower(): table for table in source.tables}
    declared = {
        (key.table.lower(), column.lower()) for key in source.keys for column in key.columns
    }
    for one, two in focus.links:
        if one in declared or two in declared:
            continue
        ends = []
        for name, column in (one, two):
            names = [c.lower() for c in lower[name].columns]
            ends.append((lower[name], names.index(column)))
        ends.sort(key=lambda end: (end[1],) in end[0].unique)
        (child, own), (parent, ref) = ends
        if (own,) not in child.unique:
            _relink(tables[child.name], [own], tables[parent.name], [ref], draw)


def _relink(
    rows: list[list[Value]],
    own: Sequence[int],
    parents: list[list[Value]],
    refs: Sequence[int],
    draw: random.Random,
) -> None:
    there = [[row[at] for at in refs] for row in parents]
    known = {tuple(one) for one in there}
    if not there:
        return
    few = draw.choice((2, 4, 12, len(there)))
    there = draw.sample(there, min(few, len(there)))
    share = draw.choice((0.0, 0.3, 0.6, 1.0))
    for row in rows:
        value = tuple(row[at] for at in own)
        if None not in value and (value not in known or draw.random() < share):
            for at, new in zip(own, draw.choice(there), strict=True):
                row[at] = new


def _close(source: Source, tables: dict[str, list[list[Value]]]) -> None:
    """Drop rows that repeat a key or name a row that is not there, until none does."""
    by_name = {table.name: table for table in source.tables}
    for table in source.tables:
        for part in table.unique:
            seen: set[Row] = set()
            kept = []
            for row in tables[table.name]:
                value = tuple(row[at] for at in part)
                if None in value or value not in seen:
                    seen.add(value)
                    kept.append(row)
            tables[table.name] = kept
    is_open = True
    while is_open:
        is_open = False
        for key in source.keys:
            child, parent = by_name[key.table], by_name[key.ref_table]
            own = [child.columns.index(column) for column in key.columns]
            refs = [parent.columns.index(column) for column in key.ref_columns]
            there = {tuple(row[at] for at in refs) for row in tables[parent.name]}
            kept = [
                row
                for row in tables[child.name]
                if None in (value := tuple(row[at] for at in own)) or value in there
            ]
            is_open |= len(kept) < len(tables[child.name])
            tables[child.name] = kept


def _build(source: Source, tables: Mapping[str, Sequence[Sequence[Value]]]) -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    connection.pragma("encoding", source.encoding)
    connection.pragma("foreign_keys", 0)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 1)
    with connection:
        for statement in source.statements:
            connection.execute(statement)
        for table in source.tables:
            cells = ", ".join(map(quoted, table.columns))
            marks = ", ".join("?" * len(table.columns))
            insert = f"INSERT OR IGNORE INTO {quoted(table.name)} ({cells}) VALUES ({marks})"
            connection.executemany(insert, tables[table.name])
    return connection
