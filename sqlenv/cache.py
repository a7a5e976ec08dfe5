"""A cache on disk of what takes long to work out."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlenv.errors import UserError

_UNLIMITED = 1 << 60


class DiskCache:
    """A `diskcache` of JSON that evicts nothing; each value is on disk as soon as it is set.

    Threads may share one; each has its connection.
    """

    def __init__(self, folder: Path) -> None:
        import diskcache  # 0.1 s, which few commands need

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

    def __iter__(self) -> Iterator[str]:
        with self._naming():
            return iter(list(self._cache))

    def values(self) -> Iterator[Any]:
        """Give all values, in the order in which they were set first."""
        return map(self.get, self)

    def close(self) -> None:
        """Close this thread's connection; the next use opens another one."""
        self._cache.close()

    @contextmanager
    def _naming(self) -> Generator[None]:
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:  # a full disk, for example
            raise UserError(f"{self._folder}: cannot be read or written ({error})") from None
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise UserError(f"{self._folder}: damaged ({error}); delete it to ask again") from None
