"""What a database looks like, as its file says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import apsw

from sqlenv.errors import UserError
from sqlenv.executor.database import reading
from sqlenv.types import Row, Value

ColumnKey = tuple[str, str]
Descriptions = Mapping[ColumnKey, str]
"""(table, column), both in lower case -> what the column holds."""

EXAMPLE_CHARACTERS = 40  # OmniSQL cuts example values here
SAMPLED_ROWS = 1_000  # rows of a table that are searched for example values
PROFILED_ROWS = 100_000  # rows of a table among which the most frequent values are counted


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `type` as declared, `span` the smallest and largest value of profiled numbers."""

    name: str
    type: str = ""
    primary_key: bool = False
    description: str = ""
    examples: tuple[Value, ...] = ()
    span: tuple[Value, Value] | None = None


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """Columns of one table that name a row of another."""

    table: str
    columns: tuple[str, ...]
    ref_table: str
    ref_columns: tuple[str, ...]

    @property
    def ends(self) -> set[ColumnKey]:
        """Return the columns at both ends, with their tables."""
        here = {(self.table, column) for column in self.columns}
        return here | {(self.ref_table, column) for column in self.ref_columns}


@dataclass(frozen=True, slots=True)
class TableSchema:
    """One table."""

    name: str
    columns: tuple[Column, ...]

    @property
    def primary_key(self) -> tuple[str, ...]:
        """Name the key's columns."""
        return tuple(column.name for column in self.columns if column.primary_key)


@dataclass(frozen=True, slots=True)
class DatabaseSchema:
    """All tables of a database, in the order they were created."""

    tables: tuple[TableSchema, ...]
    foreign_keys: tuple[ForeignKey, ...] = ()

    def column_names(self) -> Mapping[str, tuple[str, ...]]:
        """Map each table to its columns."""
        return {table.name: tuple(c.name for c in table.columns) for table in self.tables}

    def keys_of(self, table: TableSchema) -> tuple[ForeignKey, ...]:
        """List the foreign keys that a table declares."""
        return tuple(key for key in self.foreign_keys if key.table == table.name)

    def replace_columns(self, function: Callable[[str, Column], Column]) -> DatabaseSchema:
        """Put other columns in the place of the columns, given each one's table."""
        tables = tuple(
            replace(table, columns=tuple(function(table.name, column) for column in table.columns))
            for table in self.tables
        )
        return replace(self, tables=tables)

    def only(self, keep: Collection[ColumnKey]) -> DatabaseSchema:
        """Leave out every other column, tables without columns, and keys that lost one."""
        kept = set(keep)
        tables = []
        for table in self.tables:
            columns = tuple(c for c in table.columns if (table.name, c.name) in kept)
            if columns:
                tables.append(replace(table, columns=columns))
        keys = tuple(key for key in self.foreign_keys if kept.issuperset(key.ends))
        return DatabaseSchema(tuple(tables), keys)


def read_schema(
    database: Path,
    *,
    examples: int = 2,
    profile: bool = False,
    descriptions: Descriptions | None = None,
) -> DatabaseSchema:
    """Read the schema from the SQLite file itself; the same file always gives the same schema.

    `examples` is the number of distinct, non-empty values to show of each column, the first in the
    table; a `profile` of the whole table has the `span` of numbers, else the most frequent values.

    Raises:
        UserError: The file is missing or is not a SQLite database.
    """
    try:
        stat = database.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        read = partial(_read, database.resolve(), stamp, examples=examples, profile=profile)
        try:
            schema = read(replacing=True)
        except UnicodeDecodeError:  # generated columns give functions of ours what is no text
            schema = read(replacing=False)
    except OSError as error:
        raise UserError(f"{database}: cannot be read ({error.strerror})") from error
    except (apsw.Error, UnicodeDecodeError) as error:
        raise UserError(f"{database}: is not a readable SQLite database ({error})") from error
    return _describe(schema, descriptions) if descriptions else schema


@lru_cache(maxsize=32_768)
def _read(
    database: Path, stamp: tuple[int, int], *, examples: int, profile: bool, replacing: bool
) -> DatabaseSchema:
    """Read a file; `stamp` makes a changed file another key of the cache."""
    with reading(database, replacing=replacing) as connection:
        tables = []
        for name in _table_names(connection):
            columns = _columns(connection, name)
            if profile:
                columns = tuple(_profiled(connection, name, c, examples) for c in columns)
            else:
                columns = _with_examples(connection, name, columns, examples)
            tables.append(TableSchema(name, columns))
        return DatabaseSchema(tuple(tables), tuple(_foreign_keys(connection, tables)))


def _table_names(connection: apsw.Connection) -> list[str]:
    rows = _names(
        connection,
        ("m.name",),
        " FROM sqlite_master AS m JOIN pragma_table_list AS l ON l.name = m.name "
        "WHERE l.schema = 'main' AND l.type = 'table' AND m.type = 'table' "
        r"AND m.name NOT LIKE 'sqlite\_%' ESCAPE '\' ORDER BY m.rowid",
    )
    return [str(name) for (name,) in rows if is_utf8(str(name))]


def _columns(connection: apsw.Connection, table: str) -> tuple[Column, ...]:
    rest = ", pk > 0 FROM pragma_table_xinfo(?) WHERE hidden <> 1"
    rows = _names(connection, ("name", "type"), rest, table)
    return tuple(Column(str(name), str(kind), bool(key)) for name, kind, key in rows)


def _names(
    connection: apsw.Connection, texts: Sequence[str], rest: str, *bindings: str
) -> list[Row]:
    """Select names and what follows them; bytes that are not UTF-8 become U+FFFD."""
    try:
        return list(connection.execute(f"SELECT {', '.join(texts)}{rest}", bindings))
    except UnicodeDecodeError:
        casts = ", ".join(f"CAST({text} AS BLOB)" for text in texts)
        rows = connection.execute(f"SELECT {casts}{rest}", bindings)
        return [tuple(_shown(row)) for row in rows]


def is_utf8(name: str) -> bool:
    """Tell whether a name was read as it stands in the database, so that a query can have it."""
    return "\ufffd" not in name


def _foreign_keys(
    connection: apsw.Connection, tables: Iterable[TableSchema]
) -> Iterator[ForeignKey]:
    """List the declared foreign keys; one that names nothing in this database is left out."""
    by_name = {table.name.lower(): table for table in tables}
    for table in by_name.values():
        rest = ", id FROM pragma_foreign_key_list(?) ORDER BY id DESC, seq"
        rows = _names(connection, ('"table"', '"from"', '"to"'), rest, table.name)
        for _, group in groupby(rows, key=itemgetter(3)):
            parents, children, ends, _ = zip(*group, strict=True)
            target = by_name.get(str(parents[0]).lower())
            if target and (columns := _spelled(target, ends)):
                yield ForeignKey(table.name, tuple(map(str, children)), target.name, columns)


def _spelled(target: TableSchema, ends: Sequence[Value]) -> tuple[str, ...]:
    """Spell the columns that a key names as their table does, or nothing where it lacks one.

    A bare REFERENCES means the table's primary key.
    """
    spelling = {column.name.lower(): column.name for column in target.columns}
    named = tuple(spelling.get(str(end).lower(), "") for end in ends if end)
    columns = named or target.primary_key
    return columns if all(columns) and len(columns) == len(ends) else ()


def _with_examples(
    connection: apsw.Connection, table: str, columns: tuple[Column, ...], count: int
) -> tuple[Column, ...]:
    if not count:
        return columns
    # NOT INDEXED: rows come in the table's own order, whatever indexes exist.
    cells = ", ".join(_cell(column.name) for column in columns)
    rows = connection.execute(
        f"SELECT {cells} FROM {quoted(table)} NOT INDEXED LIMIT {SAMPLED_ROWS}"
    )
    found: list[dict[Value, None]] = [{} for _ in columns]
    for row in rows:
        for values, value in zip(found, _shown(row), strict=True):
            if len(values) < count and value is not None and value != "":
                values[value] = None
        if all(len(values) == count for values in found):
            break
    return tuple(replace(c, examples=tuple(v)) for c, v in zip(columns, found, strict=True))


def _profiled(connection: apsw.Connection, table: str, column: Column, count: int) -> Column:
    """Give a column its span when it holds numbers only, else its most frequent values."""
    if not is_utf8(column.name):
        return column
    name, source = quoted(column.name), f"{quoted(table)} NOT INDEXED"
    is_number = f"typeof({name}) IN ('integer', 'real')"
    numbers, values, low, high = next(
        connection.execute(
            f"SELECT total({is_number}), count({name}), min({name}) FILTER (WHERE {is_number}), "
            f"max({name}) FILTER (WHERE {is_number}) FROM {source}"
        )
    )
    if values and numbers == values:
        return replace(column, span=(low, high))
    rows = connection.execute(
        f"SELECT {_cell(column.name)} FROM (SELECT {name} FROM {source} LIMIT {PROFILED_ROWS}) "
        f"WHERE {name} IS NOT NULL AND {name} <> '' AND typeof({name}) <> 'blob' "
        f"GROUP BY {name} ORDER BY count(*) DESC, {name} LIMIT {count}"
    )
    return replace(column, examples=tuple(value for row in rows for value in _shown(row)))


def _cell(column: str) -> str:
    """Read text as bytes, since it may not be UTF-8, and blobs not at all."""
    if not is_utf8(column):
        return "NULL"
    name = quoted(column)
    return (
        f"CASE typeof({name}) WHEN 'blob' THEN NULL WHEN 'text' "
        f"THEN CAST(substr({name}, 1, {EXAMPLE_CHARACTERS}) AS BLOB) ELSE {name} END"
    )


def _shown(row: Row) -> Iterator[Value]:
    return (v.decode(errors="replace") if isinstance(v, bytes) else v for v in row)


def quoted(name: str) -> str:
    """Quote a name as SQL does."""
    return '"' + name.replace('"', '""') + '"'


def _describe(schema: DatabaseSchema, descriptions: Descriptions) -> DatabaseSchema:
    def described(table: str, column: Column) -> Column:
        text = descriptions.get((table.lower(), column.name.lower()), "")
        return replace(column, description=" ".join(text.split()))

    return schema.replace_columns(described)
