"""Witnesses on disk: made when they are first asked for, shared by all runs and processes."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlenv.executor.database import fingerprint
from sqlenv.types import ExecutionMatch, MatchMode
from sqlenv.witness.distillation import Witnesses, distil

_log = logging.getLogger(__name__)

VERSION = 1
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
_FACTS = "witnesses.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """The witnesses of a gold query: database files, and what `Witnesses` says of them.

    Attributes:
        files: Of none the question is judged on its own database alone.
        neighbours: How many queries near the gold were tried.
        told: How many of them a witness tells from it.
        reason: Why there is no file.
    """

    files: tuple[Path, ...]
    neighbours: int
    told: int
    reason: str


class WitnessStore:
    """Makes witnesses and keeps them in a folder. Threads may share one, and processes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}
        self._found: dict[str, Kept] = {}

    def of(self, database: Path, gold: str, *, match: ExecutionMatch, count: int) -> Kept:
        """Return the witnesses of a gold query of SQLite, at most `count`.

        Raises:
            UserError: The database cannot be read.
        """
        mode = _MODE_OF[match]
        facts = [VERSION, fingerprint(database), gold, mode, count]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        if key not in self._found:
            with self._lock:
                making = self._making.setdefault(key, threading.Lock())
            with making:  # of one gold query at a time; others do not wait
                place = self._folder / key[:2] / key
                if not (place / _FACTS).exists():
                    _keep(distil(gold, database, mode=mode, count=count), place)
                    if reason := _read(place).reason:
                        _log.info("%s: no witness of a gold query: %s", database.stem, reason)
                self._found[key] = _read(place)
        return self._found[key]


def _keep(made: Witnesses, place: Path) -> None:
    """Write a folder whole; of two writers at a time the second's goes."""
    place.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=place.parent))
    for number, contents in enumerate(made.contents):
        (new / f"{number}.sqlite").write_bytes(contents)
    facts = {
        "neighbours": made.neighbours,
        "untold": [{"change": one.change, "sql": one.sql} for one in made.untold],
        "reason": made.reason,
    }
    (new / _FACTS).write_text(json.dumps(facts, indent=1))
    try:
        new.rename(place)
    except OSError:
        shutil.rmtree(new)


def _read(place: Path) -> Kept:
    facts = json.loads((place / _FACTS).read_text())
    told = facts["neighbours"] - len(facts["untold"])
    files = tuple(sorted(place.glob("*.sqlite")))
    return Kept(files, facts["neighbours"], told, facts["reason"])
