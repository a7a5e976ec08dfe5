"""Witnesses in the cache: made when they are first asked for, shared by all runs and processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from sqlenv.cache import DiskCache, content_key
from sqlenv.evaluators.official import as_spider_runs
from sqlenv.executor.database import fingerprint
from sqlenv.types import ExecutionMatch, MatchMode
from sqlenv.witness.distillation import distil

_log = logging.getLogger(__name__)

VERSION = 6
"""Of how witnesses are made: another one makes them anew."""
_MODE_OF: Mapping[ExecutionMatch, MatchMode] = {
    "bird_ex": "set",
    "omnisql_bird": "set",
    "spider_ex": "test_suite",
    "omnisql_spider_ex": "test_suite",
    "set": "set",
    "bag": "bag",
    "bag_ordered": "bag_ordered",
    "test_suite": "test_suite",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """The witnesses of a gold query: database files, and what `Witnesses` says of them.

    Attributes:
        files: Of none the question is judged on its own database alone.
        neighbours: How many queries near the gold were tried.
        told: How many of them a witness tells from it.
        reason: Why there is no file.
    """

    files: tuple[Path, ...] = ()
    neighbours: int = 0
    told: int = 0
    reason: str = ""


class WitnessStore:
    """Makes witnesses and keeps them in a cache. Threads may share one, and processes a cache.

    Args:
        cache: Where they are kept.
        match: The rule by which they have to tell queries apart.
        count: The most witnesses of a gold query.
        breaks_uniqueness: As for `read_source`.
    """

    def __init__(
        self,
        cache: DiskCache,
        *,
        match: ExecutionMatch,
        count: int = 4,
        breaks_uniqueness: bool = False,
    ) -> None:
        self._cache = cache
        self._mode, self._is_spider = _MODE_OF[match], match.endswith("spider_ex")
        self._count, self._breaks_uniqueness = count, breaks_uniqueness
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}
        self._found: dict[str, Kept] = {}

    def of(self, database: Path, gold: str) -> Kept:
        """Return the witnesses of a gold query of SQLite.

        Raises:
            UserError: The database cannot be read.
        """
        # Spider's program runs a query without its DISTINCTs.
        gold = as_spider_runs(gold, keep_distinct=False) if self._is_spider else gold
        options = (self._mode, self._count, self._breaks_uniqueness)
        key = content_key("witnesses", VERSION, fingerprint(database), gold, *options)
        found = self._found.get(key)
        if found is None or not all(map(Path.exists, found.files)):  # the cache drops the oldest
            with self._lock:
                making = self._making.setdefault(key, threading.Lock())
            with making:  # of one gold query at a time; others do not wait
                found = self._found[key] = self._read(key) or self._make(key, database, gold)
        return found

    def _make(self, key: str, database: Path, gold: str) -> Kept:
        made = distil(
            gold,
            database,
            mode=self._mode,
            count=self._count,
            breaks_uniqueness=self._breaks_uniqueness,
        )
        if made.reason:
            _log.info("%s: no witness of a gold query: %s", database.stem, made.reason)
        for number, contents in enumerate(made.contents):
            self._cache.store_file(f"{key} {number}", BytesIO(contents))
        told = made.neighbours - len(made.untold)
        self._cache[key] = [len(made.contents), made.neighbours, told, made.reason]
        kept = self._read(key)
        assert kept is not None
        return kept

    def _read(self, key: str) -> Kept | None:
        if (facts := self._cache.get(key)) is None:
            return None
        files = []
        for number in range(facts[0]):
            file = self._cache.open_file(f"{key} {number}")
            if file is None:
                return None
            with file:
                files.append(Path(file.name))
        return Kept(tuple(files), *facts[1:])
