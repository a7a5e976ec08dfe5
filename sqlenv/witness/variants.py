"""Variants of a database: few rows, what its schema promises, and everything else new.

A variant takes some rows of each table. Then values of a column change places or repeat; constants
of the gold query, values near them and numbers beyond the column's come in, NULLs where the column
has some; rows name others than they did. A row that breaks a promise (a key, NOT NULL, CHECK) is
left out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import apsw

from sqlenv.executor.functions import clock
from sqlenv.sql.lexer import quoted
from sqlenv.types import Value
from sqlenv.witness.focus import Focus
from sqlenv.witness.source import SourceDatabase, SourceTable

_SIZES = (8, 15, 30, 50)  # of a table that the gold reads
_SIZE = 12  # of any other
_NAMED = (2, 4, 12, 50)  # different rows that the rows of another table name
_NOW = datetime(2025, 1, 1, tzinfo=UTC)  # for gold queries that ask for the time
_SHUFFLED = 0.3  # share of columns, and of those whose values repeat more or less
_REPEATED, _FEW = 0.25, 0.2
_FEW_VALUES = (2, 3, 5)
_WITH_OTHERS = 0.4  # share of columns that get longer texts, or numbers beyond their own
_PAGE_BYTES = 512  # the smallest: a table takes one at least

TableRows = list[list[Value]]
Link = tuple[SourceTable, Sequence[int], SourceTable, Sequence[int]]
"""Columns, by number, whose values are values of another table's columns."""


def make_variant(source: SourceDatabase, focus: Focus, *, seed: int) -> apsw.Connection:
    """Make one variant, in memory, for what a gold query looks at; the same seed makes the same.

    Raises:
        apsw.Error: SQLite here cannot make this schema.
    """
    draw = random.Random(seed)
    tables = {table.name: _rows(table, focus, draw) for table in source.tables}
    declared = list(_declared_links(source))
    for link in (*declared, *_other_links(source, focus)):
        _relink(tables, link, draw)
    for table in source.tables:
        tables[table.name] = _without_repeats(tables[table.name], table)
    while True:
        _close(tables, declared)
        closed = dict(tables)
        connection = _build(source, tables)
        if tables == closed:
            return connection
        connection.close()  # rows that SQLite refuses may be named by others


def _rows(table: SourceTable, focus: Focus, draw: random.Random) -> TableRows:
    name = table.name.lower()
    is_read = name in focus.tables or any(place[0] == name for place in focus.constants)
    size = draw.choice(_SIZES) if is_read else _SIZE
    # Of a table of few rows some go too.
    most = len(table.rows)
    some = draw.sample(table.rows, size if size < most else draw.randint(-(-most // 2), most))
    rows = [list(row) for row in some]
    if not is_read or not rows:
        return rows
    rows += _more(table, rows, size - len(rows), draw)
    keys = {at for part in table.unique for at in part}
    for at, column in enumerate(table.columns):
        place = (name, column.lower())
        constants = focus.constants.get(place, ())
        beyond = [one for one in table.beyond[at] if one or place not in focus.divisors]
        others = (*focus.longer_texts.get(place, ()), *beyond)
        others = others if draw.random() < _WITH_OTHERS else ()
        values = [row[at] for row in rows]
        if (at,) in table.unique:
            if draw.random() < _SHUFFLED:
                values = draw.sample(values, len(values))
            values = _with_each(values, (*constants, *others), draw)
        else:
            # Of a key of several columns each may repeat; rows alike in all of them go later.
            values = values if at in keys else _mixed(values, draw)
            if constants and draw.random() >= 0.2:
                values = _with_share(values, constants, draw.choice((0.15, 0.3, 0.6)), draw)
            values = _with_share(values, others, 0.2, draw) if others else values
            if table.has_null[at] and draw.random() >= 0.6:
                values = _with_share(values, (None,), 0.15, draw)
        for row, value in zip(rows, values, strict=True):
            row[at] = value
    return rows


def _more(table: SourceTable, rows: TableRows, count: int, draw: random.Random) -> TableRows:
    """Make rows where a table has few, with new numbers as keys; none where keys are texts."""
    last: dict[int, int] = {}
    for at in itertools.chain.from_iterable(table.unique):
        numbers = [value for row in table.rows if isinstance(value := row[at], int)]
        if len(numbers) == len(table.rows):
            last[at] = max(numbers)
    if any(last.keys().isdisjoint(part) for part in table.unique):
        return []
    return [
        [last[at] + number if at in last else value for at, value in enumerate(draw.choice(rows))]
        for number in range(1, count + 1)
    ]


def _with_each(values: list[Value], constants: Sequence[Value], draw: random.Random) -> list[Value]:
    """Put constants into a key, once each."""
    for constant in constants:
        if constant not in values and draw.random() < 0.7:
            values[draw.randrange(len(values))] = constant
    return values


def _mixed(values: list[Value], draw: random.Random) -> list[Value]:
    """Let values change places, or repeat, or let few of them repeat often, or leave them."""
    how = draw.random()
    if how < _SHUFFLED:
        return draw.sample(values, len(values))
    if how < _SHUFFLED + _REPEATED:
        return draw.choices(values, k=len(values))
    if how < _SHUFFLED + _REPEATED + _FEW:
        few = draw.sample(values, min(len(values), draw.choice(_FEW_VALUES)))
        return draw.choices(few, k=len(values))
    return values


def _with_share(
    values: list[Value], others: Sequence[Value], share: float, draw: random.Random
) -> list[Value]:
    """Put other values in the place of a share of them."""
    return [draw.choice(others) if draw.random() < share else value for value in values]


def _declared_links(source: SourceDatabase) -> Iterator[Link]:
    by_name = {table.name: table for table in source.tables}
    for key in source.keys:
        child, parent = by_name[key.table], by_name[key.ref_table]
        own = [*map(child.columns.index, key.columns)]
        yield child, own, parent, [*map(parent.columns.index, key.ref_columns)]


def _other_links(source: SourceDatabase, focus: Focus) -> Iterator[Link]:
    """List what a gold query joins without a declared key; what is unique is named by the other."""
    by_name = {table.name.lower(): table for table in source.tables}
    names = source.column_names
    declared = {(key.table.lower(), name.lower()) for key in source.keys for name in key.columns}
    for pair in focus.links:
        if declared.isdisjoint(pair):
            ends = [(by_name[table], names[table].index(column)) for table, column in pair]
            (child, own), (parent, ref) = sorted(ends, key=lambda end: (end[1],) in end[0].unique)
            yield child, [own], parent, [ref]


def _relink(tables: dict[str, TableRows], link: Link, draw: random.Random) -> None:
    """Let rows name other rows: some often, some never."""
    child, own, parent, refs = link
    there = [[row[at] for at in refs] for row in tables[parent.name]]
    if not there or any({*part} <= {*own} for part in child.unique):
        return
    known = {tuple(values) for values in there}
    there = draw.sample(there, min(draw.choice(_NAMED), len(there)))
    share = draw.choice((0.0, 0.3, 0.6, 1.0))
    for row in tables[child.name]:
        values = tuple(row[at] for at in own)
        if None not in values and (values not in known or draw.random() < share):
            for at, value in zip(own, draw.choice(there), strict=True):
                row[at] = value


def _without_repeats(rows: TableRows, table: SourceTable) -> TableRows:
    if table.is_distinct:
        rows = [list(row) for row in dict.fromkeys(map(tuple, rows))]
    for part in table.unique:
        seen: set[tuple[Value, ...]] = set()
        kept = []
        for row in rows:
            values = tuple(row[at] for at in part)
            if None in values or values not in seen:
                seen.add(values)
                kept.append(row)
        rows = kept
    return rows


def _close(tables: dict[str, TableRows], links: Sequence[Link]) -> None:
    """Drop rows that name a row that is not there, until none does."""
    is_closed = False
    while not is_closed:
        is_closed = True
        for child, own, parent, refs in links:
            there = {tuple(row[at] for at in refs) for row in tables[parent.name]}
            named = [(row, tuple(row[at] for at in own)) for row in tables[child.name]]
            kept = [row for row, values in named if None in values or values in there]
            is_closed &= len(kept) == len(named)
            tables[child.name] = kept


def _refuse_chance(*_: Value) -> Value:
    raise apsw.SQLError("chance decides")


def _build(source: SourceDatabase, tables: dict[str, TableRows]) -> apsw.Connection:
    """Make the database of the rows, and leave out of `tables` those that SQLite refuses."""
    connection = apsw.Connection(":memory:", vfs=clock(_NOW).name)
    for name, arguments in (("random", 0), ("randomblob", 1)):
        connection.create_scalar_function(name, _refuse_chance, arguments)
    connection.pragma("page_size", _PAGE_BYTES)
    connection.pragma("encoding", source.encoding)
    # As SQLite is by default, and as schemas and gold queries rely on: "text" is a text.
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 1)
    # No context manager: without memory it would roll back what SQLite has rolled back itself.
    connection.execute("BEGIN")
    for statement in source.statements:
        connection.execute(statement)
    for table in source.tables:
        cells = ", ".join(map(quoted, table.columns))
        marks = ", ".join("?" * len(table.columns))
        insert = f"INSERT OR ABORT INTO {quoted(table.name)} ({cells}) VALUES ({marks})"
        kept = []
        for row in tables[table.name]:
            # What overflows is a key, or a constant, next to the largest integer.
            with suppress(apsw.MismatchError, apsw.ConstraintError, OverflowError):
                connection.execute(insert, row)
                kept.append(row)
        tables[table.name] = kept
    connection.execute("COMMIT")
    return connection
