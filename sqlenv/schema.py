"""What a database looks like, and the text that tells a model so."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Literal
from urllib.parse import quote

import apsw

from sqlenv.errors import UserError
from sqlenv.types import Row, Value

Style = Literal["omnisql", "profile", "compact", "bare"]
ColumnKey = tuple[str, str]
Descriptions = Mapping[ColumnKey, str]
"""(table, column), both in lower case -> what the column holds."""

EXAMPLE_CHARACTERS = 40
"""OmniSQL cuts example values here."""
SAMPLED_ROWS = 1_000
"""Rows of a table that are searched for example values."""
PROFILED_ROWS = 100_000
"""Rows of a table among which the most frequent values are counted."""

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IDENTIFIER = re.compile(r'"([^"]+)"|`([^`]+)`|\[([^\]]+)\]|([^\W\d]\w*)')


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        type: Declared type, empty where there is none.
        examples: A few of its values, long text cut.
        span: Smallest and largest value of a numeric column, where profiled.
    """

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

    def only(self, keep: Collection[ColumnKey]) -> DatabaseSchema:
        """Leave out every other column, tables without columns, and keys that lost one."""
        kept = set(keep)
        tables = []
        for table in self.tables:
            columns = tuple(c for c in table.columns if (table.name, c.name) in kept)
            if columns:
                tables.append(replace(table, columns=columns))
        keys = tuple(key for key in self.foreign_keys if kept.issuperset(_ends(key)))
        return DatabaseSchema(tuple(tables), keys)


def read_schema(
    database: Path,
    *,
    examples: int = 2,
    profile: bool = False,
    descriptions: Descriptions | None = None,
) -> DatabaseSchema:
    """Read the schema from the SQLite file itself; the same file always gives the same schema.

    Args:
        database: The SQLite file.
        examples: Distinct, non-empty values to show of each column, the first in the table.
        profile: Scan the tables: `span` for numbers, else the most frequent values (PaVeRL: 3).
        descriptions: Comments by (table, column) in lower case.

    Raises:
        UserError: The file is missing or is not a SQLite database.
    """
    try:
        stat = database.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        schema = _read(database.resolve(), stamp, examples=examples, profile=profile)
    except OSError as error:
        raise UserError(f"{database}: cannot be read ({error.strerror})") from error
    except (apsw.Error, UnicodeDecodeError) as error:
        raise UserError(f"{database}: is not a readable SQLite database ({error})") from error
    return _describe(schema, descriptions) if descriptions else schema


def render_schema(
    schema: DatabaseSchema,
    *,
    style: Style = "omnisql",
    keep: Collection[ColumnKey] | None = None,
) -> str:
    """Write the schema as a prompt shows it.

    Args:
        schema: What to write.
        style: `omnisql`: CREATE TABLE with a comment and examples behind each column; `profile`:
            PaVeRL's (paper 003, appendix B); `compact`: one line a table; `bare`: the same with
            names and references alone, the fewest tokens that SQLite still takes.
        keep: The only (table, column) pairs to show; None for all.
    """
    if keep is not None:
        schema = schema.only(keep)
    render = {
        "omnisql": _omnisql_table,
        "profile": _profile_table,
        "compact": _compact_table,
        "bare": _bare_table,
    }
    between = "\n\n" if style == "omnisql" else "\n"
    return between.join(render[style](schema, table) for table in schema.tables)


def sample_columns(
    schema: DatabaseSchema,
    gold_sql: str,
    *,
    seed: int | str,
    fits: Callable[[str], bool],
    style: Style = "omnisql",
) -> DatabaseSchema:
    """Cut a schema that is too long for a training prompt; evaluation never does this.

    Keeps the key columns, the columns that the gold query names, and as large a random share of
    the rest as fits (OmniSQL; paper 003, section on context). Where that is still too long, only
    the tables of the gold query keep their keys, then not even those.

    Args:
        schema: The whole schema.
        gold_sql: The query whose columns must stay.
        seed: Chooses the random share.
        fits: Whether a rendered schema is short enough.
        style: How it will be rendered.
    """

    def short(keep: Collection[ColumnKey]) -> bool:
        return fits(render_schema(schema, style=style, keep=keep))

    everything = [(table.name, c.name) for table in schema.tables for c in table.columns]
    if short(everything):
        return schema
    gold = _gold_columns(schema, gold_sql)
    gold_tables = {table for table, _ in gold}
    keys = _key_columns(schema)
    near_keys = {key for key in keys if key[0] in gold_tables}
    base = next((base for base in (gold | keys, gold | near_keys) if short(base)), gold)
    rest = [column for column in everything if column not in base]
    Random(seed).shuffle(rest)
    # The candidates grow, so those that fit come first: count them by bisection.
    sizes = range(1, len(rest) + 1)
    fitting = bisect_left(sizes, 1, key=lambda size: int(not short(base.union(rest[:size]))))
    return schema.only(base.union(rest[:fitting]))


@lru_cache(maxsize=32_768)
def _read(
    database: Path, stamp: tuple[int, int], *, examples: int, profile: bool
) -> DatabaseSchema:
    """Read a file; `stamp` makes a changed file another key of the cache."""
    connection = apsw.Connection(
        f"file:{quote(str(database))}?immutable=1",
        flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI,
    )
    try:
        tables = []
        for name in _table_names(connection):
            columns = _columns(connection, name)
            if profile:
                columns = tuple(_profiled(connection, name, c, examples) for c in columns)
            else:
                columns = _with_examples(connection, name, columns, examples)
            tables.append(TableSchema(name, columns))
        return DatabaseSchema(tuple(tables), tuple(_foreign_keys(connection, tables)))
    finally:
        connection.close()


def _table_names(connection: apsw.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT m.name FROM sqlite_master AS m JOIN pragma_table_list AS l ON l.name = m.name "
        "WHERE l.schema = 'main' AND l.type = 'table' AND m.type = 'table' "
        r"AND m.name NOT LIKE 'sqlite\_%' ESCAPE '\' ORDER BY m.rowid"
    )
    return [str(name) for (name,) in rows]


def _columns(connection: apsw.Connection, table: str) -> tuple[Column, ...]:
    rows = connection.execute(
        "SELECT name, type, pk > 0 FROM pragma_table_xinfo(?) WHERE hidden <> 1", (table,)
    )
    return tuple(Column(str(name), str(kind), bool(key)) for name, kind, key in rows)


def _foreign_keys(
    connection: apsw.Connection, tables: Iterable[TableSchema]
) -> Iterator[ForeignKey]:
    """List the declared foreign keys; one that names nothing in this database is left out."""
    by_name = {table.name.lower(): table for table in tables}
    for table in by_name.values():
        rows = connection.execute(
            'SELECT id, "table", "from", "to" FROM pragma_foreign_key_list(?) '
            "ORDER BY id DESC, seq",
            (table.name,),
        )
        declared: dict[Value, tuple[TableSchema | None, list[tuple[str, str | None]]]] = {}
        for identity, parent, child_column, parent_column in rows:
            target = by_name.get(str(parent).lower())
            pairs = declared.setdefault(identity, (target, []))[1]
            pairs.append((str(child_column), parent_column and str(parent_column)))
        for target, pairs in declared.values():
            if target and (key := _resolved(table, target, pairs)):
                yield key


def _resolved(
    table: TableSchema, target: TableSchema, pairs: list[tuple[str, str | None]]
) -> ForeignKey | None:
    """Spell a foreign key as the tables do; a bare REFERENCES means the target's primary key."""
    spelling = {column.name.lower(): column.name for column in target.columns}
    named = tuple(spelling.get(parent.lower(), "") for _, parent in pairs if parent)
    parents = named or target.primary_key
    if not all(parents) or len(parents) != len(pairs):
        return None
    return ForeignKey(table.name, tuple(child for child, _ in pairs), target.name, parents)


def _with_examples(
    connection: apsw.Connection, table: str, columns: tuple[Column, ...], count: int
) -> tuple[Column, ...]:
    """Give each column its first distinct, non-empty values."""
    if not count:
        return columns
    # NOT INDEXED: rows come in the table's own order, whatever indexes exist.
    cells = ", ".join(_cell(column.name) for column in columns)
    rows = connection.execute(
        f"SELECT {cells} FROM {_quoted(table)} NOT INDEXED LIMIT {SAMPLED_ROWS}"
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
    name, source = _quoted(column.name), f"{_quoted(table)} NOT INDEXED"
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
    name = _quoted(column)
    return (
        f"CASE typeof({name}) WHEN 'blob' THEN NULL WHEN 'text' "
        f"THEN CAST(substr({name}, 1, {EXAMPLE_CHARACTERS}) AS BLOB) ELSE {name} END"
    )


def _shown(row: Row) -> Iterator[Value]:
    return (v.decode(errors="replace") if isinstance(v, bytes) else v for v in row)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _describe(schema: DatabaseSchema, descriptions: Descriptions) -> DatabaseSchema:
    def described(table: TableSchema, column: Column) -> Column:
        text = descriptions.get((table.name.lower(), column.name.lower()), "")
        return replace(column, description=" ".join(text.split()))

    tables = tuple(
        replace(table, columns=tuple(described(table, column) for column in table.columns))
        for table in schema.tables
    )
    return replace(schema, tables=tables)


def _ends(key: ForeignKey) -> set[ColumnKey]:
    children = {(key.table, column) for column in key.columns}
    return children | {(key.ref_table, column) for column in key.ref_columns}


def _key_columns(schema: DatabaseSchema) -> set[ColumnKey]:
    primary = {(table.name, name) for table in schema.tables for name in table.primary_key}
    return primary.union(*(_ends(key) for key in schema.foreign_keys))


def _gold_columns(schema: DatabaseSchema, gold_sql: str) -> set[ColumnKey]:
    """Find the columns that the query names, at least one of each table that it names."""
    words = {"".join(groups).lower() for groups in _IDENTIFIER.findall(gold_sql)}
    found = set()
    for table in schema.tables:
        if table.name.lower() in words:
            named = [c.name for c in table.columns if c.name.lower() in words]
            found |= {(table.name, name) for name in named or [table.columns[0].name]}
    return found


def _identifier(name: str) -> str:
    """Quote a name that SQLite would not read as one."""
    if _PLAIN_NAME.fullmatch(name) and name.upper() not in apsw.keywords:
        return name
    return "`" + name.replace("`", "``") + "`"


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(_identifier, names))


def _one_line(value: Value) -> str:
    return " ".join(str(value).split())


def _comment(column: Column) -> str:
    """Say what the column holds, unless its name says the same."""

    def bare(text: str) -> str:
        return text.lower().replace("_", "").replace(" ", "")

    return "" if bare(column.description) == bare(column.name) else column.description


def _block(head: str, lines: list[tuple[str, str]]) -> str:
    """Join (definition, comment) lines; the comma stands between them."""
    texts = [definition + "," + comment for definition, comment in lines[:-1]]
    texts += [definition + comment for definition, comment in lines[-1:]]
    return "\n".join([head, *texts, ");"])


def _omnisql_table(schema: DatabaseSchema, table: TableSchema) -> str:
    lines = []
    for column in table.columns:
        notes = [f"example: {list(column.examples)}"] if column.examples else []
        notes = [note for note in (_comment(column), *notes) if note]
        comment = f" -- {', '.join(notes)}" if notes else ""
        lines.append((f"    {_identifier(column.name)} {column.type}".rstrip(), comment))
    if table.primary_key:
        lines.append((f"    PRIMARY KEY ({_names(table.primary_key)})", ""))
    for key in schema.keys_of(table):
        label = "_".join(("fk", table.name, *key.columns)).lower().replace(" ", "_")
        foreign = f"FOREIGN KEY ({_names(key.columns)}) REFERENCES {_identifier(key.ref_table)}"
        text = f"    CONSTRAINT {_identifier(label)} {foreign} ({_names(key.ref_columns)})"
        lines.append((text, ""))
    return _block(f"CREATE TABLE {_identifier(table.name)} (", lines)


def _profile_table(schema: DatabaseSchema, table: TableSchema) -> str:
    def quoted(names: Iterable[str]) -> str:
        return ", ".join(map(_quoted, names))

    lines = []
    for column in table.columns:
        notes = [_comment(column)] if _comment(column) else []
        if column.span:
            notes.append(f"MIN {column.span[0]} MAX {column.span[1]}")
        elif column.examples:
            notes.append("Example " + ", ".join(map(_one_line, column.examples)))
        comment = f" --{', '.join(notes)}," if notes else ""
        lines.append((f"{_identifier(column.name)} {column.type}".rstrip(), comment))
    if table.primary_key:
        lines.append((f"PRIMARY KEY ({quoted(table.primary_key)})", ""))
    for key in schema.keys_of(table):
        target = f"{_quoted(key.ref_table)}({quoted(key.ref_columns)})"
        lines.append((f"FOREIGN KEY({quoted(key.columns)}) REFERENCES {target}", ""))
    return _block(f"{table.name}\nCREATE TABLE {_identifier(table.name)} (", lines)


def _bare_table(schema: DatabaseSchema, table: TableSchema) -> str:
    target = {key.columns: key.ref_table for key in schema.keys_of(table)}
    parts = [_identifier(column.name) for column in table.columns]
    for number, column in enumerate(table.columns):
        if (column.name,) in target:
            parts[number] += f" REFERENCES {_identifier(target[column.name,])}"
    for columns, name in target.items():
        if len(columns) > 1:
            parts.append(f"FOREIGN KEY ({_names(columns)}) REFERENCES {_identifier(name)}")
    return f"CREATE TABLE {_identifier(table.name)} ({', '.join(parts)});"


def _compact_table(schema: DatabaseSchema, table: TableSchema) -> str:
    single = {key.columns[0]: key for key in schema.keys_of(table) if len(key.columns) == 1}
    parts = []
    for column in table.columns:
        words = [_identifier(column.name), column.type]
        if table.primary_key == (column.name,):
            words.append("PRIMARY KEY")
        if key := single.get(column.name):
            words.append(f"REFERENCES {_identifier(key.ref_table)}({_names(key.ref_columns)})")
        if column.examples:
            values = ", ".join(map(_one_line, column.examples)).replace("*/", "")
            words.append(f"/*{values}*/")
        parts.append(" ".join(filter(None, words)))
    if len(table.primary_key) > 1:
        parts.append(f"PRIMARY KEY ({_names(table.primary_key)})")
    for key in schema.keys_of(table):
        if key != single.get(key.columns[0]):
            reference = f"{_identifier(key.ref_table)}({_names(key.ref_columns)})"
            parts.append(f"FOREIGN KEY ({_names(key.columns)}) REFERENCES {reference}")
    return f"CREATE TABLE {_identifier(table.name)} ({', '.join(parts)});"
