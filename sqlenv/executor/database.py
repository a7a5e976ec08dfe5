"""SQLite files that somebody else made: whether one can be used, its identity, how it is opened.

Generated columns and views are code in the file, which runs when they are read. `connect`
opens a file read-only, for which SQLite leaves CHECK constraints out, and bounds what such code
can do. Queries that nobody has vetted need more than that: `connection.py`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import apsw

from minirl.exchange import UserError
from sqlenv.cache import content_key, shared_cache
from sqlenv.executor.functions import add_functions

# What SQLite does not do by itself.
_SWITCHES = {
    apsw.SQLITE_DBCONFIG_DEFENSIVE: 1,
    apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA: 0,
    # Gold queries say `country = "FR"`; stock SQLite reads that as a string.
    apsw.SQLITE_DBCONFIG_DQS_DML: 1,
}
_PRAGMAS = {"query_only": 1, "cell_size_check": 1}
_LIMITS = {
    # Also bounds each CREATE text while a schema loads, so a query's own length is checked apart.
    apsw.SQLITE_LIMIT_SQL_LENGTH: 1_000_000,
    apsw.SQLITE_LIMIT_VDBE_OP: 250_000,
    apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    apsw.SQLITE_LIMIT_ATTACHED: 0,
}
_RACY_NS = 2_000_000_000
"""A file that changed less than this ago may change again within the same tick of the clock."""

_MAGIC = b"SQLite format 3\0"
# Of a writer that did not finish; an immutable connection silently reads stale or uncommitted rows.
_LEFTOVERS = ("-wal", "-journal")
# What quick_check says of a broken file, and not of a broken promise such as NOT NULL.
_BROKEN = ("***", "Tree ", "Page ", "Freelist")

Identity = tuple[str, int, int, int, int, int]
"""Path, device, inode, size, and when the contents and the inode were changed."""
DatabaseQuery = tuple[Path, str]
"""A database and a query."""
_T = TypeVar("_T")


def connect(path: Path, *, max_value_bytes: int = 2**31 - 1, vfs: str = "") -> apsw.Connection:
    """Open a file read-only, as if nobody could write it: no lock is asked for.

    No string or blob is longer than `max_value_bytes`, also of what is computed; `vfs` names the
    layer below SQLite, empty for its own.
    """
    uri = f"file:{quote(bytes(path.resolve()))}?mode=ro&immutable=1"
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(uri, flags=flags, vfs=vfs or None, statementcachesize=0)
    for switch, value in _SWITCHES.items():
        connection.config(switch, value)
    for limit, value in _LIMITS.items():
        connection.limit(limit, value)
    connection.limit(apsw.SQLITE_LIMIT_LENGTH, max_value_bytes)
    add_functions(connection)
    for name, value in _PRAGMAS.items():
        connection.pragma(name, value)
    return connection


def codec_of(connection: apsw.Connection) -> str:
    """Name the encoding of a database's texts, as SQLite and Python do."""
    return str(connection.pragma("encoding"))


def open_new(path: Path) -> apsw.Connection:
    """Open a file of ours to write, whatever bytes its name has; it is made where there is none."""
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
    return apsw.Connection(f"file:{quote(bytes(path.absolute()))}", flags=flags)


@contextmanager
def reading(path: Path) -> Generator[apsw.Connection]:
    """Open a file for statements of our own, and close it.

    Collations that SQLite lacks, such as Android's LOCALIZED, compare characters here.
    """
    with closing(connect(path)) as connection:
        connection.collation_needed(_add_collation)
        yield connection


def fetch_all(connection: apsw.Connection, sql: str, *bindings: str) -> list[Any]:
    """Return the rows of a statement, which tells their types."""
    return connection.execute(sql, bindings).fetchall()


def _add_collation(connection: apsw.Connection, name: str) -> None:
    connection.create_collation(name, lambda one, two: (one > two) - (one < two))


_WAITS, _WAIT_S = 8, 0.4  # a query that meets the heap limit frees its memory
_heap = threading.RLock()  # a limit may end wherever a thread happens to be
_heap_limits: list[int] = []


@contextmanager
def heap_limit(limit_bytes: int) -> Generator[None]:
    """Let SQLite use as much memory as this in this process; of several limits, the largest."""
    with _heap:
        _heap_limits.append(limit_bytes)
        apsw.hard_heap_limit(max(_heap_limits))
    try:
        yield
    finally:
        with _heap:
            _heap_limits.remove(limit_bytes)
            apsw.hard_heap_limit(max(_heap_limits, default=0))


def with_memory(function: Callable[[], _T]) -> _T:
    """Call a function that runs our own statements, again while models' queries hold all memory."""
    for _ in range(_WAITS):
        with suppress(apsw.NoMemError):
            return function()
        time.sleep(_WAIT_S)
    return function()


def check_database(path: Path) -> None:
    """Make sure that a file is a complete SQLite database which nobody is writing.

    Raises:
        UserError: It is not, or has unfinished writes beside it.
    """
    identify(path)
    try:
        with path.open("rb") as file:
            header = file.read(len(_MAGIC))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); allow it, or copy it"
        ) from None
    if header != _MAGIC:
        what = "not a SQLite database" if header else "the database file is empty"
        raise UserError(f"{path}: {what}; download it again or fix the path")
    # SQLite writes beside the file itself; whoever links files one by one has a link to that too.
    for place in dict.fromkeys((path, path.resolve())):
        for suffix in _LEFTOVERS:
            _refuse_leftover(place.with_name(place.name + suffix))


def _refuse_leftover(path: Path) -> None:
    """Refuse unfinished writes; an empty file has none, nor one with a zeroed header."""
    try:
        with path.open("rb") as file:
            is_done = file.read(1) in (b"", b"\0")
    except FileNotFoundError:
        return
    except OSError:
        is_done = False
    if not is_done:
        raise UserError(
            f"{path}: unfinished writes; close the program that writes the database, "
            "or open and close it once with sqlite3"
        )


def check_contents(path: Path) -> None:
    """Make sure that a database can be read: its pages are whole. One that did not change is read
    once.
    """
    _check_contents(identify(path))


@lru_cache(maxsize=4096)
def _check_contents(identity: Identity) -> None:
    path = Path(identity[0])
    check_database(path)
    try:
        with reading(path) as connection:
            answer = str(connection.pragma("quick_check", 1))
    except apsw.Error as error:
        answer = f"*** {error}"
    if answer.startswith(_BROKEN):
        words = " ".join(answer.removeprefix("*** ").split())
        raise UserError(f"{path}: the database is corrupt ({words:.80}); fetch it again")


def identify(path: Path) -> Identity:
    """Tell this version of a file from others, without reading it."""
    name = os.fspath(path)
    try:
        status = os.stat(name)  # noqa: PTH116 - once a query, and three times as quick
    except (OSError, ValueError):
        raise UserError(f"{name}: no such file; check the path") from None
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return name, status.st_dev, status.st_ino, status.st_size, *times


def fingerprint(path: Path) -> str:
    """Digest the contents of a file; one that did not change is read once, by any process."""
    return _digest(identify(path))


@lru_cache(maxsize=32_768)
def _digest(identity: Identity) -> str:
    name, *version = identity
    key = content_key("file", *version)
    if isinstance(known := shared_cache().get(key), str):
        return known
    with Path(name).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(version[-2:]) > _RACY_NS:
        shared_cache()[key] = found
    return found
