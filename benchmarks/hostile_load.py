"""Does memory stay flat under hostile load, and does every legal answer come, right and in time?

    python benchmarks/hostile_load.py
    python benchmarks/hostile_load.py --minutes 2 --threads 32

Threads run the hostile statements of the tests, each followed by a legal query whose rows are
known. All limits but that of time are those of training. Memory, sampled every half a second, is
flat if the mean of the last minute is at most 10 % and 20 MB above that of the second minute.
Violations are a statement that takes more than twice the time limit (time in which the machine ran
other programs is left out), a wrong legal answer, and changed bytes of the database. Prints one
JSON object; exit status 1 if memory is not flat, or after a violation. Linux only.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, median

from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Result, Table
from tests.sqlenv.hostile import (
    Waiting,
    digest_folder,
    name_end,
    read_hostile,
    read_legal,
    read_memory,
)
from tests.worlds import TOWN, make_file

_SAMPLE_S = 0.5
_CASES, _LEGAL = read_hostile(), read_legal()


class Load:
    """Runs statements in threads until told to stop, and counts what came of them."""

    def __init__(self, executor: Executor, database: Path) -> None:
        self._executor, self._database = executor, database
        self._bytes = digest_folder(database.parent)
        self._lock, self.stop = threading.Lock(), threading.Event()
        self.ends, self.violations = Counter[str](), Counter[str]()
        self.slowest = (0.0, "")
        self.legal_s: list[float] = []

    def run(self, seed: int) -> None:
        """Run all statements in a random order, again and again."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            for case in rng.sample(_CASES, len(_CASES)):
                if self.stop.is_set():
                    return
                result, seconds = self._timed(case.sql)
                end = name_end(result)
                late = seconds > 2 * self._executor.config.timeout_s
                with self._lock:
                    self.ends[end.split(" ", 1)[0] if end.startswith("Denied") else end] += 1
                    self.slowest = max(self.slowest, (round(seconds, 2), case.sql[:120]))
                    self.violations["longer than twice the limit"] += late
                self.check(*rng.choice(_LEGAL))

    def check(self, sql: str, rows: str) -> None:
        """Run a legal query."""
        answer, seconds = self._timed(sql)
        is_right = isinstance(answer, Table) and repr(answer.rows) == rows
        is_same = digest_folder(self._database.parent) == self._bytes
        with self._lock:
            self.legal_s.append(seconds)
            self.violations["wrong legal answer"] += not is_right
            self.violations["changed bytes"] += not is_same

    def _timed(self, sql: str) -> tuple[Result, float]:
        with Waiting(threading.get_native_id()) as waiting:
            start_s = time.monotonic()
            result = self._executor.execute(self._database, sql)
            return result, time.monotonic() - start_s - waiting.seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="at least 2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=2.0, help="of one statement")
    options = parser.parse_args()
    # No query waits for the end of another: the time of a statement is its own.
    config = ExecutorConfig(workers=options.threads, timeout_s=options.timeout_s)
    with tempfile.TemporaryDirectory() as folder, Executor(config) as executor:
        load = Load(executor, make_file(Path(folder) / "town.sqlite", TOWN))
        for legal in _LEGAL:
            load.check(*legal)
        idle_s, load.legal_s = median(load.legal_s), []
        minutes = run_load(load, options.threads, options.minutes)
    is_flat = minutes[-1] <= 1.1 * minutes[1] + 20
    report = vars(options) | {
        "run": dict(load.ends.most_common()),
        "violations": dict(load.violations),
        "slowest_s": load.slowest,
        "legal": {"count": len(load.legal_s), "idle_s": idle_s, "s": median(load.legal_s)},
        "rss_mb_by_minute": minutes,
        "is_flat": is_flat,
    }
    print(json.dumps(report))
    sys.exit(not is_flat or any(load.violations.values()))


def run_load(load: Load, threads: int, minutes: float) -> list[float]:
    """Run threads for a time; return the mean memory of each minute in MB."""
    running = [threading.Thread(target=load.run, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    start_s, samples = time.monotonic(), list[list[int]]()
    while (minute := (time.monotonic() - start_s) / 60) < minutes:
        if minute >= len(samples):
            samples.append([])
        samples[-1].append(read_memory("VmRSS"))
        time.sleep(_SAMPLE_S)
    load.stop.set()
    for thread in running:
        thread.join()
    return [round(fmean(one) / 1e6, 1) for one in samples]


if __name__ == "__main__":
    main()
