"""The text that tells a model what a database looks like."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from functools import partial
from random import Random
from typing import Literal

import apsw

from sqlenv.schema.reading import Column, ColumnKey, DatabaseSchema, ForeignKey, TableSchema
from sqlenv.sql.lexer import quoted, tokenize
from sqlenv.types import Value

SchemaStyle = Literal["omnisql", "profile", "bare"]
WriteName = Callable[[str], str]
"""Writes a name, in quotes where it needs some."""

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def render_schema(
    schema: DatabaseSchema, *, style: SchemaStyle = "omnisql", dialect: str = "sqlite"
) -> str:
    """Write the schema as a prompt shows it, with quotes of a dialect around names that need some.

    Styles: `omnisql`: CREATE TABLE with a comment and examples behind each column; `profile`:
    PaVeRL-SQL's (appendix B); `bare`: a line a table with names and references alone, the fewest
    tokens that SQLite still takes.
    """
    render = {"omnisql": _omnisql_table, "profile": _profile_table, "bare": _bare_table}
    between = "\n\n" if style == "omnisql" else "\n"
    write = partial(_identifier, mark='"' if dialect == "postgres" else "`")
    return between.join(render[style](schema, table, write) for table in schema.tables)


def sample_columns(
    schema: DatabaseSchema,
    gold_sql: str,
    *,
    seed: int | str,
    fits: Callable[[DatabaseSchema], bool],
) -> DatabaseSchema:
    """Cut a schema that is too long for a training prompt; evaluation never does this.

    Keeps the key columns, the columns that the gold query names, and as large a random share of the
    rest as fits (OmniSQL; PaVeRL-SQL, section on context). Where that is still too long, only the
    tables of the gold query keep their keys, then not even those. `fits` says whether a schema is
    short enough.
    """

    def short(keep: Collection[ColumnKey]) -> bool:
        return fits(schema.only(keep))

    everything = [(table.name, c.name) for table in schema.tables for c in table.columns]
    if short(everything):
        return schema
    gold = _gold_columns(schema, gold_sql)
    gold_tables = {table for table, _ in gold}
    primary = {(table.name, name) for table in schema.tables for name in table.primary_key}
    keys = primary.union(*(key.ends for key in schema.foreign_keys))
    near_keys = {key for key in keys if key[0] in gold_tables}
    base = next((base for base in (gold | keys, gold | near_keys) if short(base)), gold)
    rest = [column for column in everything if column not in base]
    Random(seed).shuffle(rest)
    # The candidates grow, so those that fit come first: count them by bisection.
    sizes = range(1, len(rest) + 1)
    fitting = bisect_left(sizes, 1, key=lambda size: int(not short(base.union(rest[:size]))))
    return schema.only(base.union(rest[:fitting]))


def _gold_columns(schema: DatabaseSchema, gold_sql: str) -> set[ColumnKey]:
    words = {token.text for token in tokenize(gold_sql) if token.kind in ("word", "name")}
    found = set()
    for table in schema.tables:
        if table.name.lower() in words:
            named = [c.name for c in table.columns if c.name.lower() in words]
            found |= {(table.name, name) for name in named or [table.columns[0].name]}
    return found


def _identifier(name: str, mark: str) -> str:
    if _PLAIN_NAME.fullmatch(name) and name.upper() not in apsw.keywords:
        return name
    return mark + name.replace(mark, mark * 2) + mark


def _names(names: Iterable[str], write: WriteName) -> str:
    return ", ".join(map(write, names))


def _one_line(value: Value) -> str:
    return " ".join(str(value).split())


def _comment(column: Column) -> str:
    """Say what the column holds, unless its name says the same."""

    def bare(text: str) -> str:
        return text.lower().replace("_", "").replace(" ", "")

    return "" if bare(column.description) == bare(column.name) else column.description


def _block(head: str, lines: list[tuple[str, str]]) -> str:
    texts = [definition + "," + comment for definition, comment in lines[:-1]]
    texts += [definition + comment for definition, comment in lines[-1:]]
    return "\n".join([head, *texts, ");"])


def _omnisql_table(schema: DatabaseSchema, table: TableSchema, write: WriteName) -> str:
    lines = []
    for column in table.columns:
        notes = [f"example: {list(column.examples)}"] if column.examples else []
        notes = [note for note in (_comment(column), *notes) if note]
        comment = f" -- {', '.join(notes)}" if notes else ""
        kind = _one_line(column.described_type or column.type)
        lines.append((f"    {write(column.name)} {kind}".rstrip(), comment))
    if table.primary_key:
        lines.append((f"    PRIMARY KEY ({_names(table.primary_key, write)})", ""))
    for key in schema.keys_of(table):
        label = "_".join("_".join(("fk", table.name, *key.columns)).lower().split())
        foreign = f"FOREIGN KEY ({_names(key.columns, write)}) REFERENCES {write(key.ref_table)}"
        text = f"    CONSTRAINT {write(label)} {foreign} ({_names(key.ref_columns, write)})"
        lines.append((text, ""))
    return _block(f"CREATE {table.kind} {write(table.name)} (", lines)


def _profile_table(schema: DatabaseSchema, table: TableSchema, write: WriteName) -> str:
    lines = []
    for column in table.columns:
        notes = [_comment(column)] if _comment(column) else []
        if column.span:
            notes.append(f"MIN {column.span[0]} MAX {column.span[1]}")
        elif column.examples:
            notes.append("Example " + ", ".join(map(_one_line, column.examples)))
        comment = f" --{', '.join(notes)}," if notes else ""
        lines.append((f"{write(column.name)} {_one_line(column.type)}".rstrip(), comment))
    if table.primary_key:
        lines.append((f"PRIMARY KEY ({_names(table.primary_key, quoted)})", ""))
    for key in schema.keys_of(table):
        target = f"{quoted(key.ref_table)}({_names(key.ref_columns, quoted)})"
        lines.append((f"FOREIGN KEY({_names(key.columns, quoted)}) REFERENCES {target}", ""))
    head = f"{_one_line(table.name)}\nCREATE {table.kind} {write(table.name)} ("
    return _block(head, lines)


def _bare_table(schema: DatabaseSchema, table: TableSchema, write: WriteName) -> str:
    keys = schema.keys_of(table)
    single = {key.columns[0]: key for key in keys if len(key.columns) == 1}
    parts = []
    for column in table.columns:
        key = single.get(column.name)
        reference = _reference(schema, key, write) if key else ""
        parts.append(f"{write(column.name)} {reference}".rstrip())
    parts += [
        f"FOREIGN KEY ({_names(key.columns, write)}) {_reference(schema, key, write)}"
        for key in keys
        if key != single.get(key.columns[0])
    ]
    return f"CREATE {table.kind} {write(table.name)} ({', '.join(parts)});"


def _reference(schema: DatabaseSchema, key: ForeignKey, write: WriteName) -> str:
    """Name the table, and the columns unless they are its primary key, as SQL does."""
    is_key = any(
        table.name == key.ref_table and table.primary_key == key.ref_columns
        for table in schema.tables
    )
    columns = "" if is_key else f" ({_names(key.ref_columns, write)})"
    return f"REFERENCES {write(key.ref_table)}{columns}"
