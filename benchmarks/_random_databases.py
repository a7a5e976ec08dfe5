"""Databases of random rows, to judge by where there is no test suite.

After the fuzzing of Zhong, Yu and Klein (EMNLP 2020, section 4), and apart from the variants that
witnesses are: each cell is drawn on its own, from the column's values, from what both queries name
and what is near it, and from new values. Declared keys, CHECKs and foreign keys hold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress

import apsw
from sqlglot import exp

from sqlenv.schema.reading import ColumnKey
from sqlenv.sql.extraction import parse
from sqlenv.sql.lexer import quoted
from sqlenv.types import Value
from sqlenv.witness.source import SourceDatabase, SourceTable

_MOST_ROWS, _REAL_VALUES = 25, 8
_WORDS = ("amber", "basalt", "cedar", "delta")


def random_databases(
    source: SourceDatabase, queries: Sequence[str], count: int, *, seed: int
) -> Iterator[apsw.Connection]:
    """Make databases in memory; each is closed when the next is asked for."""
    literals = [one for sql in queries for one in _literals(sql)]
    for number in range(count):
        connection = _filled(source, literals, random.Random(f"{seed} {number}"))
        yield connection
        connection.close()


def _literals(sql: str) -> Iterator[Value]:
    tree = parse(sql)
    for node in tree.find_all(exp.Literal, exp.Column) if tree else ():
        if isinstance(node, exp.Literal) and not node.is_string:
            number = float(node.name)
            yield from (number + step for step in (0, 0, -1, 1))
        elif isinstance(node, exp.Literal) or node.this.args.get("quoted"):
            text = node.name.strip("%")
            yield from (text, text, f"{text} {_WORDS[0]}", f"{_WORDS[1]} {text}")


def _filled(
    source: SourceDatabase, literals: Sequence[Value], draw: random.Random
) -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 1)
    connection.pragma("encoding", source.encoding)
    pools = _pools(source, literals, draw)
    with connection:
        for statement in source.statements:
            connection.execute(statement)
        for table in source.tables:
            marks = ", ".join("?" * len(table.columns))
            names = ", ".join(map(quoted, table.columns))
            insert = f"INSERT OR ABORT INTO {quoted(table.name)} ({names}) VALUES ({marks})"
            for _ in range(draw.randint(1, _MOST_ROWS)):
                with suppress(apsw.MismatchError, apsw.ConstraintError, OverflowError):
                    connection.execute(insert, _row(table, pools, draw))
    while broken := [row for row in connection.execute("PRAGMA foreign_key_check") if row[1]]:
        for name, rowid, *_ in broken:
            connection.execute(f"DELETE FROM {quoted(str(name))} WHERE rowid = ?", (rowid,))
    return connection


def _row(
    table: SourceTable, pools: dict[ColumnKey, list[Value]], draw: random.Random
) -> list[Value]:
    return [
        None
        if table.has_null[at] and draw.random() < 0.1
        else draw.choice(pools[table.name.lower(), column.lower()])
        for at, column in enumerate(table.columns)
    ]


def _pools(
    source: SourceDatabase, literals: Sequence[Value], draw: random.Random
) -> dict[ColumnKey, list[Value]]:
    """Choose the values of each column; those that name another column's share its values."""
    pools: dict[ColumnKey, list[Value]] = {}
    for table in source.tables:
        for at, column in enumerate(table.columns):
            real = sorted({row[at] for row in table.rows} - {None}, key=repr)
            kinds = {str if isinstance(value, str) else float for value in real} or {str}
            whole = not any(isinstance(value, float) for value in real)
            named = [value for value in literals if type(value) in kinds]
            new = _WORDS if str in kinds else [draw.randint(0, 100) for _ in range(6)]
            found = [*draw.sample(real, min(len(real), _REAL_VALUES)), *named, *new]
            pools[table.name.lower(), column.lower()] = [
                int(value) if whole and isinstance(value, float) and value.is_integer() else value
                for value in draw.sample(found, draw.randint(2, len(found)))
            ]
    for key in source.keys:
        for own, ref in zip(key.columns, key.ref_columns, strict=True):
            pools[key.table.lower(), own.lower()] = pools[key.ref_table.lower(), ref.lower()]
    return pools
