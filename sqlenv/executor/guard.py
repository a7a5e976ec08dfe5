"""One read-only connection, under every control that a query by a model needs.

| what a query tries | what stops it |
|---|---|
| writes, attached files, pragmas, unsafe functions and tables | `allowed.py`, while it compiles |
| several statements, EXPLAIN, parameters | `_inspect`, before its first row |
| running for ever | the step budget here, the deadline in `engine.py` |
| huge values | `_limit_values` |
| one slow call that nothing can interrupt | `database.py`, `allowed.py`, `functions.py` |
| many of them in a row, with no loop around | `_limit_values` |
| sorts and aggregates that fill memory | the heap limit in `engine.py` |
| many rows | `_fetch` |

Also marks results that depend on chance, or on a clock that runs (`functions.py`).
"""

from __future__ import annotations

import marshal
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from sys import getsizeof
from typing import TYPE_CHECKING, Literal

import apsw

from exchange import UserError
from sqlenv.executor.allowed import SCANS, SQUARES, forbidden, read_kinds
from sqlenv.executor.database import check_database, codec_of, connect
from sqlenv.executor.functions import CLOCK_FUNCTIONS, add_chance, clock
from sqlenv.sql.lexer import MAX_QUERY_CHARS, quoted, tokenize
from sqlenv.types import Denied, Result, Row, SqlError, Table, TimedOut, TooLarge, Value

if TYPE_CHECKING:
    from sqlenv.config import ExecutorConfig

_UNREADABLE = (
    *(apsw.NotADBError, apsw.CorruptError, apsw.SQLError),
    *(apsw.CantOpenError, apsw.IOError, apsw.PermissionsError, apsw.TooBigError),
)
# What Python takes for a row, and for a number in it with its place.
_ROW_BYTES, _CELL_BYTES = 64, 40
# Above this mean of a cell, its text decides: up to four times what it is in UTF-8.
_TEXT_BYTES = 16
# A value in a result of very many columns may have at least this length, whatever `max_bytes` is.
_WIDE_VALUE_BYTES = 16_000
# Rows that are read together, of values that have at least this length if need be.
_ROWS_AT_ONCE, _SHORT_VALUE_BYTES = 100, 1000
_MOST_STRIDE = 2**31 - 1  # steps that SQLite can count at once
# Full-text search and `SQUARES` take a time with the square of what they get: this long once, a
# part of it several times.
_SQUARE_VALUE_BYTES = 30_000
# Calls between two looks at the time that may each take the time of the longest values; of more
# the values are shorter.
_LONG_SCANS = 4


class _AsksClockError(Exception):
    """A query may read the clock: it has to run where ours is."""


class _DeniedError(Exception):
    """A statement that compiled is none that may run; says what it is."""


_FAILURES = (apsw.Error, UnicodeDecodeError, MemoryError, _AsksClockError, _DeniedError)
_REASONS: dict[type[Exception], Result] = {
    apsw.NoMemError: TooLarge("memory"),
    MemoryError: TooLarge("memory"),
    apsw.TooBigError: TooLarge("bytes"),
    apsw.BindingsError: Denied("parameters"),
    UnicodeDecodeError: SqlError("the database holds text that is not valid"),
}


@dataclass(frozen=True, slots=True)
class _Way:
    """How a query is run: cheaply at first, then as it turned out to need.

    Attributes:
        sql: The query, or one around it.
        columns: What the query calls its columns; empty while `sql` is the query itself.
        is_timed: On a connection that asks our clock.
        is_bytes: Texts arrive as bytes (`_as_bytes`).
        lengths: As if values were short; as long as they may be; so that a record of SQLite's, such
            as a sorter's, may have the length of many (`_as_bounded`).
    """

    sql: str
    columns: tuple[str, ...] = ()
    is_timed: bool = False
    is_bytes: bool = False
    lengths: Literal["short", "long", "records"] = "short"


def refuse_text(sql: str) -> Result | None:
    """Say what is wrong with a text that must not even reach SQLite; None when nothing is."""
    if len(sql) > MAX_QUERY_CHARS:
        return TooLarge("sql")
    if "\0" in sql:
        return SqlError("the query contains a NUL character")
    try:
        sql.encode()
    except UnicodeEncodeError:
        return SqlError("the query is not valid Unicode text")
    return None if sql.strip() else SqlError("the query is empty")


class Guard:
    """A connection to one database, for one query at a time."""

    def __init__(self, path: Path, config: ExecutorConfig):
        check_database(path)
        self._path = str(path)
        self._config = config
        try:
            self.connection = self._open()
            self._codec = codec_of(self.connection)
            self._kinds, self._rtrees = read_kinds(self.connection, self._codec)
        except _UNREADABLE as error:
            raise UserError(f"{path}: SQLite cannot read it ({error}); download it again") from None
        self._clock = clock(config.now)
        self._connections = {False: self.connection}  # by whether they ask our clock
        self._watch(self.connection)

    def run(self, sql: str, max_steps: int) -> Result:
        """Run one query whose text passed `refuse_text`, in the first way that serves it.

        Raises:
            UserError: The disk fails, which no query is to blame for: none writes a file.
        """
        way: _Way | None = _Way(sql)
        reads = self._clock.reads
        while True:
            try:
                result = self._fetch(way, max_steps)
            except _FAILURES as error:
                failed, way = way, self._next_way(way, error)
                if not way:
                    return self._explain(error, failed)
            else:
                if isinstance(result, Table) and self._clock.reads != reads:
                    return replace(result, nondeterministic=True)
                return result

    def interrupt(self) -> None:
        """End the query that is running; another thread calls this."""
        self.connection.interrupt()

    def close(self) -> None:
        """Close the connection."""
        for connection in self._connections.values():
            connection.close(True)  # noqa: FBT003 - positional in APSW

    def _open(self, *, vfs: str = "") -> apsw.Connection:
        config = self._config
        connection = connect(Path(self._path), max_value_bytes=config.max_value_bytes, vfs=vfs)
        add_chance(connection, self._note_chance)
        # In memory: no temporary file; the heap limit bounds it.
        connection.pragma("temp_store", 2)
        connection.pragma("reverse_unordered_selects", config.reverse_unordered)
        return connection

    def _watch(self, connection: apsw.Connection) -> None:
        # Reads the schema, so that a broken one shows now and not as an error of some query.
        connection.execute("SELECT 1 FROM sqlite_schema").get  # noqa: B018
        for table in self._rtrees:
            with suppress(apsw.Error):  # who reads it will be told
                connection.execute(f"SELECT 1 FROM {quoted(table)} LIMIT 0")
        connection.exec_trace = self._inspect
        connection.authorizer = self._authorize

    def _next_way(self, way: _Way, error: Exception) -> _Way | None:
        """Find the way that a query needs which failed in another one; None where there is none."""
        columns = way.columns or self._columns
        if isinstance(error, _AsksClockError):
            return replace(way, is_timed=True)
        if isinstance(error, UnicodeDecodeError) and columns and not way.is_bytes:
            around = _as_bytes(self._statement, len(columns))
            return replace(way, sql=around, columns=columns, is_bytes=True, lengths="short")
        if not isinstance(error, apsw.TooBigError) or self._longest == self._ceiling:
            return None
        if way.lengths == "short":
            return replace(way, lengths="long")
        if way.lengths == "records":
            return None
        around = _as_bounded(self._statement, len(self._columns), self._longest)
        rest = way.sql.partition(self._statement)[2]
        return replace(way, sql=f"{around};{rest}", columns=columns, lengths="records")

    def _begin(self, way: _Way, max_steps: int) -> None:
        """Take the connection that a way needs, with all the steps ahead and nothing seen yet."""
        if way.is_timed not in self._connections:
            connection = self._open(vfs=self._clock.name)
            self._watch(connection)
            self._connections[way.is_timed] = connection
        self.connection = self._connections[way.is_timed]
        self._way = way
        self._steps_left, self._stride = max_steps, min(max_steps, _MOST_STRIDE)
        self.connection.set_progress_handler(self._out_of_steps, self._stride)
        self._columns: tuple[str, ...] = ()
        self._statement = ""
        self._denied = ""
        self._uses_chance = False
        self._asks_clock = False
        self._spent = False
        self._reads_virtual = False
        self._scans = self._squares = 0
        self._longest = self._ceiling = self._config.max_value_bytes
        self.connection.limit(apsw.SQLITE_LIMIT_LENGTH, self._longest)

    def _note_chance(self) -> int:
        self._uses_chance = True
        return self._longest

    def _fetch(self, way: _Way, max_steps: int) -> Result:
        """Run a query in one way; raises what shows that it needs another."""
        config = self._config
        self._begin(way, max_steps)
        cursor = self.connection.cursor()
        try:
            cursor.execute(way.sql)
            # The most that a row can take, at four bytes a character.
            row_bytes = 4 * self._longest * max(len(self._columns), 1)
            rows: list[Row] = []
            size_bytes = 0
            # Few enough that they cannot pass the limit, however large their values are; but one.
            while chunk := list(
                islice(cursor, min(1 + (config.max_bytes - size_bytes) // row_bytes, 1000))
            ):
                if way.is_bytes:
                    chunk = [self._decode(row) for row in chunk]
                rows += chunk
                size_bytes += weigh(chunk)
                if len(rows) > config.max_rows:
                    return TooLarge("rows")
                if size_bytes > config.max_bytes:
                    return TooLarge("bytes")
        finally:
            cursor.close(True)  # noqa: FBT003 - positional in APSW
        if not self._statement:
            return SqlError("the query is empty")
        columns = way.columns or self._columns
        return Table(columns, tuple(rows), way.is_bytes, self._uses_chance)

    def _decode(self, row: Row) -> Row:
        def text(value: Value) -> Value:
            is_bytes = isinstance(value, bytes)
            return value.decode(self._codec, "ignore") if is_bytes else value

        half = len(row) // 2
        pairs = zip(row[:half], row[half:], strict=True)
        return tuple(text(value) if is_text else value for value, is_text in pairs)

    def _inspect(self, cursor: apsw.Cursor, sql: str, _bindings: object) -> bool:
        """Judge a prepared statement before its first row (SQLite calls this)."""
        if not cursor.has_vdbe:  # a trailing comment
            return True
        if self._statement:
            raise _DeniedError("several statements")
        if cursor.is_explain:
            raise _DeniedError("EXPLAIN")
        columns = cursor.get_description()
        if not cursor.is_readonly or not columns:
            raise _DeniedError("not a query")
        if self._asks_clock and not self._way.is_timed:
            raise _AsksClockError
        self._statement = sql
        self._columns = tuple([column[0] for column in columns])
        self._limit_values(len(columns))
        return True

    def _limit_values(self, width: int) -> None:
        """Bound what a row weighs, which nothing can look at before all of it is in memory."""
        max_bytes = self._config.max_bytes
        ceiling = self._config.max_value_bytes
        if squares := self._squares or int(self._reads_virtual):
            ceiling = min(ceiling, _SQUARE_VALUE_BYTES // squares)
        if self._scans > _LONG_SCANS:
            ceiling = min(ceiling, _LONG_SCANS * self._config.max_value_bytes // self._scans)
        longest = max(max_bytes // (6 * width), _WIDE_VALUE_BYTES)
        if self._way.lengths == "short":
            # Of short values many rows fit at once, and few at once take twice the time.
            longest = min(
                longest, max(max_bytes // (4 * width * _ROWS_AT_ONCE), _SHORT_VALUE_BYTES)
            )
        self._longest, self._ceiling = min(longest, ceiling), ceiling
        length = ceiling if self._way.lengths == "records" else self._longest
        self.connection.limit(apsw.SQLITE_LIMIT_LENGTH, length)

    def _authorize(
        self, action: int, first: str | None, second: str | None, *_where: str | None
    ) -> int:
        """Judge one thing that a statement would do, while it is compiled (SQLite calls this)."""
        # Full-text search asks for this of its own accord, while a query that passed is running.
        if action == apsw.SQLITE_PRAGMA and first == "data_version" and self._statement:
            return apsw.SQLITE_OK
        kind = self._kinds.get(str(first).lower()) if action == apsw.SQLITE_READ else None
        if kind is None:
            denied = forbidden(action, first, second)
        else:
            denied = f"table {first}" if kind == "foreign" else ""
            self._reads_virtual |= kind == "virtual"
        if action == apsw.SQLITE_FUNCTION:
            function = str(second).lower()
            self._scans += function in SCANS
            self._squares += function in SQUARES
            self._asks_clock |= function in CLOCK_FUNCTIONS
        if denied:
            self._denied = denied
        return apsw.SQLITE_DENY if denied else apsw.SQLITE_OK

    def _out_of_steps(self) -> bool:
        self._steps_left -= self._stride
        self._spent = self._steps_left <= 0
        return self._spent

    def _explain(self, error: Exception, way: _Way) -> Result:
        if result := _REASONS.get(type(error)):
            return result
        if isinstance(error, apsw.IOError):
            raise UserError(f"{self._path}: SQLite cannot read it ({error}); look after the disk")
        if isinstance(error, apsw.InterruptError):
            return TimedOut("steps" if self._spent else "wall")
        if isinstance(error, _DeniedError) or self._denied:
            return Denied(self._denied or str(error))
        if way.lengths == "records" and isinstance(error, apsw.SQLError):
            return TooLarge("bytes")  # a PRAGMA is no part of another statement
        # A place in the query around is none in the query.
        offset = -1 if way.columns else getattr(error, "error_offset", -1)
        return SqlError(str(error).replace(self._path, "the database"), offset)


def _as_bytes(statement: str, width: int) -> str:
    """Wrap a query so that text arrives as bytes, beside flags that say which cells are text."""
    names = [f"c{i}" for i in range(width)]
    values = [f"CASE typeof({c}) WHEN 'text' THEN CAST({c} AS BLOB) ELSE {c} END" for c in names]
    flags = [f"typeof({c}) = 'text'" for c in names]
    return _around(statement, names, values + flags)


def _as_bounded(statement: str, width: int, longest: int) -> str:
    """Wrap a query so that values longer than this are too big, though records may be longer."""
    names = [f"c{i}" for i in range(width)]
    values = [f"iif(octet_length({c}) > {longest}, zeroblob({_MOST_STRIDE}), {c})" for c in names]
    return _around(statement, names, values)


def _around(statement: str, names: list[str], values: list[str]) -> str:
    # Without semicolons and comments around it, which are statements of nothing.
    words = [token for token in tokenize(statement) if not token.is_sign(";")]
    body = statement[words[0].start : words[-1].end] if words else ""
    query = "_q"
    while query in statement.lower():  # which may have a table of that name
        query += "q"
    return f"WITH {query}({', '.join(names)}) AS ({body}) SELECT {', '.join(values)} FROM {query}"


def weigh(rows: list[Row] | tuple[Row, ...]) -> int:
    """Estimate the memory of rows in bytes: exact where texts are long, else some numbers off."""
    cells = len(rows[0]) * len(rows)
    text_bytes = len(marshal.dumps(rows))
    if text_bytes > _TEXT_BYTES * cells:
        return sum(map(getsizeof, chain.from_iterable(rows))) + _ROW_BYTES * len(rows) + 8 * cells
    return text_bytes + _ROW_BYTES * len(rows) + _CELL_BYTES * cells
