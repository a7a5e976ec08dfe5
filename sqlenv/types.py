"""The records that databases, environments and rewards exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from minirl.exchange import Message

Value = None | int | float | str | bytes
Row = tuple[Value, ...]
ValueMatch = tuple[str, str, str]
AttemptKind = Literal["answer", "call", "bad_call"]
Dialect = Literal["sqlite", "mysql", "postgres"]
ENGINES: Mapping[str, str] = {"sqlite": "SQLite", "mysql": "MySQL", "postgres": "PostgreSQL"}
"""What the engine of each dialect is called."""
Wrapping = Literal["sql_tag", "fence", "any"]
"""Where the SQL of a reply is looked for."""
Form = Literal["sql_tag", "fence", "bare"]
"""Where it was found; a bare query is the whole of what the reply says."""
MatchMode = Literal["set", "bag", "bag_ordered", "test_suite"]
"""A rule for two results, whatever the queries were."""
Numbers = Literal["exact", "close"]
"""When two numbers are the same: when they are equal, or when only their last bits differ."""
ExecutionMatch = Literal[MatchMode, "bird_ex", "spider_ex"]
"""Those of `sqlenv.evaluators.comparators` that need a gold query and its database alone."""


def cut(value: Value, length: int) -> Value:
    """Return the beginning of a text or a blob; other values stay."""
    return value[:length] if isinstance(value, str | bytes) else value


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one database (a SQLite file, whatever the dialect of the gold query).

    `question_id` is what its data set calls it: its own id, else its number in the question file.
    `alternatives` are more gold queries, of which any may match, and `grading_method` is the
    question's own rule (`sqlenv.evaluators.graded`), in place of the job's.
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
    question_id: str = ""
    alternatives: tuple[str, ...] = ()
    grading_method: str = ""


Status = Literal["ok", "error", "timeout", "too_large", "denied"]
"""How a query ended."""


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a query that ran, in engine order.

    Attributes:
        columns: Column names, also when there are no rows.
        rows: One tuple a row, as wide as `columns`.
        is_mended: Whether bytes of a text that are not valid text were dropped, as Spider's program
            does; others refuse such results.
        nondeterministic: Whether the rows depend on chance, or on a clock that runs.
    """

    status: ClassVar[Status] = "ok"
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    is_mended: bool = field(default=False, compare=False)
    nondeterministic: bool = field(default=False, compare=False)

    @property
    def width(self) -> int:
        """Count the columns."""
        return len(self.columns)

    def by_column(self) -> list[tuple[Value, ...]]:
        """List the values of each column."""
        return list(zip(*self.rows, strict=True)) if self.rows else [()] * self.width


@dataclass(frozen=True, slots=True)
class SqlError:
    """SQLite refused the query, in its own words, without file paths.

    `offset` is the UTF-8 byte offset of the error in the query, -1 where SQLite gives none.
    """

    status: ClassVar[Status] = "error"
    message: str
    offset: int = -1


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The query ran out of steps (the same on every machine) or of wall time (never cached)."""

    status: ClassVar[Status] = "timeout"
    reason: Literal["steps", "wall"]


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The query or its result passes a limit of size."""

    status: ClassVar[Status] = "too_large"
    what: Literal["rows", "bytes", "memory", "sql"]


@dataclass(frozen=True, slots=True)
class Denied:
    """The query asks for what an answer never needs: a write, a pragma, a second statement."""

    status: ClassVar[Status] = "denied"
    what: str


Result = Table | SqlError | TimedOut | TooLarge | Denied
RunQuery = Callable[[Path, str], Result]
"""Runs a query on a database: an executor's `execute` or `gold`."""


def describe_failure(result: Result) -> str:
    """Say in a few words why a query gave no table; empty when it gave one."""
    if isinstance(result, Table):
        return ""
    if isinstance(result, SqlError):
        return result.message
    if isinstance(result, Denied):
        return f"not allowed: {result.what}"
    if isinstance(result, TimedOut):
        return "the query takes too long"
    return _TOO_LARGE[result.what]


_TOO_LARGE: Mapping[str, str] = {
    "rows": "the query returns too many rows",
    "bytes": "the query returns too much",
    "memory": "the query needs too much memory",
    "sql": "the query is too long",
}


Observation = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reply holds, as `sqlenv.sql.answers.answer_of` reads it. Places count characters.

    Attributes:
        reply: The whole reply.
        sql: The query in it; empty when there is none.
        start, end: Where the query stands in the reply; equal when it stands nowhere, such as one
            that JSON spells otherwise.
        form: What the query stands in; None when there is none.
        said_from, said_to: What the reply says; the rest is reasoning.
        call: What stands in the first call of a tool; None without a call.
        call_ends: Whether that call ends.
        in_form: Whether the reply is one block of reasoning and one of SQL, as it was asked for.
    """

    reply: str
    sql: str = ""
    start: int = 0
    end: int = 0
    form: Form | None = None
    said_from: int = 0
    said_to: int = 0
    call: str | None = None
    call_ends: bool = True
    in_form: bool = False

    @property
    def place(self) -> int:
        """Return where the query begins in the reply; -1 where it does not stand in it."""
        return self.start if self.start < self.end else -1

    @property
    def said(self) -> str:
        """Return what the reply says, calls included."""
        return self.reply[self.said_from : self.said_to]

    @property
    def reasoning(self) -> str:
        """Return what comes before (or, where it never ends, after) what the reply says."""
        return self.reply[: self.said_from] + self.reply[self.said_to :]

    def with_sql(self, sql: str) -> Answer:
        """Return the same reply with a query that was read elsewhere, such as out of a call."""
        start = self.reply.find(sql, self.said_from, self.said_to) if sql else -1
        place = (start, start + len(sql)) if start >= 0 else (0, 0)
        return replace(self, sql=sql, start=place[0], end=place[1], form=None)


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A witness on which a query that looks right gives another result than its gold query.

    Attributes:
        number: Of the witness among those of the gold query, from 1.
        database: The witness.
        result: What the query gives there, numbers written as in the gold result.
    """

    number: int
    database: Path
    result: Result


@dataclass(frozen=True, slots=True)
class Attempt:
    """One reply of the policy, as the environment judged it.

    Attributes:
        answer: The reply, and what was read in it.
        result: What execution gave; an empty query is a `SqlError` and is never executed.
        correct: Whether the result matches the gold result, on all witnesses too if there are any.
        tags: Diagnostic tags that the next observation was made of.
        kind: An answer, a call of a tool, or a call that could not be read.
        refuted: Where the result matches, the first witness that shows that the query means
            something else; None where none does.
    """

    answer: Answer
    result: Result
    correct: bool
    tags: tuple[str, ...] = ()
    kind: AttemptKind = "answer"
    refuted: Counterexample | None = None

    @property
    def text(self) -> str:
        """Return the whole reply."""
        return self.answer.reply

    @property
    def sql(self) -> str:
        """Return the query; empty when there is none."""
        return self.answer.sql


@dataclass(frozen=True, slots=True)
class Episode:
    """The attempts made at one example so far."""

    example: Example
    attempts: tuple[Attempt, ...] = ()

    @property
    def final_attempt(self) -> Attempt | None:
        """Return the last attempt if it answers the question; a call of a tool does not."""
        last = self.attempts[-1] if self.attempts else None
        return last if last and last.kind == "answer" else None
