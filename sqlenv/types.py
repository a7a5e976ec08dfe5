"""The records that databases, environments and rewards exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Value = None | int | float | str | bytes
Row = tuple[Value, ...]
ValueMatch = tuple[str, str, str]
Role = Literal["system", "user"]
AttemptKind = Literal["answer", "call", "bad_call"]
Dialect = Literal["sqlite", "mysql", "postgres"]
ENGINES: Mapping[str, str] = {"sqlite": "SQLite", "mysql": "MySQL", "postgres": "PostgreSQL"}
"""What the engine of each dialect is called."""
Wrapping = Literal["sql_tag", "fence"]
MatchMode = Literal["set", "bag", "bag_ordered", "test_suite"]
"""A rule for two results, whatever the queries were."""
ExecutionMatch = Literal[MatchMode, "bird_ex", "spider_ex", "omnisql_bird", "omnisql_spider_ex"]
"""Those of `sqlenv.evaluators.comparators` that need a gold query and its database alone."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one database (a SQLite file, whatever the dialect of the gold query).

    `value_matches` are values that the question seems to name: table, column, value.
    """

    id: str
    question: str
    db_id: str
    database: Path
    gold_sql: str
    evidence: str = ""
    difficulty: str = ""
    dialect: str = "sqlite"
    source: str = ""
    value_matches: tuple[ValueMatch, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a query that ran, in engine order.

    Attributes:
        columns: Column names, also when there are no rows.
        rows: One tuple a row, as wide as `columns`.
        is_mended: Whether bytes of a text that are not valid text were dropped, as Spider's program
            does; others refuse such results.
        nondeterministic: Whether the rows depend on the clock or on chance.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    is_mended: bool = field(default=False, compare=False)
    nondeterministic: bool = field(default=False, compare=False)

    @property
    def width(self) -> int:
        """Count the columns."""
        return len(self.columns)


@dataclass(frozen=True, slots=True)
class SqlError:
    """SQLite refused the query, in its own words, without file paths.

    `offset` is the UTF-8 byte offset of the error in the query, -1 where SQLite gives none.
    """

    message: str
    offset: int = -1


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The query ran out of steps (the same on every machine) or of wall time (never cached)."""

    reason: Literal["steps", "wall"]


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The query or its result passes a limit of size."""

    what: Literal["rows", "bytes", "memory", "sql"]


@dataclass(frozen=True, slots=True)
class Denied:
    """The query asks for what an answer never needs: a write, a pragma, a second statement."""

    what: str


Result = Table | SqlError | TimedOut | TooLarge | Denied

Status = Literal["ok", "error", "timeout", "too_large", "denied"]
"""How a query ended."""

_STATUS_OF: Mapping[type[Result], Status] = {
    Table: "ok",
    SqlError: "error",
    TimedOut: "timeout",
    TooLarge: "too_large",
    Denied: "denied",
}


def status_of(result: Result) -> Status:
    """Name how a query ended."""
    return _STATUS_OF[type(result)]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message of the environment; the learner knows it by a protocol of the same name."""

    role: Role
    content: str


Observation = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One reply of the policy, as the environment judged it.

    Attributes:
        text: The whole reply.
        sql: The query found in it; empty when there is none.
        result: What execution gave; an empty query is a `SqlError` and is never executed.
        correct: Whether the result matches the gold result.
        tags: Diagnostic tags that the next observation was made of.
        kind: An answer, a call of a tool, or a call that could not be read.
    """

    text: str
    sql: str
    result: Result
    correct: bool
    tags: tuple[str, ...] = ()
    kind: AttemptKind = "answer"


@dataclass(frozen=True, slots=True)
class Episode:
    """The attempts made at one example so far."""

    example: Example
    attempts: tuple[Attempt, ...] = ()

    @property
    def answer(self) -> Attempt | None:
        """Return the last attempt if it answers the question; a call of a tool does not."""
        last = self.attempts[-1] if self.attempts else None
        return last if last and last.kind == "answer" else None
