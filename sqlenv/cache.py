"""Caches: in memory of what the text of a query says (`cached`), on disk of what takes long.

`shared_cache` is one for all runs, configs and processes: each entry is found by the contents of
all that decides it, so that nothing in it is ever out of date. Delete the folder to clear it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, TypeVarTuple

from minirl.exchange import UserError

_LIMIT_BYTES = 20_000_000_000
"""Size of a cache, from which on the oldest entries go."""
_WEEK_S = 7 * 86_400
MAX_CACHED_CHARS = 4_000  # of longer texts only the last one is remembered

Rest = TypeVarTuple("Rest")
R = TypeVar("R")


def cached(maxsize: int) -> Callable[[Callable[[str, *Rest], R]], Callable[[str, *Rest], R]]:
    """Cache a pure function of a query; of long ones the last, for a rambling policy fills memory.

    An entry costs some 100 times the length of the query.
    """

    def decorate(function: Callable[[str, *Rest], R]) -> Callable[[str, *Rest], R]:
        remembered, last = lru_cache(maxsize)(function), lru_cache(1)(function)

        @wraps(function)
        def call(sql: str, *rest: *Rest) -> R:
            return (last if len(sql) > MAX_CACHED_CHARS else remembered)(sql, *rest)

        return call

    return decorate


def cache_folder(name: str) -> Path:
    """Return a folder for what may be computed again: below MINIRL_CACHE if it is set."""
    base = os.environ.get("MINIRL_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "minirl" / name


def shared_cache() -> DiskCache:
    """Open the cache that all runs share."""
    return _open(cache_folder("sql"))


def content_key(kind: str, *parts: Any) -> str:
    """Name an entry by all that decides it, as JSON."""
    return f"{kind} {hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


class DiskCache:
    """A `diskcache` of JSON and of files; each value is on disk as soon as it is set.

    Threads and processes may share one; each thread has its connection.
    """

    def __init__(self, folder: Path) -> None:
        import diskcache  # 0.1 s, which few commands need

        self.folder = folder
        with self._naming():
            self._cache = diskcache.Cache(
                str(folder),
                disk=diskcache.JSONDisk,
                disk_min_file_size=1 << 60,  # all JSON in one file
                eviction_policy="least-recently-stored",
                size_limit=_LIMIT_BYTES,
            )
            self._sweep()

    def _sweep(self) -> None:
        """Remove, once a week, old files of no entry, as a kill or a full disk leaves them."""
        before_s, mark = time.time() - _WEEK_S, self.folder / "swept"
        if mark.exists() and mark.stat().st_mtime > before_s:
            return
        names = self._cache._sql("SELECT filename FROM Cache WHERE filename IS NOT NULL")
        entered = {self.folder / name for (name,) in names}
        for path in {*self.folder.glob("*/*/*.val")} - entered:
            with suppress(FileNotFoundError):  # evicted at this moment
                if path.stat().st_mtime < before_s:  # a newer one may be entered yet
                    path.unlink()
        mark.touch()

    def get(self, key: str) -> Any:
        """Return a value, None where there is none."""
        with self._naming():
            return self._cache.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        with self._naming():
            self._cache.set(key, value, retry=True)

    def made_file(self, key: str, make: Callable[[Path], object]) -> Path:
        """Return the path of a stored file, which is made first where there is none.

        Of two that make it at a time the first one's stays: others may go on to read it.
        """
        while (path := self.stored(key)) is None:
            with TemporaryDirectory() as folder:
                made = Path(folder) / "made"
                make(made)
                with made.open("rb") as file, self._naming():
                    is_first = self._cache.add(key, file, read=True, retry=True)
                    if not is_first and self.stored(key) is None:  # its file was deleted
                        file.seek(0)
                        self._cache.set(key, file, read=True, retry=True)
        return path

    def stored(self, key: str) -> Path | None:
        """Return the path of a stored file, None where there is none."""
        with self._naming(), suppress(FileNotFoundError):  # evicted at this moment
            if file := self._cache.get(key, read=True):
                with file:
                    return Path(file.name)
        return None

    def close(self) -> None:
        """Close this thread's connection; the next use opens another one."""
        self._cache.close()

    @contextmanager
    def _naming(self) -> Generator[None]:
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:  # a full disk, for example
            raise UserError(
                f"{self.folder}: cannot be read or written ({error}); free or allow it, or set "
                "MINIRL_CACHE to another folder"
            ) from None
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise UserError(f"{self.folder}: damaged ({error}); delete it to ask again") from None


_open = cache(DiskCache)
