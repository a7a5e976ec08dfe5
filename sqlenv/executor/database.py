"""SQLite files: whether one can be used, which file it is, and what is in it."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path

import apsw

from sqlenv.errors import UserError
from sqlenv.executor.connection import reading

_MAGIC = b"SQLite format 3\0"
# Left by a writer that did not finish. An immutable connection ignores them silently and reads
# stale or uncommitted rows.
_LEFTOVERS = ("-wal", "-journal")

_WAL = b"\x02"
_VERSION_BYTE = 18
# What quick_check says of a broken file, and not of a broken promise such as NOT NULL.
_BROKEN = ("***", "Tree ", "Page ", "Freelist")

Identity = tuple[str, int, int, int]


def check_database(path: Path) -> None:
    """Make sure that a file is a complete SQLite database which nobody is writing.

    Raises:
        UserError: The file is missing, cannot be read, is empty, not SQLite, or has unfinished
            writes beside it.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: no database file; check the path")
        with path.open("rb") as file:
            header = file.read(len(_MAGIC))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such database file; check the path") from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); allow it, or copy it"
        ) from None
    if not header:
        raise UserError(f"{path}: the database file is empty; download or build it again")
    if header != _MAGIC:
        raise UserError(f"{path}: not a SQLite database; download it again or fix the path")
    # SQLite writes beside the file itself; whoever links files one by one has a link to that too.
    for place in dict.fromkeys((path, path.resolve())):
        for suffix in _LEFTOVERS:
            _refuse_leftover(place.with_name(place.name + suffix))


def _refuse_leftover(path: Path) -> None:
    """Refuse what holds rows that are not in the database yet, or not any more.

    Raises:
        UserError: It does. An empty file does not, nor one whose header was zeroed when its writer
            was done.
    """
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
    """Make sure that a database can be read: nobody has locked it, and all of its pages are whole.

    The file is read once.

    Raises:
        UserError: It cannot; also as `check_database`.
    """
    check_database(path)
    with path.open("rb") as file:
        file.seek(_VERSION_BYTE)
        has_log = file.read(1) == _WAL
    try:
        # Reading a database with a log would make files beside it.
        if not has_log:
            with reading(path, immutable=False) as connection:
                connection.execute("SELECT count(*) FROM sqlite_schema")
        with reading(path) as connection:
            # A constraint is any expression; whether the rows keep it is not asked.
            connection.pragma("ignore_check_constraints", True)  # noqa: FBT003
            answer = str(connection.pragma("quick_check", 1))
    except (apsw.BusyError, apsw.LockedError):
        raise UserError(
            f"{path}: the database is locked by another program; close that, or copy the file"
        ) from None
    except apsw.Error as error:
        answer = f"*** {error}"
    if answer.startswith(_BROKEN):
        words = " ".join(answer.removeprefix("*** ").split())
        raise UserError(f"{path}: the database is corrupt ({words:.80}); fetch it again")


def identify(path: Path) -> Identity:
    """Tell this version of a file from others, without reading it.

    Raises:
        UserError: There is no such file.
    """
    name = os.fspath(path)
    try:
        status = os.stat(name)  # noqa: PTH116 - once a query, and three times as quick
    except (OSError, ValueError):
        raise UserError(f"{name}: no such database file; check the path") from None
    return name, status.st_ino, status.st_size, status.st_mtime_ns


def fingerprint(path: Path) -> str:
    """Digest the contents of a database; a file that did not change is read once a process."""
    return _digest(identify(path))


@lru_cache(maxsize=4096)
def _digest(identity: Identity) -> str:
    import hashlib  # which a worker never needs

    with Path(identity[0]).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
