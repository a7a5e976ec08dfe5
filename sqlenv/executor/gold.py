"""Results of gold queries: computed once, kept in memory and on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
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
from sqlenv.executor.channel import RESULTS, pack, unpack
from sqlenv.executor.database import Identity, fingerprint, identify
from sqlenv.executor.guard import weigh
from sqlenv.types import Result, Table, TimedOut, TooLarge

Query = tuple[Path, str]

# What can change the result, beside the database and the query.
_LIMITS = {"max_steps", "max_rows", "max_bytes", "max_value_bytes", "max_sql_chars"}
_LIMITS |= {"reverse_unordered", "now"}
TRANSIENT = (TimedOut("wall"), TooLarge("memory"))
"""Results that a machine with less to do might not give."""
_MEMORY_BYTES = 128_000_000
"""Of the results that are held in memory: those of some 10,000 questions of Spider take 10 MB."""
# What an entry takes beside its text and its rows.
_ENTRY_BYTES = 1000

Key = tuple[Identity, str]
RunMany = Callable[[Sequence[Query]], list[Result]]


class GoldCache:
    """Results by what is in the database, the query and the limits that matter. Thread-safe.

    Callers that ask for one result at the same time share one computation. If that fails, its
    caller gets the exception, and the others compute for themselves.
    """

    def __init__(self, config: ExecutorConfig):
        self._folder = config.cache_dir
        limits = config.model_dump(mode="json", include=_LIMITS)
        # Functions that turn a time into local time know the zone.
        zone = (*time.tzname, time.timezone)
        self._context = json.dumps([apsw.sqlite_lib_version(), zone, sorted(limits.items())])
        self._lock = threading.Lock()
        self._found: dict[Key, Future[Result]] = {}
        # Of those that are there, the one used longest ago first.
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self._memory_bytes = 0

    def get(self, queries: Sequence[Query], run: RunMany) -> list[Result]:
        """Look results up in memory, then on disk; run the rest, all at once, and keep them."""
        keys = [(identify(database), sql) for database, sql in queries]
        with self._lock:
            ours = [key for key in dict.fromkeys(keys) if key not in self._found]
            self._found.update((key, Future()) for key in ours)
            futures = [self._found[key] for key in keys]
            for key in self._sizes.keys() & set(keys):
                self._sizes.move_to_end(key)
        if ours:
            computed: dict[Key, Result] = {}
            try:
                computed = self._compute(ours, run)
            finally:
                self._end(ours, computed)
        try:
            return [future.result() for future in futures]
        except CancelledError:  # who computed it failed: the turn is ours
            return self.get(queries, run)

    def keep(self, query: Query, result: Result) -> None:
        """Keep a result that was computed elsewhere, if results like it are kept."""
        self.get([query], lambda _: [result])

    def _compute(self, keys: Sequence[Key], run: RunMany) -> dict[Key, Result]:
        known = {key: self._read(key) for key in keys} if self._folder else {}
        found = {key: result for key, result in known.items() if result is not None}
        missing = [key for key in keys if key not in found]
        results = run([(Path(identity[0]), sql) for identity, sql in missing]) if missing else []
        for key, result in zip(missing, results, strict=True):
            found[key] = result
            if self._folder and _is_lasting(result):
                self._write(key, result)
        return found

    def _end(self, keys: Sequence[Key], computed: Mapping[Key, Result]) -> None:
        """Hand results to those who wait for them, or let them try for themselves."""
        sizes = {key: _weigh(key, result) for key, result in computed.items()}
        kept = {key for key in sizes if _is_lasting(computed[key]) and sizes[key] <= _MEMORY_BYTES}
        with self._lock:
            futures = {key: self._found[key] for key in keys}
            for key in futures.keys() - kept:
                del self._found[key]
            self._sizes.update((key, sizes[key]) for key in keys if key in kept)
            self._memory_bytes += sum(sizes[key] for key in kept)
            while self._memory_bytes > _MEMORY_BYTES:
                key, size_bytes = self._sizes.popitem(last=False)
                self._memory_bytes -= size_bytes
                del self._found[key]
        for key, future in futures.items():
            if key in computed:
                future.set_result(computed[key])
            else:
                future.cancel()

    def _path(self, key: Key) -> Path:
        identity, sql = key
        text = json.dumps([fingerprint(Path(identity[0])), sql, self._context])
        name = hashlib.sha256(text.encode()).hexdigest()
        return Path(self._folder or "") / name[:2] / f"{name}.msgpack"

    def _read(self, key: Key) -> Result | None:
        # A damaged or foreign file is the same as none: it is written again.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            result = unpack(self._path(key).read_bytes())
            is_whole = not isinstance(result, Table) or all(
                len(row) == result.width for row in result.rows
            )
            return result if isinstance(result, RESULTS) and is_whole else None
        return None

    def _write(self, key: Key, result: Result) -> None:
        """Write a file whole or not at all: other processes may read and write the same one."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, suffix=".part") as scratch:
                written = Path(scratch) / path.name
                written.write_bytes(pack(result))
                written.replace(path)
        except OSError as error:
            raise UserError(
                f"{self._folder}: cannot keep gold results here ({error.strerror}); "
                "set cache_dir to a folder with room that you may write"
            ) from None


def _is_lasting(result: Result) -> bool:
    return not (result in TRANSIENT or (isinstance(result, Table) and result.nondeterministic))


def _weigh(key: Key, result: Result) -> int:
    rows = result.rows if isinstance(result, Table) else ()
    return _ENTRY_BYTES + 4 * len(key[1]) + (weigh(rows) if rows else 0)
