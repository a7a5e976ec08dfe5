"""Results of gold queries: computed once, kept in memory and in a cache on disk."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import apsw

from sqlenv.cache import DiskCache, content_key
from sqlenv.config import ExecutorConfig
from sqlenv.executor import allowed
from sqlenv.executor.connection import weigh
from sqlenv.executor.database import Identity, fingerprint
from sqlenv.types import Result, RunQuery, Table, TimedOut, TooLarge

LIMITS = {"max_steps", "max_rows", "max_bytes", "max_value_bytes", "now"}
"""Settings that can change a result."""
VERSION = 1
"""Of how queries run, apart from settings and the names in `allowed`: raise it to run them anew."""
TRANSIENT = (TimedOut("wall"), TooLarge("memory"))
"""Results that a machine with less to do might not give."""
TRANSIENT_S = 300.0
"""For how long they stand: else a query that takes too long would run for every reply, and twice or
three times."""
_MEMORY_BYTES = 128_000_000
"""Of the results that are held in memory: those of some 10,000 questions of Spider take 10 MB."""
# What an entry takes beside its text and its rows.
_ENTRY_BYTES = 1000


class GoldCache:
    """Results by what is in the database, the query and the limits that matter. Thread-safe;
    callers that ask for one result at the same time may each compute it.
    """

    def __init__(self, config: ExecutorConfig, disk: DiskCache | None):
        self._disk = disk
        limits = config.model_dump(mode="json", include=LIMITS)
        # Functions that turn a time into local time know the zone.
        zone = (*time.tzname, time.timezone)
        program = (VERSION, allowed.listed(), apsw.sqlite_lib_version())
        self._context = json.dumps([*program, zone, sorted(limits.items())])
        self._memory: dict[tuple[Identity, str], Result] = {}
        self._memory_bytes = 0
        self._transient: dict[tuple[Identity, str], tuple[Result, float]] = {}  # and until when

    def get(self, database: Identity, sql: str, run: RunQuery) -> Result:
        """Look a result up in memory, then on disk; else run the query and keep what it gives."""
        if (found := self._memory.get((database, sql))) is not None:
            return found
        transient, until_s = self._transient.get((database, sql), (None, 0.0))
        if transient is not None and time.monotonic() < until_s:
            return transient
        path, key = Path(database[0]), ""
        if self._disk:
            key = content_key("gold result", fingerprint(path), sql, self._context)
            # What is no result is the same as none: it is written again.
            with contextlib.suppress(LookupError, ValueError, TypeError):
                found = _read(self._disk.get(key))
        if found is None:
            found = run(path, sql)
            if found in TRANSIENT:
                self._transient[database, sql] = found, time.monotonic() + TRANSIENT_S
                return found
            if isinstance(found, Table) and found.nondeterministic:
                return found
            if self._disk:
                self._disk[key] = _write(found)
        self._remember((database, sql), found)
        return found

    def _remember(self, key: tuple[Identity, str], result: Result) -> None:
        """Keep a result in memory; where all take too much, the others are forgotten."""
        rows = result.rows if isinstance(result, Table) else ()
        size_bytes = _ENTRY_BYTES + 4 * len(key[1]) + (weigh(rows) if rows else 0)
        if self._memory_bytes + size_bytes > _MEMORY_BYTES:
            self._memory.clear()
            self._memory_bytes = 0
        self._memory[key] = result
        self._memory_bytes += size_bytes


_KINDS = {kind.__name__: kind for kind in get_args(Result)}


def _write(result: Result) -> str:
    """Write a result as JSON, bytes in hexadecimal: nothing that runs when it is read."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return json.dumps([type(result).__name__, values], default=lambda blob: {"hex": blob.hex()})


def _read(written: str) -> Result:
    """Read a result; LookupError, ValueError or TypeError where it is none."""
    name, values = json.loads(written, object_hook=_blob)
    if name == "Table":
        values |= {"columns": tuple(values["columns"]), "rows": tuple(map(tuple, values["rows"]))}
        if any(len(row) != len(values["columns"]) for row in values["rows"]):
            raise ValueError("rows are not as wide as the table")
    return _KINDS[name](**values)


def _blob(written: dict[str, Any]) -> Any:
    return bytes.fromhex(written["hex"]) if "hex" in written else written
