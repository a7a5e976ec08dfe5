"""JSON values by key in a folder, each on disk as soon as it is set: a kill loses none of them."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from sqlenv.errors import UserError

_UNLIMITED = 1 << 60
_WRITE_S = 2.0


class DiskCache:
    """A `diskcache` of JSON that evicts nothing. Threads may share one; each has its connection."""

    def __init__(self, folder: Path) -> None:
        import diskcache  # 0.1 s, which a short evaluation does without

        self._folder = folder
        with self._naming():
            self._cache = diskcache.Cache(
                str(folder),
                disk=diskcache.JSONDisk,
                disk_min_file_size=_UNLIMITED,  # all in one file
                eviction_policy="none",
                size_limit=_UNLIMITED,
                cull_limit=0,
            )

    def get(self, key: str) -> Any:
        """Return a value, None where there is none."""
        with self._naming():
            return self._cache.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        with self._naming():
            self._cache.set(key, value, retry=True)

    def values(self) -> Iterator[Any]:
        """Give all values, in the order in which they were set first."""
        with self._naming():
            keys = list(self._cache)
        return (self.get(key) for key in keys)

    def close(self) -> None:
        """Close this thread's connection; the next use opens another one."""
        self._cache.close()

    @contextmanager
    def _naming(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self._folder}: cannot be written ({error.strerror})") from None
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise UserError(
                f"{self._folder}: damaged ({error}); delete it to ask or judge again"
            ) from None


class Progress:
    """What was found so far of several lists, in pieces; gone when the block ends well.

    A kill costs the last seconds; a failure or an interruption nothing. Work of a few seconds
    leaves the disk alone. A folder that was begun with other settings is refused.
    """

    def __init__(self, folder: Path, settings: object) -> None:
        self._folder = folder
        self._cache = DiskCache(folder) if folder.exists() else None
        self._pending: dict[str, Any] = {} if self._cache else {"settings": settings}
        self._written_s = perf_counter()
        if self._cache and self._cache.get("settings") not in (None, settings):
            raise UserError(
                f"{folder}: was begun with other settings; repeat these, or delete it to begin anew"
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is not None and self._pending.keys() - {"settings"}:
            self._write()
        if self._cache is not None:
            self._cache.close()
        if kind is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def found(self, name: str) -> list[Any]:
        """Return a list as far as it goes."""
        found: list[Any] = []
        while self._cache and (piece := self._cache.get(f"{name} {len(found)}")):
            found += piece
        return found

    def add(self, name: str, at: int, piece: list[Any]) -> None:
        """Keep the next piece of a list, which begins at this place."""
        self._pending[f"{name} {at}"] = piece
        if perf_counter() - self._written_s > _WRITE_S:
            self._write()

    def _write(self) -> None:
        self._cache = self._cache or DiskCache(self._folder)
        for key, piece in self._pending.items():
            self._cache[key] = piece
        self._pending.clear()
        self._written_s = perf_counter()
