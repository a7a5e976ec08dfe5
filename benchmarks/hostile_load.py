"""Does memory stay flat under hostile load, and does every legal answer stay right?

    python benchmarks/hostile_load.py
    python benchmarks/hostile_load.py --minutes 2 --threads 32

Threads run the hostile statements of the tests, each followed by a legal query whose rows are
known. All limits but that of time are those of training. Memory is that of this process,
sampled every half a second; it is flat if the mean of the last minute is at most 10 % and
20 MB above the mean of the second minute. Violations are a statement that takes more than twice the
time limit (time in which the machine ran other programs is left out), a wrong legal answer, and
changed bytes of the database. Prints one JSON object; exit status 1 if memory is not flat, or after
a violation. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Table
from tests.sqlenv.conftest import make_database
from tests.sqlenv.hostile import (
    Case,
    Waiting,
    digest_folder,
    name_end,
    read_hostile,
    read_legal,
    read_memory,
)

_SAMPLE_S = 0.5


class Load:
    """Runs statements in threads until told to stop, and counts what came of them."""

    def __init__(self, executor: Executor, database: Path, timeout_s: float):
        self._executor = executor
        self._database = database
        self._timeout_s = timeout_s
        self._bytes = digest_folder(database.parent)
        self._cases = read_hostile()
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.ends: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()
        self.slowest: tuple[float, str] = (0.0, "")

    def run(self, seed: int) -> None:
        """Run all statements in a random order, again and again."""
        rng = random.Random(seed)
        cases, legal = self._cases.copy(), read_legal()
        while not self.stop.is_set():
            rng.shuffle(cases)
            for case in cases:
                if self.stop.is_set():
                    return
                self._attack(case)
                self._check(*rng.choice(legal))

    def _attack(self, case: Case) -> None:
        with Waiting(threading.get_native_id()) as waiting:
            start_s = time.monotonic()
            end = name_end(self._executor.execute(self._database, case.sql))
            seconds = time.monotonic() - start_s - waiting.seconds()
        with self._lock:
            self.ends[end.split(" ", 1)[0] if end.startswith("Denied") else end] += 1
            self.slowest = max(self.slowest, (round(seconds, 2), case.sql[:120]))
            self.violations["longer than twice the limit"] += seconds > 2 * self._timeout_s

    def _check(self, sql: str, rows: str) -> None:
        answer = self._executor.execute(self._database, sql)
        is_right = isinstance(answer, Table) and repr(answer.rows) == rows
        is_same = digest_folder(self._database.parent) == self._bytes
        with self._lock:
            self.ends["legal queries"] += 1
            self.violations["wrong legal answer"] += not is_right
            self.violations["changed bytes"] += not is_same


def main() -> None:
    options = parse_arguments()
    # No query waits for the end of another: the time of a statement is its own.
    config = ExecutorConfig(workers=options.threads, timeout_s=options.timeout_s)
    with tempfile.TemporaryDirectory() as folder, Executor(config) as executor:
        load = Load(executor, make_database(Path(folder) / "town.sqlite"), options.timeout_s)
        samples = run_load(load, options.threads, options.minutes * 60)
    memory = summarise(samples)
    report = vars(options) | {
        "run": dict(load.ends.most_common()),
        "violations": dict(load.violations),
        "slowest_s": load.slowest,
        **memory,
        "load_average": os.getloadavg()[1],
        "cpu_count": os.cpu_count(),
    }
    print(json.dumps(report))
    sys.exit(not memory["is_flat"] or any(load.violations.values()))


def run_load(load: Load, threads: int, seconds: float) -> list[tuple[float, int]]:
    """Run threads for a time; give the memory as (seconds since the start, bytes)."""
    running = [threading.Thread(target=load.run, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    start_s = time.monotonic()
    samples: list[tuple[float, int]] = []
    while (now_s := time.monotonic() - start_s) < seconds:
        samples.append((now_s, read_memory("VmRSS")))
        time.sleep(_SAMPLE_S)
    load.stop.set()
    for thread in running:
        thread.join()
    return samples


def summarise(samples: list[tuple[float, int]]) -> dict[str, object]:
    """Compare the second minute with the last one."""
    end_s = samples[-1][0]

    def mean(start_s: float, stop_s: float) -> float:
        return statistics.fmean(size for at_s, size in samples if start_s <= at_s <= stop_s) / 1e6

    second, last = mean(60, 120), mean(end_s - 60, end_s)
    return {
        "rss_mb_second_minute": round(second, 1),
        "rss_mb_last_minute": round(last, 1),
        "rss_mb_max": round(max(size for _, size in samples) / 1e6, 1),
        "rss_mb_by_minute": [round(mean(at, at + 60), 1) for at in range(0, round(end_s), 60)],
        "is_flat": last <= 1.1 * second + 20,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="at least 2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=2.0, help="of one statement")
    options = parser.parse_args()
    if options.minutes < 2:
        parser.error("--minutes: at least 2, since others are compared with the second minute")
    return options


if __name__ == "__main__":
    main()
