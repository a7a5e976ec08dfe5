"""Results of gold queries: computed once, kept in memory and in a cache on disk."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import apsw

from sqlenv.cache import DiskCache, content_key
from sqlenv.config import ExecutorConfig
from sqlenv.executor import allowed
from sqlenv.executor.connection import weigh
from sqlenv.executor.database import DatabaseQuery, Identity, fingerprint, identify
from sqlenv.types import Result, Table, TimedOut, TooLarge, Value

LIMITS = {"max_steps", "max_rows", "max_bytes", "max_value_bytes", "now"}
"""Settings that can change a result."""
VERSION = 1
"""Of how queries run, beside settings and what `allowed` lists: another one runs them anew."""
TRANSIENT = (TimedOut("wall"), TooLarge("memory"))
"""Results that a machine with less to do might not give."""
_MEMORY_BYTES = 128_000_000
"""Of the results that are held in memory: those of some 10,000 questions of Spider take 10 MB."""
# What an entry takes beside its text and its rows.
_ENTRY_BYTES = 1000

GoldKey = tuple[Identity, str]
RunMany = Callable[[Sequence[DatabaseQuery]], list[Result]]


class GoldCache:
    """Results by what is in the database, the query and the limits that matter. Thread-safe.

    Callers that ask for one result at the same time share one computation. If that fails, its
    caller gets the exception, and the others compute for themselves.
    """

    def __init__(self, config: ExecutorConfig, disk: DiskCache | None):
        self._disk = disk
        limits = config.model_dump(mode="json", include=LIMITS)
        # Functions that turn a time into local time know the zone.
        zone = (*time.tzname, time.timezone)
        program = (VERSION, allowed.listed(), apsw.sqlite_lib_version())
        self._context = json.dumps([*program, zone, sorted(limits.items())])
        self._lock = threading.Lock()
        self._found: dict[GoldKey, Future[Result]] = {}
        # Of those that are there, the one used longest ago first.
        self._sizes: OrderedDict[GoldKey, int] = OrderedDict()
        self._memory_bytes = 0

    def get(self, queries: Sequence[DatabaseQuery], run: RunMany) -> list[Result]:
        """Look results up in memory, then on disk; run the rest, all at once, and keep them."""
        keys = [(identify(database), sql) for database, sql in queries]
        with self._lock:
            ours = [key for key in dict.fromkeys(keys) if key not in self._found]
            self._found.update((key, Future()) for key in ours)
            futures = [self._found[key] for key in keys]
            for key in self._sizes.keys() & set(keys):
                self._sizes.move_to_end(key)
        if ours:
            computed: dict[GoldKey, Result] = {}
            try:
                computed = self._compute(ours, run)
            finally:
                self._end(ours, computed)
        try:
            return [future.result() for future in futures]
        except CancelledError:  # who computed it failed: the turn is ours
            return self.get(queries, run)

    def _compute(self, keys: Sequence[GoldKey], run: RunMany) -> dict[GoldKey, Result]:
        known = {key: self._read(key) for key in keys} if self._disk else {}
        found = {key: result for key, result in known.items() if result is not None}
        missing = [key for key in keys if key not in found]
        results = run([(Path(identity[0]), sql) for identity, sql in missing]) if missing else []
        for key, result in zip(missing, results, strict=True):
            found[key] = result
            if self._disk and _is_lasting(result):
                self._disk[self._name(key)] = _to_json(result)
        return found

    def _end(self, keys: Sequence[GoldKey], computed: Mapping[GoldKey, Result]) -> None:
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

    def _name(self, key: GoldKey) -> str:
        identity, sql = key
        return content_key("gold result", fingerprint(Path(identity[0])), sql, self._context)

    def _read(self, key: GoldKey) -> Result | None:
        assert self._disk is not None
        # What is no result is the same as none: it is written again.
        with contextlib.suppress(LookupError, ValueError, TypeError):
            return _from_json(self._disk.get(self._name(key)))
        return None


def _is_lasting(result: Result) -> bool:
    return not (result in TRANSIENT or (isinstance(result, Table) and result.nondeterministic))


def _weigh(key: GoldKey, result: Result) -> int:
    rows = result.rows if isinstance(result, Table) else ()
    return _ENTRY_BYTES + 4 * len(key[1]) + (weigh(rows) if rows else 0)


_KINDS = {kind.__name__: kind for kind in get_args(Result)}


def _to_json(result: Result) -> list[Any]:
    """Write a result, bytes in hexadecimal, without anything that runs when it is read."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    if isinstance(result, Table):
        values["rows"] = [[_cell_to_json(value) for value in row] for row in result.rows]
    return [type(result).__name__, values]


def _from_json(written: Any) -> Result:
    """Read a result; LookupError, ValueError or TypeError where it is none."""
    name, values = written
    if name == "Table":
        columns = tuple(values["columns"])
        rows = tuple(tuple([_cell(value) for value in row]) for row in values["rows"])
        if any(len(row) != len(columns) for row in rows):
            raise ValueError("rows are not as wide as the table")
        values |= {"columns": columns, "rows": rows}
    return _KINDS[name](**values)


def _cell_to_json(value: Value) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _cell(value: Any) -> Value:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
