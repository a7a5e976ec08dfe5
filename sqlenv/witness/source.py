"""What witnesses are made of: the tables of a database, what they declare, and some rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import apsw

from sqlenv.executor.database import Identity, codec_of, fetch_all, identify, reading
from sqlenv.schema.reading import ForeignKey, read_schema
from sqlenv.sql.lexer import quoted
from sqlenv.types import Row, Value, cut

_SAMPLED = 120  # rows of a table that variants choose from
# Rows of a table in which a repeated row or a NULL is looked for; more would take seconds.
_SCANNED = 20_000
_FEWEST_NUMBERS = 3
_INVENTED = 50  # rows of an empty table
_LONGEST = 2_000  # characters or bytes of a value: no condition looks at more, and photos are large
_FEWEST_ROWS = 100  # of fewer, chance alone may keep the values of a column apart


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table of a database.

    Attributes:
        columns: The stored ones; values of generated columns are SQLite's to compute.
        unique: Sets of columns, by place, that are declared to be different in all rows: keys, and
            the columns of unique indexes. What merely never repeats in the rows is none, except the
            first column of a table that declares none and has a hundred rows or more, and the texts
            after a key where a table has no other columns: they are its names.
        is_distinct: Whether there is no such set, and no row repeats as a whole.
        has_null: By column, whether the rows hold NULL.
        beyond: By column, numbers beyond its own, at which a condition that all rows meet may fail:
            the one above the largest, and 0 where all are above it; none of few, as of flags.
        rows: Some of the rows, from all over the table, the beginnings of long values; of an empty
            one such as its types allow.
    """

    name: str
    columns: tuple[str, ...]
    unique: tuple[tuple[int, ...], ...]
    is_distinct: bool
    has_null: tuple[bool, ...]
    beyond: tuple[tuple[int, ...], ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class SourceDatabase:
    """A database to make variants of.

    Attributes:
        statements: What creates its tables, indexes and views, in the database's own words.
        tables: In the order of their creation; virtual tables are left out.
        keys: Foreign keys as declared, whether the rows keep them or not.
        encoding: Of its texts, as SQLite names it.
    """

    statements: tuple[str, ...]
    tables: tuple[SourceTable, ...]
    keys: tuple[ForeignKey, ...]
    encoding: str

    @property
    def column_names(self) -> Mapping[str, tuple[str, ...]]:
        """Map each table to its columns, in lower case."""
        return {t.name.lower(): tuple(c.lower() for c in t.columns) for t in self.tables}


def read_source(database: Path) -> SourceDatabase:
    """Read what variants of a database are made of; the same file always gives the same.

    Raises:
        UserError: The file is no readable database.
        apsw.Error, UnicodeDecodeError: Its tables hold what cannot be read.
    """
    return _read(identify(database))


@lru_cache(maxsize=64)
def _read(identity: Identity) -> SourceDatabase:
    database = Path(identity[0])
    schema = read_schema(database, examples=0)
    with reading(database) as connection:
        tables = {
            table.name: _table(connection, table.name)
            for table in schema.tables
            if table.kind == "TABLE"
        }
        stored = {(table.name, name) for table in tables.values() for name in table.columns}
        keys = tuple(key for key in schema.foreign_keys if key.ends <= stored)
        statements = tuple(_statements(connection, tables))
        encoding = codec_of(connection)
    return SourceDatabase(statements, tuple(tables.values()), keys, encoding)


def _statements(connection: apsw.Connection, tables: Mapping[str, SourceTable]) -> Iterator[str]:
    """List what creates tables, their indexes, and views; no triggers, no virtual tables."""
    rows = connection.execute(
        "SELECT type, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL "
        "AND type IN ('table', 'index', 'view') ORDER BY type = 'view', rowid"
    )
    yield from (str(sql) for kind, table, sql in rows if kind == "view" or table in tables)


def _table(connection: apsw.Connection, name: str) -> SourceTable:
    found = fetch_all(
        connection, "SELECT name, pk, type FROM pragma_table_xinfo(?) WHERE NOT hidden", name
    )
    keys = {column: place for column, place, _ in found}
    columns = tuple(keys)
    cells = ", ".join(map(quoted, columns))
    counts = ", ".join(f"count({quoted(column)})" for column in columns)
    scanned = f"(SELECT {cells} FROM {quoted(name)} LIMIT {_SCANNED})"
    [(total, *given)] = fetch_all(connection, f"SELECT count(*), {counts} FROM {scanned}")
    unique = tuple(dict.fromkeys(_declared(connection, name, keys)))
    step = max(1, total // _SAMPLED)  # rows at even distances
    rows = connection.execute(f"SELECT {cells} FROM {quoted(name)}")
    chosen = itertools.islice(rows, 0, _SAMPLED * step, step)
    some = tuple(tuple([cut(value, _LONGEST) for value in row]) for row in chosen)

    def repeats(these: str) -> bool:
        distinct = f"SELECT DISTINCT {these} FROM {scanned}"
        return fetch_all(connection, f"SELECT count(*) FROM ({distinct})") != [(total,)]

    if not unique and total >= _FEWEST_ROWS and not repeats(quoted(columns[0])):
        unique = ((0,),)
    are_names = len(columns) == 2 and all(isinstance(row[1], str) for row in some)
    if unique == ((0,),) and are_names and total > 1 and not repeats(quoted(columns[1])):
        unique = ((0,), (1,))
    some = some or tuple(_invented({column: kind.upper() for column, _, kind in found}))
    return SourceTable(
        name,
        columns,
        unique,
        not unique and not repeats(cells),
        tuple(number < total for number in given),
        tuple(_beyond({row[at] for row in some} - {None}) for at in range(len(columns))),
        some,
    )


def _invented(types: Mapping[str, str]) -> Iterator[Row]:
    """Make rows of a table that has none, all values of a column different."""

    def value(name: str, kind: str, number: int) -> Value:
        if "INT" in kind:
            return number
        if "CHAR" in kind or "TEXT" in kind:
            return f"{name} {number}"
        return f"{1970 + number}-01-01" if "DATE" in kind else number + 0.5

    for number in range(1, _INVENTED + 1):
        yield tuple(value(*column, number) for column in types.items())


def _beyond(values: Collection[Value]) -> tuple[int, ...]:
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < len(values) or len(numbers) < _FEWEST_NUMBERS:
        return ()
    if not all(map(math.isfinite, (least := min(numbers), most := max(numbers)))):
        return ()
    return (0, int(most) + 1) if least > 0 else (int(most) + 1,)


def _declared(
    connection: apsw.Connection, name: str, keys: Mapping[str, int]
) -> Iterator[tuple[int, ...]]:
    """List the sets of columns that are declared to be unique, the primary key first."""
    columns = list(keys)
    if primary := tuple(at for at, place in enumerate(keys.values()) if place):
        yield primary
    indexes = 'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial'
    for (index,) in fetch_all(connection, indexes, name):
        found = fetch_all(connection, "SELECT name FROM pragma_index_info(?)", index)
        if all(part in keys for (part,) in found):  # an expression has no name
            yield tuple(sorted(columns.index(part) for (part,) in found))
