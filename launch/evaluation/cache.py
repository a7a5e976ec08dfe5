"""What must not be paid for twice: answers by key in a folder, and verdicts in a file."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minirl.run.files import keep_lines, naming
from sqlenv.errors import UserError

_UNLIMITED = 1 << 60


class DiskCache:
    """A `diskcache` of JSON that evicts nothing; each value is on disk as soon as it is set.

    Threads may share one; each has its connection.
    """

    def __init__(self, folder: Path) -> None:
        import diskcache  # 0.1 s, which a file of predictions does without

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
        except (OSError, sqlite3.OperationalError) as error:  # a full disk, for example
            raise UserError(f"{self._folder}: cannot be read or written ({error})") from None
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise UserError(f"{self._folder}: damaged ({error}); delete it to ask again") from None


class Progress:
    """What was found so far of several lists, in a file of JSON lines that is gone when the block
    ends well; one that was begun with other settings is refused.
    """

    def __init__(self, path: Path, settings: object) -> None:
        self._path, self._settings = path, settings
        self._found: defaultdict[str, list[Any]] = defaultdict(list)
        lines = keep_lines(path, list, advice="delete it to begin anew") if path.exists() else []
        if lines and lines[0] != [settings]:
            raise UserError(
                f"{path}: was begun with other settings; repeat these, or delete it to begin anew"
            )
        for name, piece in lines[1:]:
            self._found[name] += piece

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self._path.unlink(missing_ok=True)

    def found(self, name: str) -> list[Any]:
        """Return a list as far as it goes."""
        return list(self._found[name])

    def add(self, name: str, piece: list[Any]) -> None:
        """Keep the next piece of a list."""
        with naming(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                begin = [] if file.tell() else [[self._settings]]
                file.writelines(json.dumps(line) + "\n" for line in (*begin, [name, piece]))
