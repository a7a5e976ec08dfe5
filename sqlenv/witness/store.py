"""Witnesses in the cache: made when they are first asked for, shared by all runs and processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import get_args

import apsw

from sqlenv.cache import DiskCache, content_key, shared_cache
from sqlenv.config import AnswerConfig
from sqlenv.evaluators.official import as_spider_runs
from sqlenv.executor.database import fingerprint
from sqlenv.types import ExecutionMatch, MatchMode
from sqlenv.witness.draw import draw_witnesses

_log = logging.getLogger(__name__)

VERSION = 14
"""Of how witnesses are made: raise it to make them anew."""
_MODE_OF: Mapping[ExecutionMatch, MatchMode] = {
    "bird_ex": "set",
    "spider_ex": "test_suite",
    **{mode: mode for mode in get_args(MatchMode)},
}


def open_store(config: AnswerConfig) -> WitnessStore | None:
    """Open the witnesses that settings ask for, in the cache that all runs share."""
    if not config.witnesses:
        return None
    return WitnessStore(shared_cache(), match=config.match, count=config.witnesses)


class WitnessStore:
    """Makes witnesses that tell queries apart by the rule `match`, at most `count` of a gold query,
    and keeps them in a cache. Threads may share one, and processes a cache.
    """

    def __init__(self, cache: DiskCache, *, match: ExecutionMatch, count: int = 8) -> None:
        self._cache, self._count = cache, count
        self._mode, self._is_spider = _MODE_OF[match], match == "spider_ex"
        self._making: dict[str, threading.Lock] = {}
        self._found: dict[str, tuple[Path, ...]] = {}

    def of(self, database: Path, gold: str) -> tuple[Path, ...]:
        """Return the witnesses of a gold query of SQLite, as database files; none where none can
        be made, and the question is judged on its own database alone. What lacks memory now is made
        when it is asked for again.

        Raises:
            UserError: The database cannot be read.
        """
        # Spider's program runs a query without its DISTINCTs.
        gold = as_spider_runs(gold) if self._is_spider else gold
        parts = (VERSION, fingerprint(database), gold, self._mode, self._count)
        key = content_key("witnesses", *parts)
        found = self._found.get(key)
        if found is None or not all(map(Path.exists, found)):  # the cache drops the oldest
            # Of one gold query at a time; others do not wait.
            with self._making.setdefault(key, threading.Lock()):
                try:
                    found = self._found[key] = self._files(key, database, gold)
                except apsw.NoMemError:
                    _log.warning("%s: no memory for witnesses of a gold query", database.stem)
                    return ()
        return found

    def _files(self, key: str, database: Path, gold: str) -> tuple[Path, ...]:
        draw = cache(partial(draw_witnesses, gold, database, mode=self._mode, count=self._count))
        if (count := self._cache.get(key)) is None:
            count = self._cache[key] = len(draw())
        return tuple(
            self._cache.made_file(f"{key} {at}", lambda file, at=at: file.write_bytes(draw()[at]))
            for at in range(count)
        )
