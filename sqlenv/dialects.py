"""In which dialect of SQL queries are written, and how they run on SQLite all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from minirl.exchange import UserError
from sqlenv.types import Dialect, Example, Result, RunQuery, SqlError

NAMES: Mapping[str, Dialect] = {one: one for one in get_args(Dialect)} | {"postgresql": "postgres"}
"""How data sets spell the dialects, in lower case."""


def dialect_of(name: str) -> Dialect:
    """Find a dialect by one of its names."""
    if found := NAMES.get(name.lower()):
        return found
    raise UserError(f"dialect {name}: should be one of {', '.join(NAMES)}")


def run_in_dialect(run: RunQuery, example: Example, sql: str) -> Result:
    """Run a query in its example's dialect by an executor's `execute` or `gold`."""
    text = transpile(sql, example.dialect)
    return text if isinstance(text, SqlError) else run(example.database, text)


def run_many(
    run: Callable[[Sequence[tuple[Path, str]]], Sequence[Result]],
    queries: Sequence[tuple[Example, str]],
) -> list[Result]:
    """Run queries in their examples' dialects by an executor's `execute_many` or `gold_many`."""
    texts = [transpile(sql, example.dialect) for example, sql in queries]
    pairs = zip(queries, texts, strict=True)
    ran = iter(run([(e.database, text) for (e, _), text in pairs if isinstance(text, str)]))
    return [text if isinstance(text, SqlError) else next(ran) for text in texts]


def transpile(sql: str, dialect: str) -> str | SqlError:
    """Write a query of any text for SQLite, approximately, or say why it cannot be."""
    if dialect == "sqlite":
        return sql
    # sqlglot takes longer to import than most of what a command needs.
    from sqlenv.sql.transpiler import transpiled

    return transpiled(sql, dialect)
