"""Results of gold queries: computed once, kept in memory and in a cache on disk."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
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
        self._memory: dict[GoldKey, Result] = {}
        self._memory_bytes = 0

    def get(self, queries: Sequence[DatabaseQuery], run: RunMany) -> list[Result]:
        """Look results up in memory, then on disk; run the rest, all at once, and keep them."""
        keys = [(identify(database), sql) for database, sql in queries]
        distinct = dict.fromkeys(keys)
        known = {key: self._look_up(key) for key in distinct}
        missing = [key for key in distinct if known[key] is None]
        results = run([(Path(identity[0]), sql) for identity, sql in missing]) if missing else []
        found = {key: result for key, result in known.items() if result is not None}
        for key, result in zip(missing, results, strict=True):
            found[key] = result
            by_chance = isinstance(result, Table) and result.nondeterministic
            if result not in TRANSIENT and not by_chance:
                self._remember(key, result)
                if self._disk:
                    self._disk[self._name(key)] = _to_json(result)
        return [found[key] for key in keys]

    def _look_up(self, key: GoldKey) -> Result | None:
        result = self._memory.get(key)
        if result is None and self._disk:
            result = self._read(key, self._disk)
            if result is not None:
                self._remember(key, result)
        return result

    def _remember(self, key: GoldKey, result: Result) -> None:
        """Keep a result in memory; where all take too much, the others are forgotten."""
        rows = result.rows if isinstance(result, Table) else ()
        size_bytes = _ENTRY_BYTES + 4 * len(key[1]) + (weigh(rows) if rows else 0)
        if self._memory_bytes + size_bytes > _MEMORY_BYTES:
            self._memory.clear()
            self._memory_bytes = 0
        self._memory[key] = result
        self._memory_bytes += size_bytes

    def _name(self, key: GoldKey) -> str:
        identity, sql = key
        return content_key("gold result", fingerprint(Path(identity[0])), sql, self._context)

    def _read(self, key: GoldKey, disk: DiskCache) -> Result | None:
        # What is no result is the same as none: it is written again.
        with contextlib.suppress(LookupError, ValueError, TypeError):
            return _from_json(disk.get(self._name(key)))
        return None


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
