"""How a SQLite file that somebody else made is opened: read-only, and trusting nothing in it.

What a file says of its own tables runs when they are read: generated columns, CHECK constraints,
views. So whoever reads a database opens it with `connect`, which bounds what such code can do, and
reads under `reading`, which also bounds its time and memory. Queries that nobody has vetted need
more than that: `guard.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import apsw

from sqlenv.errors import UserError
from sqlenv.executor.functions import add_functions

_SWITCHES = {
    apsw.SQLITE_DBCONFIG_DEFENSIVE: 1,
    apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_ATTACH_CREATE: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_ATTACH_WRITE: 0,
    apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_VIEW: 1,
    # Gold queries say `country = "FR"`; stock SQLite reads that as a string.
    apsw.SQLITE_DBCONFIG_DQS_DML: 1,
}
_PRAGMAS = {
    "query_only": 1,
    "mmap_size": 0,
    "cell_size_check": 1,
    "cache_size": -2000,
}
_LIMITS = {
    # Also bounds each CREATE text while a schema loads, so a query's own length is checked apart.
    apsw.SQLITE_LIMIT_SQL_LENGTH: 1_000_000,
    apsw.SQLITE_LIMIT_COLUMN: 2000,
    apsw.SQLITE_LIMIT_EXPR_DEPTH: 1000,
    apsw.SQLITE_LIMIT_COMPOUND_SELECT: 500,
    apsw.SQLITE_LIMIT_VDBE_OP: 250_000,
    apsw.SQLITE_LIMIT_FUNCTION_ARG: 1000,
    apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    apsw.SQLITE_LIMIT_ATTACHED: 0,
    apsw.SQLITE_LIMIT_WORKER_THREADS: 0,
    apsw.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
}
_SHORTEST_LIMIT_BYTES = 100_000
"""Of a value: what no generated column of a small file needs."""

_NATIVE_VALUE_BYTES = 30_000
"""Of a value where SQLite's own functions take a time with its square."""

# What one reader may use up: processor time, a constant and some for each byte of the file, and
# SQLite's memory. Reading every cell of a file of 100 MB several times takes some 5 s.
_READING_S = 2.0
_READING_S_A_BYTE = 1e-6
_READING_HEAP_BYTES = 96_000_000
# Steps between two looks at the time, which takes as long as some 100 steps; by the file's size,
# because a step of a small file that is up to no good takes milliseconds.
_FEWEST_STEPS, _MOST_STEPS = 100, 100_000
_STEPS_A_BYTE = 0.01

_OVERDRAWN = (apsw.InterruptError, apsw.NoMemError, apsw.TooBigError, MemoryError)


def connect(
    path: Path,
    *,
    max_value_bytes: int | None = None,
    immutable: bool = True,
    vfs: str = "",
    replacing: bool = True,
) -> apsw.Connection:
    """Open a file read-only, every setting made.

    Args:
        path: The file.
        max_value_bytes: The longest string or blob; None for what the file can hold. What a
            generated column or a query computes may not be longer either.
        immutable: Read the file as if nobody could write it: no lock is asked for.
        vfs: Name of the layer below SQLite; empty for its own.
        replacing: Whether slow functions are replaced by those of `functions.py`, which know texts
            that are valid alone.

    Raises:
        apsw.Error: The file cannot be opened. That it is no database shows when it is read.
    """
    uri = f"file:{quote(bytes(path.resolve()))}?mode=ro{'&immutable=1' * immutable}"
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(uri, flags=flags, vfs=vfs or None, statementcachesize=0)
    if max_value_bytes is None:
        # Text of a UTF-16 file can take half as much again in UTF-8.
        max_value_bytes = max(2 * path.stat().st_size, _SHORTEST_LIMIT_BYTES)
    for switch, value in _SWITCHES.items():
        connection.config(switch, value)
    for limit, value in _LIMITS.items():
        connection.limit(limit, value)
    connection.limit(apsw.SQLITE_LIMIT_LENGTH, min(max_value_bytes, 2**31 - 1))
    if replacing:
        add_functions(connection)
    for name, value in _PRAGMAS.items():
        connection.pragma(name, value)
    return connection


def open_new(path: Path) -> apsw.Connection:
    """Open a file of ours to write, whatever bytes its name has; it is made where there is none."""
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
    return apsw.Connection(f"file:{quote(bytes(path.absolute()))}", flags=flags)


@contextmanager
def reading(
    path: Path, *, immutable: bool = True, replacing: bool = True
) -> Generator[apsw.Connection]:
    """Open a file for statements of our own, and close it; the calling thread reads.

    Args:
        path: The file.
        immutable: As for `connect`.
        replacing: As for `connect`; values are short where slow functions stay.

    Raises:
        UserError: Reading takes more time or memory than any honest file of that size.
    """
    size_bytes = path.stat().st_size
    limit_s = _READING_S + _READING_S_A_BYTE * size_bytes
    steps = min(max(_FEWEST_STEPS, int(_STEPS_A_BYTE * size_bytes)), _MOST_STEPS)
    try:
        with heap_limit(_READING_HEAP_BYTES):
            connection = connect(
                path,
                max_value_bytes=None if replacing else _NATIVE_VALUE_BYTES,
                immutable=immutable,
                replacing=replacing,
            )
            try:
                # Time of the processor: on a machine with much to do a reader is not the slower.
                end_s = time.thread_time() + limit_s
                connection.set_progress_handler(lambda: time.thread_time() > end_s, steps)
                yield connection
            finally:
                connection.close()
    except _OVERDRAWN as error:
        raise UserError(
            f"{path}: reading the database takes too much time or memory ({error}); "
            "leave it out, or drop its generated columns and constraints"
        ) from None


_heap = threading.Lock()
# Of those that hold one now. SQLite knows one limit for the process: the largest is in force.
_heap_limits: list[int] = []
# What the process's other connections held when the first of these came.
_heap_before = [0]


@contextmanager
def heap_limit(limit_bytes: int) -> Generator[None]:
    """Let SQLite use as much memory as this, and what other connections held before."""
    claim_heap(limit_bytes)
    try:
        yield
    finally:
        release_heap(limit_bytes)


def claim_heap(limit_bytes: int) -> None:
    """Begin what `release_heap` ends."""
    with _heap:
        if not _heap_limits:
            _heap_before[0] = apsw.memory_used()
        _heap_limits.append(limit_bytes)
        _limit_heap()


def release_heap(limit_bytes: int) -> None:
    """Give a limit back; without any there is none."""
    with _heap:
        _heap_limits.remove(limit_bytes)
        _limit_heap()


def _limit_heap() -> None:
    apsw.hard_heap_limit(_heap_before[0] + max(_heap_limits) if _heap_limits else 0)
