"""Results of gold queries: computed once, kept in memory and on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path

import apsw

from sqlenv.config import ExecutorConfig
from sqlenv.errors import UserError
from sqlenv.evaluators.comparators import Judgement
from sqlenv.evaluators.votes import Ballot
from sqlenv.executor.channel import decode, encode, pack, unpack
from sqlenv.executor.database import Identity, fingerprint, identify
from sqlenv.executor.guard import weigh
from sqlenv.types import Result, Table, TimedOut, TooLarge

Query = tuple[Path, str]

# What can change the result, beside the database and the query.
_LIMITS = {"max_steps", "max_rows", "max_bytes", "max_value_bytes", "max_sql_chars"}
_LIMITS |= {"reverse_unordered"}
TRANSIENT = (TimedOut("wall"), TooLarge("memory"))
"""Results that a machine with less to do might not give."""
_MEMORY_BYTES = 128_000_000
"""Of the results that are held in memory: those of some 10,000 questions of Spider take 10 MB."""
# What an entry takes beside its text and its rows.
_ENTRY_BYTES = 1000

Key = tuple[Identity, str]


class GoldCache:
    """Results by what is in the database, the query and the limits that matter. Thread-safe.

    Callers that ask for one result at the same time share one computation. If that fails, its
    caller gets the exception, and the others compute for themselves.
    """

    def __init__(self, config: ExecutorConfig):
        self._folder = config.cache_dir
        limits = config.model_dump(include=_LIMITS)
        # Functions that turn a time into local time know the zone.
        zone = (*time.tzname, time.timezone)
        self._context = json.dumps([apsw.sqlite_lib_version(), zone, sorted(limits.items())])
        self._lock = threading.Lock()
        self._memory: OrderedDict[Key, tuple[Result, int]] = OrderedDict()
        self._memory_bytes = 0
        self._under_way: dict[Key, Future[Result]] = {}

    def get(
        self, queries: Sequence[Query], run: Callable[[Sequence[Query]], list[Result]]
    ) -> list[Result]:
        """Look results up in memory, then on disk; run the rest, all at once, and keep them."""
        keys = [(identify(database), sql) for database, sql in queries]
        found: dict[Key, Result] = {}
        while missing := [key for key in dict.fromkeys(keys) if key not in found]:
            ours, theirs = self._share_out(missing, found)
            try:
                found |= self._compute(ours, run)
            finally:
                self._end(ours, found)
            for key, result in theirs.items():
                with contextlib.suppress(CancelledError):  # it failed: the turn is ours
                    found[key] = result.result()
        return [found[key] for key in keys]

    def keep(self, query: Query, result: Result) -> None:
        """Keep a result that was computed elsewhere, if results like it are kept."""
        self._store((identify(query[0]), query[1]), result)

    def _share_out(
        self, missing: Sequence[Key], found: dict[Key, Result]
    ) -> tuple[list[Key], dict[Key, Future[Result]]]:
        """Take what is in memory; of the rest, say what to compute and what others compute now."""
        ours: list[Key] = []
        theirs: dict[Key, Future[Result]] = {}
        with self._lock:
            for key in missing:
                if key in self._memory:
                    self._memory.move_to_end(key)
                    found[key] = self._memory[key][0]
                elif key in self._under_way:
                    theirs[key] = self._under_way[key]
                else:
                    self._under_way[key] = Future()
                    ours.append(key)
        return ours, theirs

    def _compute(
        self, keys: Sequence[Key], run: Callable[[Sequence[Query]], list[Result]]
    ) -> dict[Key, Result]:
        known = {key: self._read(key) for key in keys} if self._folder else {}
        found = {key: result for key, result in known.items() if result is not None}
        for key, result in found.items():
            self._remember(key, result)
        missing = [key for key in keys if key not in found]
        results = run([(Path(identity[0]), sql) for identity, sql in missing]) if missing else []
        for key, result in zip(missing, results, strict=True):
            found[key] = result
            self._store(key, result)
        return found

    def _end(self, keys: Sequence[Key], found: Mapping[Key, Result]) -> None:
        """Hand results to those who wait for them, or let them try for themselves."""
        with self._lock:
            futures = {key: self._under_way.pop(key) for key in keys}
        for key, future in futures.items():
            if key in found:
                future.set_result(found[key])
            else:
                future.cancel()

    def _read(self, key: Key) -> Result | None:
        # A damaged or foreign file is the same as none: it is written again.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            return _read(self._path(self._folder, key)) if self._folder else None
        return None

    def _store(self, key: Key, result: Result) -> None:
        if result in TRANSIENT or (isinstance(result, Table) and result.nondeterministic):
            return
        self._remember(key, result)
        if self._folder:
            try:
                _write(self._path(self._folder, key), result)
            except OSError as error:
                raise UserError(
                    f"{self._folder}: cannot keep gold results here ({error.strerror}); "
                    "set cache_dir to a folder with room that you may write"
                ) from None

    def _remember(self, key: Key, result: Result) -> None:
        size_bytes = _ENTRY_BYTES + 4 * len(key[1])
        if isinstance(result, Table) and result.rows:
            size_bytes += weigh(result.rows)
        if size_bytes > _MEMORY_BYTES:
            return
        with self._lock:
            self._memory_bytes += size_bytes - self._memory.pop(key, (None, 0))[1]
            self._memory[key] = result, size_bytes
            while self._memory_bytes > _MEMORY_BYTES:
                self._memory_bytes -= self._memory.popitem(last=False)[1][1]

    def _path(self, folder: Path, key: Key) -> Path:
        identity, sql = key
        text = json.dumps([fingerprint(Path(identity[0])), sql, self._context])
        name = hashlib.sha256(text.encode()).hexdigest()
        return folder / name[:2] / f"{name}.msgpack"


def _read(path: Path) -> Result:
    result = decode(unpack(path.read_bytes()))
    if isinstance(result, Judgement | Ballot):
        raise ValueError("not a result")
    if isinstance(result, Table) and any(len(row) != result.width for row in result.rows):
        raise ValueError("not a table")
    return result


def _write(path: Path, result: Result) -> None:
    """Write a file whole or not at all: other processes may read and write the same one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(pack(encode(result)))
            file.flush()  # here a full disk is noticed
        except OSError:
            os.unlink(file.name)  # noqa: PTH108
            raise
    os.replace(file.name, path)  # noqa: PTH105
