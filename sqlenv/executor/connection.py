"""One read-only connection, under every control that a query by a model needs.

| what a query tries | what stops it |
|---|---|
| writes, attached files, pragmas, unsafe functions and tables | `allowed.py`, while it compiles |
| several statements, EXPLAIN, parameters | `_inspect`, before its first row |
| running for ever | the step budget here, the deadline in `executor.py` |
| huge values | `_limit_values` |
| one slow call that nothing can interrupt | `database.py`, `allowed.py`, `functions.py` |
| many of them in a row, with no loop around | `_limit_values` |
| sorts and aggregates that fill memory | the heap limit in `executor.py` |
| many rows | `_fetch` |

Also marks results that depend on chance, or on a clock that runs (`functions.py`).
"""

from __future__ import annotations

import marshal
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from sys import getsizeof

import apsw

from minirl.exchange import UserError
from sqlenv.config import ExecutorConfig
from sqlenv.executor.allowed import CHANCE, SCANS, SQUARES, forbidden, read_tables
from sqlenv.executor.database import check_database, codec_of, connect
from sqlenv.executor.functions import CLOCK_FUNCTIONS, clock
from sqlenv.sql.lexer import MAX_QUERY_CHARS, tokenize
from sqlenv.types import Denied, Result, Row, SqlError, Table, TimedOut, TooLarge, Value

# What Python takes for a row, and for a number in it with its place.
_ROW_BYTES, _CELL_BYTES = 64, 40
# If cells are larger on average, texts are measured: Python's may have four times their UTF-8.
_TEXT_BYTES = 16
# A value in a result of very many columns may have at least this length, whatever `max_bytes` is.
_WIDE_VALUE_BYTES = 16_000
_ROWS_AT_ONCE = 100  # rows that are read together, of values that are short enough
_MOST_STRIDE = 2**31 - 1  # steps that SQLite can count at once
# `SQUARES` take time with the square of their input: one call may get this much, several calls
# share it.
_SQUARE_VALUE_BYTES = 30_000
# Calls of `SCANS` between two looks at the time that may get values of full length; if there are
# more, values are shorter.
_LONG_SCANS = 4

_FAILURES = (apsw.Error, UnicodeError, MemoryError)
_REASONS: dict[type[Exception], Result] = {
    apsw.NoMemError: TooLarge("memory"),
    MemoryError: TooLarge("memory"),
    apsw.TooBigError: TooLarge("bytes"),
    apsw.BindingsError: Denied("parameters"),
    UnicodeDecodeError: SqlError("the database holds text that is not valid"),
    UnicodeEncodeError: SqlError("the query is not valid Unicode text"),
}


class Connection:
    """A connection to one database, for one query at a time, which ends at `deadline_s`."""

    deadline_s: float

    def __init__(self, path: Path, config: ExecutorConfig):
        check_database(path)
        self._path = str(path)
        self._config = config
        try:
            self._connection = self._open()
            self._codec = codec_of(self._connection)
            self._tables = read_tables(self._connection, self._codec)
        except apsw.NoMemError:
            raise
        except apsw.Error as error:
            raise UserError(f"{path}: SQLite cannot read it ({error}); download it again") from None
        self._clock = clock(config.now)
        self._connections = {False: self._connection}  # by whether they ask our clock

    def run(self, sql: str, max_steps: int) -> Result:
        """Run one query of any text.

        The first run expects short values, reads many rows at a time and lacks our clock. If that
        does not do, the query runs again with the clock, or inside another one that bounds and
        mends texts (`_around`).

        Raises:
            UserError: The disk fails or pages are damaged, never by a query: none can write.
        """
        if len(sql) > MAX_QUERY_CHARS:
            return TooLarge("sql")
        if "\0" in sql:
            return SqlError("the query contains a NUL character")
        reads, self._is_timed, self._around = self._clock.reads, False, None
        while True:
            try:
                result = self._fetch(sql, max_steps)
            except _FAILURES as error:
                if isinstance(error, apsw.ExecTraceAbort) and not self._denied:
                    self._is_timed = True
                    continue
                if not self._may_help_around(error):
                    return self._explain(error)
                rest = sql.partition(self._statement)[2]
                sql = f"{_around(self._statement, len(self._columns), self._longest)};{rest}"
                self._around = error, self._columns
            else:
                if isinstance(result, Table) and self._clock.reads != reads:
                    return replace(result, nondeterministic=True)
                return result

    def interrupt(self) -> None:
        """End the query that is running; another thread calls this."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the connection."""
        for connection in self._connections.values():
            connection.close(True)  # noqa: FBT003 - positional in APSW

    def _open(self, *, vfs: str = "") -> apsw.Connection:
        bound = self._config.max_value_bytes
        connection = connect(Path(self._path), max_value_bytes=bound, vfs=vfs)
        # In memory: no temporary file; the heap limit bounds it.
        connection.pragma("temp_store", 2)
        return connection

    def _may_help_around(self, error: Exception) -> bool:
        if self._around or not self._columns:
            return False
        is_short = isinstance(error, apsw.TooBigError) and self._limit < self._ceiling
        return is_short or isinstance(error, UnicodeDecodeError)

    def _begin(self, max_steps: int) -> None:
        """Take the connection that is needed, with all the steps ahead and nothing seen yet."""
        if self._is_timed not in self._connections:
            self._connections[self._is_timed] = self._open(vfs=self._clock.name)
        self._connection = self._connections[self._is_timed]
        self._connection.exec_trace = self._inspect
        self._connection.authorizer = self._authorize
        self._steps_left, self._stride = max_steps, min(max_steps, _MOST_STRIDE)
        self._connection.set_progress_handler(self._out_of_steps, self._stride)
        self._columns: tuple[str, ...] = ()
        self._statement = ""
        self._denied = ""
        self._uses_chance = False
        self._asks_clock = False
        self._is_mended = False
        self._scans = self._squares = 0
        self._limit = self._longest = self._ceiling = self._config.max_value_bytes
        self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, self._limit)

    def _fetch(self, sql: str, max_steps: int) -> Result:
        """Run a query; an exception tells `run` how it ended, or that it has to run otherwise."""
        config = self._config
        self._begin(max_steps)
        cursor = self._connection.cursor()
        try:
            cursor.execute(sql)
            # The most that a row can take, at four bytes a character.
            row_bytes = 4 * min(self._limit, self._longest) * max(len(self._columns), 1)
            rows: list[Row] = []
            size_bytes = 0
            # One row at least, and no more than fit the limit even if all values have full length.
            while chunk := list(
                islice(cursor, min(1 + (config.max_bytes - size_bytes) // row_bytes, 1000))
            ):
                if self._around:
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
        return Table(self._columns, tuple(rows), self._is_mended, self._uses_chance)

    def _decode(self, row: Row) -> Row:
        """Take the texts out of a row of `_around`."""
        half = len(row) // 2
        pairs = zip(row[:half], row[half:], strict=True)
        return tuple([self._text(value) if is_text else value for value, is_text in pairs])

    def _text(self, value: Value) -> Value:
        if not isinstance(value, bytes):  # an empty one is NULL to APSW
            return value
        text = value.decode(self._codec, "ignore")
        self._is_mended |= text.encode(self._codec) != value
        return text

    def _inspect(self, cursor: apsw.Cursor, sql: str, _bindings: object) -> bool:
        """Say whether a prepared statement may run (SQLite calls this before its first row): not if
        it is denied, or if it may ask for the time and this connection lacks our clock.
        """
        if not cursor.has_vdbe:  # a trailing comment
            return True
        columns = cursor.get_description()
        if self._statement:
            self._denied = "several statements"
        elif cursor.is_explain:
            self._denied = "EXPLAIN"
        elif not cursor.is_readonly or not columns:
            self._denied = "not a query"
        elif self._is_timed or not self._asks_clock:
            self._statement = sql
            self._columns = self._around[1] if self._around else tuple([one[0] for one in columns])
            self._limit_values(len(self._columns))
            return True
        return False

    def _limit_values(self, width: int) -> None:
        """Bound what a row weighs, which nothing can look at before all of it is in memory."""
        max_bytes = self._config.max_bytes
        ceiling = self._config.max_value_bytes
        if self._squares:
            ceiling = min(ceiling, _SQUARE_VALUE_BYTES // self._squares)
        if self._scans > _LONG_SCANS:
            ceiling = min(ceiling, _LONG_SCANS * self._config.max_value_bytes // self._scans)
        self._ceiling = ceiling
        self._longest = min(max(max_bytes // (6 * width), _WIDE_VALUE_BYTES), ceiling)
        # Of short values many rows fit at once, and few at once take twice the time. A record of
        # SQLite's, such as a sorter's, may have the length of many values.
        short = max(max_bytes // (4 * width * _ROWS_AT_ONCE), _WIDE_VALUE_BYTES)
        self._limit = ceiling if self._around else min(self._longest, short)
        self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, self._limit)

    def _authorize(
        self, action: int, first: str | None, second: str | None, *_where: str | None
    ) -> int:
        """Allow or deny one action of a statement while it is compiled (SQLite calls this)."""
        is_open = self._tables.get(str(first).lower()) if action == apsw.SQLITE_READ else None
        if is_open is None:
            denied = forbidden(action, first, second)
        else:
            denied = "" if is_open else f"table {first}"
        if action == apsw.SQLITE_FUNCTION:
            function = str(second).lower()
            self._scans += function in SCANS
            self._squares += function in SQUARES
            self._asks_clock |= function in CLOCK_FUNCTIONS
            self._uses_chance |= function in CHANCE
        if denied:
            self._denied = denied
        return apsw.SQLITE_DENY if denied else apsw.SQLITE_OK

    def _out_of_steps(self) -> bool:
        self._steps_left -= self._stride
        return self._steps_left <= 0

    def _explain(self, error: Exception) -> Result:
        if result := _REASONS.get(type(error)):
            return result
        if isinstance(error, apsw.IOError | apsw.CorruptError):
            raise UserError(f"{self._path}: SQLite cannot read it ({error}); check disk and file")
        if isinstance(error, apsw.InterruptError):
            return TimedOut("steps" if self._steps_left <= 0 else "wall")
        if self._denied:
            return Denied(self._denied)
        offset = getattr(error, "error_offset", -1)
        if self._around:
            if isinstance(error, apsw.SQLError) and isinstance(self._around[0], apsw.TooBigError):
                return TooLarge("bytes")  # a PRAGMA is no part of another statement
            offset = -1  # a place in the query around is none in the query
        return SqlError(str(error).replace(self._path, "the database"), offset)


def _around(statement: str, width: int, longest: int) -> str:
    """Write a query around a statement. It returns texts as bytes, beside flags that say which
    cells are text, and fails at values of more than `longest` bytes, though records may be longer.
    """
    # Without the semicolons and comments around it.
    words = [token for token in tokenize(statement) if not token.is_sign(";")]
    body = statement[words[0].start : words[-1].end] if words else ""
    names = [f"c{i}" for i in range(width)]
    values = [
        f"CASE WHEN octet_length({c}) > {longest} THEN zeroblob({_MOST_STRIDE}) "
        f"WHEN typeof({c}) = 'text' THEN CAST({c} AS BLOB) ELSE {c} END"
        for c in names
    ]
    columns = values + [f"typeof({c}) = 'text'" for c in names]
    # Two LIMITs keep SQLite from making one query of both, which would compute values twice.
    return (
        f"WITH sqlenv_around({', '.join(names)}) AS (SELECT * FROM ({body}) LIMIT -1) "
        f"SELECT {', '.join(columns)} FROM sqlenv_around LIMIT -1"
    )


def weigh(rows: list[Row] | tuple[Row, ...]) -> int:
    """Estimate the memory of rows in bytes: exact where texts are long, else some numbers off."""
    cells = len(rows[0]) * len(rows)
    text_bytes = len(marshal.dumps(rows))
    if text_bytes > _TEXT_BYTES * cells:
        return sum(map(getsizeof, chain.from_iterable(rows))) + _ROW_BYTES * len(rows) + 8 * cells
    return text_bytes + _ROW_BYTES * len(rows) + _CELL_BYTES * cells
