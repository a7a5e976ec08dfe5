"""In which dialect of SQL queries are written, and how they run on SQLite all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sqlenv.errors import UserError
from sqlenv.types import Dialect, Example, Result, SqlError

NAMES: Mapping[str, Dialect] = {
    "sqlite": "sqlite",
    "mysql": "mysql",
    "postgres": "postgres",
    "postgresql": "postgres",
}
"""How data sets spell the dialects, in lower case."""


def dialect_of(name: str) -> Dialect:
    """Find a dialect by one of its names.

    Raises:
        UserError: It has none of these.
    """
    if found := NAMES.get(name.lower()):
        return found
    raise UserError(f"dialect {name}: should be one of {', '.join(NAMES)}")


def run(ask: Callable[[Path, str], Result], example: Example, sql: str) -> Result:
    """Run a query that is written in an example's dialect.

    Args:
        ask: The executor's `execute` or `gold`.
        example: Names the dialect and the database.
        sql: A prediction, or the gold query.

    Returns:
        What the executor gives; an error where the query cannot be carried over.
    """
    text = carry_over(sql, example.dialect)
    return text if isinstance(text, SqlError) else ask(example.database, text)


def carry_over(sql: str, dialect: str) -> str | SqlError:
    """Write a query for SQLite.

    Args:
        sql: Whatever a data set or a model wrote.
        dialect: `sqlite`, which is left alone, `mysql` or `postgres`.

    Returns:
        The query, or why it cannot be carried over without a change of meaning.
    """
    if dialect == "sqlite":
        return sql
    # With sqlglot, which takes longer to import than most of what this command needs.
    from sqlenv.dialect_trees import carried

    return carried(sql, dialect)
