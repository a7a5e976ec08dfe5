"""What a database looks like, as its file says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import apsw

from minirl.exchange import UserError
from sqlenv.executor.database import Identity, codec_of, fetch_all, identify, reading, with_memory
from sqlenv.sql.lexer import quoted
from sqlenv.types import Row, Value

TableKind = Literal["TABLE", "VIEW"]
ColumnKey = tuple[str, str]
"""A column: its table and its name."""


class Described(NamedTuple):
    """What a data set says of a column: what it holds, and tables.json's type."""

    text: str = ""
    type: str = ""


Descriptions = Mapping[ColumnKey, Described]
"""What a data set says of columns, by `described_key`."""

EXAMPLE_CHARACTERS = 40  # OmniSQL cuts example values here
SAMPLED_ROWS = 1_000  # rows of a table that are searched for example values
PROFILED_ROWS = 100_000  # rows of a table among which the most frequent values are counted


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    `type` is the declared one, `described_type` tables.json's; `primary_key` the place in the key,
    from 1; `span` the smallest and largest value of profiled numbers.
    """

    name: str
    type: str = ""
    primary_key: int = 0
    description: str = ""
    examples: tuple[Value, ...] = ()
    span: tuple[Value, Value] | None = None
    described_type: str = ""


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
    """One table or view."""

    name: str
    columns: tuple[Column, ...]
    kind: TableKind = "TABLE"

    @property
    def primary_key(self) -> tuple[str, ...]:
        """Name the key's columns, in the key's order."""
        key = [column for column in self.columns if column.primary_key]
        return tuple(column.name for column in sorted(key, key=attrgetter("primary_key")))


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
    Views have no values, since they run code from the file, which may never end; virtual tables are
    left out, as from queries.

    Raises:
        UserError: The file is missing or is not a SQLite database.
    """
    try:
        schema = with_memory(partial(_read, identify(database), examples=examples, profile=profile))
    except (apsw.Error, UnicodeDecodeError) as error:
        raise UserError(f"{database}: is not a readable SQLite database ({error})") from error
    return _describe(schema, descriptions) if descriptions else schema


@lru_cache(maxsize=32_768)
def _read(identity: Identity, *, examples: int, profile: bool) -> DatabaseSchema:
    with reading(Path(identity[0])) as connection:
        tables = list(_tables(connection))
        look = _profiled if profile else _with_examples
        shown = []
        for table in tables:
            with suppress(apsw.SQLError):  # of a generated column: then no values are shown
                if table.kind == "TABLE":
                    table = replace(table, columns=look(connection, table, examples))
            shown.append(table)
        return DatabaseSchema(tuple(shown), tuple(_foreign_keys(connection, tables)))


def _tables(connection: apsw.Connection) -> Iterator[TableSchema]:
    """List what queries can read, without values; of a broken view SQLite knows no columns."""
    rows = fetch_all(
        connection,
        "SELECT m.name, upper(l.type) FROM sqlite_master AS m JOIN pragma_table_list AS l "
        "ON l.name = m.name WHERE l.schema = 'main' AND l.type IN ('table', 'view') "
        "AND m.type IN ('table', 'view') "
        r"AND m.name NOT LIKE 'sqlite\_%' ESCAPE '\' ORDER BY m.rowid",
    )
    for name, kind in rows:
        if columns := _columns(connection, name, kind):
            yield TableSchema(name, columns, kind)


def _columns(connection: apsw.Connection, table: str, kind: TableKind) -> tuple[Column, ...]:
    sql = "SELECT name, type, pk FROM pragma_table_xinfo(?) WHERE hidden <> 1"
    try:
        return tuple(Column(*row) for row in fetch_all(connection, sql, table))
    except apsw.SQLError:
        if kind == "TABLE":
            raise
        return ()


def _foreign_keys(
    connection: apsw.Connection, tables: Iterable[TableSchema]
) -> Iterator[ForeignKey]:
    """List the declared foreign keys; one that names nothing in this database is left out."""
    by_name = {table.name.lower(): table for table in tables}
    sql = 'SELECT "table", "from", "to", id FROM pragma_foreign_key_list(?) ORDER BY id DESC, seq'
    for table in by_name.values():
        rows = fetch_all(connection, sql, table.name)
        for _, group in groupby(rows, key=itemgetter(3)):
            parents, children, ends, _ = zip(*group, strict=True)
            target = by_name.get(parents[0].lower())
            if target and (columns := _spelled(target, ends)):
                yield ForeignKey(table.name, children, target.name, columns)


def _spelled(target: TableSchema, ends: Sequence[str | None]) -> tuple[str, ...]:
    """Spell the columns that a key names as their table does, or nothing where it lacks one.

    A bare REFERENCES means the table's primary key.
    """
    spelling = {column.name.lower(): column.name for column in target.columns}
    named = tuple(spelling.get(end.lower(), "") for end in ends if end)
    columns = named or target.primary_key
    return columns if all(columns) and len(columns) == len(ends) else ()


def _with_examples(
    connection: apsw.Connection, table: TableSchema, count: int
) -> tuple[Column, ...]:
    columns = table.columns
    if not count:
        return columns
    # NOT INDEXED: rows come in the table's own order, whatever indexes exist.
    cells = ", ".join(_cell(column.name) for column in columns)
    sql = f"SELECT {cells} FROM {quoted(table.name)} NOT INDEXED LIMIT {SAMPLED_ROWS}"
    found: list[dict[Value, None]] = [{} for _ in columns]
    for row in _shown(connection, sql):
        for values, value in zip(found, row, strict=True):
            if len(values) < count and value is not None and value != "":
                values[value] = None
        if all(len(values) == count for values in found):
            break
    return tuple(replace(c, examples=tuple(v)) for c, v in zip(columns, found, strict=True))


def _profiled(connection: apsw.Connection, table: TableSchema, count: int) -> tuple[Column, ...]:
    """Give columns that hold numbers only their span, others their most frequent values."""
    source, columns = f"{quoted(table.name)} NOT INDEXED", list[Column]()
    for column in table.columns:
        name = quoted(column.name)
        is_number = f"typeof({name}) IN ('integer', 'real')"
        [(numbers, values, low, high)] = fetch_all(
            connection,
            f"SELECT total({is_number}), count({name}), min({name}) FILTER (WHERE {is_number}), "
            f"max({name}) FILTER (WHERE {is_number}) FROM {source}",
        )
        if values and numbers == values:
            columns.append(replace(column, span=(low, high)))
            continue
        rows = _shown(
            connection,
            f"SELECT {_cell(column.name)} FROM (SELECT {name} FROM {source} LIMIT {PROFILED_ROWS}) "
            f"WHERE {name} IS NOT NULL AND {name} <> '' AND typeof({name}) <> 'blob' "
            f"GROUP BY {name} ORDER BY count(*) DESC, {name} LIMIT {count}",
        )
        columns.append(replace(column, examples=tuple(value for (value,) in rows)))
    return tuple(columns)


def _shown(connection: apsw.Connection, sql: str) -> Iterator[Row]:
    """Select `_cell`s; what is no text in their bytes becomes U+FFFD."""
    codec = codec_of(connection)
    for row in connection.execute(sql):
        yield tuple([v.decode(codec, "replace") if isinstance(v, bytes) else v for v in row])


def _cell(column: str) -> str:
    """Read text as bytes, since it may not be UTF-8, and blobs not at all."""
    name = quoted(column)
    return (
        f"CASE typeof({name}) WHEN 'blob' THEN NULL WHEN 'text' "
        f"THEN CAST(substr({name}, 1, {EXAMPLE_CHARACTERS}) AS BLOB) ELSE {name} END"
    )


def described_key(table: str, column: str) -> ColumnKey:
    """Write names as data sets know them: in any case, with any blanks."""
    return " ".join(table.lower().split()), " ".join(column.lower().split())


def _describe(schema: DatabaseSchema, descriptions: Descriptions) -> DatabaseSchema:
    def described(table: str, column: Column) -> Column:
        told = descriptions.get(described_key(table, column.name), Described())
        return replace(column, description=" ".join(told.text.split()), described_type=told.type)

    return schema.replace_columns(described)
