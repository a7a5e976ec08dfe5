"""What witnesses are made of: the tables of a database, some of their rows, and what holds there."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import apsw

from sqlenv.executor.database import Identity, identify, reading
from sqlenv.schema.reading import ForeignKey, quoted, read_schema
from sqlenv.types import Row

SAMPLED = 120
"""Rows of a table that variants choose from."""
_SCANNED = 200_000
"""Rows of a table in which a repeated value or a NULL is looked for; more would take seconds."""


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table of a database, and what its rows show.

    Attributes:
        columns: The stored ones; values of generated columns are SQLite's to compute.
        unique: Sets of columns, by place, that no two rows may share.
        distinct: Columns, by place, of which no two rows share a value, whatever is declared.
        has_null: By column, whether the rows hold NULL.
        is_text: By column, whether its values are text.
        rows: Some of the rows, those of parents of others among them.
    """

    name: str
    columns: tuple[str, ...]
    unique: tuple[tuple[int, ...], ...]
    distinct: tuple[int, ...]
    has_null: tuple[bool, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A database to make variants of.

    Attributes:
        statements: What creates its tables, indexes and views, in the database's own words.
        tables: In the order of their creation.
        keys: Foreign keys as declared, kept or not.
    """

    statements: tuple[str, ...]
    tables: tuple[SourceTable, ...]
    keys: tuple[ForeignKey, ...]
    encoding: str

    @property
    def column_names(self) -> Mapping[str, tuple[str, ...]]:
        """Map each table to its columns, in lower case."""
        return {t.name.lower(): tuple(c.lower() for c in t.columns) for t in self.tables}


@lru_cache(maxsize=64)
def _facts(identity: Identity) -> Source:
    return _read(Path(identity[0]))


def read_source(database: Path) -> Source:
    """Read what variants of a database are made of; the same file always gives the same.

    Raises:
        UserError: The file is no readable database.
    """
    return _facts(identify(database))


def _read(database: Path) -> Source:
    schema = read_schema(database, examples=0)
    with reading(database) as connection:
        statements = tuple(
            sql
            for (sql,) in connection.execute(
                "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'trigger' "
                r"AND name NOT LIKE 'sqlite\_%' ESCAPE '\' ORDER BY type = 'view', rowid"
            )
        )
        tables = [
            _table(connection, table.name) for table in schema.tables if table.kind == "TABLE"
        ]
        named = {table.name for table in tables}
        keys = tuple(key for key in schema.foreign_keys if {key.table, key.ref_table} <= named)
        encoding = str(connection.pragma("encoding"))
        by_name = {table.name: table for table in tables}
        for key in (*keys, *keys):  # grandparents too
            _add_parents(connection, by_name, key)
    return Source(statements, tuple(by_name.values()), keys, encoding)


def _table(connection: apsw.Connection, name: str) -> SourceTable:
    columns, declared = [], {}
    for _, column, _, _, _, place, hidden in connection.execute(
        "SELECT * FROM pragma_table_xinfo(?)", (name,)
    ):
        if not hidden:
            if place:
                declared[place] = len(columns)
            columns.append(str(column))
    unique = {tuple(sorted(declared.values()))} if declared else set()
    for index, is_unique, is_partial in connection.execute(
        'SELECT name, "unique", partial FROM pragma_index_list(?)', (name,)
    ):
        parts = [row[0] for row in connection.execute("SELECT name FROM pragma_index_info(?)", (index,))]
        if is_unique and not is_partial and all(part in columns for part in parts):
            unique.add(tuple(sorted(columns.index(part) for part in parts)))
    cells = ", ".join(map(quoted, columns))
    shown = ", ".join(
        f"count({quoted(c)}), count(DISTINCT {quoted(c)})" for c in columns
    )
    scanned = f"(SELECT {cells} FROM {quoted(name)} LIMIT {_SCANNED})"
    total, *counts = next(iter(connection.execute(f"SELECT count(*), {shown} FROM {scanned}")))
    given, distinct = counts[::2], counts[1::2]
    # Of two rows nothing can be learned.
    alone = [at for at in range(len(columns)) if total > 2 and given[at] == distinct[at] == total]
    rows = tuple(_some(connection, name, cells, total))
    has_null = tuple(given[at] < total for at in range(len(columns)))
    return SourceTable(name, tuple(columns), tuple(sorted(unique)), tuple(alone), has_null, rows)


def _some(connection: apsw.Connection, name: str, cells: str, total: int) -> Iterator[Row]:
    """Take rows from all over a table, at even distances."""
    step = max(1, total // SAMPLED)
    query = f"SELECT {cells} FROM {quoted(name)} LIMIT {SAMPLED * step}"
    for at, row in enumerate(connection.execute(query)):
        if at % step == 0:
            yield row


def _add_parents(
    connection: apsw.Connection, tables: dict[str, SourceTable], key: ForeignKey
) -> None:
    """Add the rows that sampled rows of the other table name."""
    child, parent = tables[key.table], tables[key.ref_table]
    own = [child.columns.index(column) for column in key.columns]
    refs = [parent.columns.index(column) for column in key.ref_columns]
    there = {tuple(row[at] for at in refs) for row in parent.rows}
    wanted = {tuple(row[at] for at in own) for row in child.rows} - there
    where = " AND ".join(f"{quoted(column)} = ?" for column in key.ref_columns)
    cells = ", ".join(map(quoted, parent.columns))
    query = f"SELECT {cells} FROM {quoted(parent.name)} WHERE {where} LIMIT 1"
    added = []
    for values in sorted(wanted, key=repr):
        if None not in values:
            added += connection.execute(query, values)
    rows = tuple(dict.fromkeys((*parent.rows, *added)))
    tables[parent.name] = replace(parent, rows=rows)
