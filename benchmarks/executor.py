"""How long do queries take, one by one and in batches?

    python benchmarks/executor.py
    python benchmarks/executor.py --repeats 3 --against ../old-checkout

Queries run on a small database: a tiny one, one that reads a table of 2,000 rows, one of 1,000
rows. Each is measured one by one, in batches of 100 distinct queries, and one by one beside a
thread of Python that never waits, as a trainer's. Prints one JSON object a checkout: microseconds
a query, of several rounds by turns the quickest, which other programs disturbed least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

ROOT = Path(__file__).parents[1]
QUERIES = {
    "tiny": "SELECT 1 -- {}",
    "typical": "SELECT g, count(*) FROM t WHERE n % 7 < 3 AND n <> {} GROUP BY g ORDER BY 2",
    "rows": "SELECT n, g FROM t LIMIT 1000 -- {}",
}
_SQL = """
CREATE TABLE t (n INTEGER, g TEXT);
WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 2000)
INSERT INTO t SELECT x, 'group ' || x % 20 FROM r
"""
_BATCH, _ROUND = 100, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--against", type=lambda text: Path(text).resolve(), help="a checkout")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    checkouts = {"this": ROOT} | ({"other": options.against} if options.against else {})
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in checkouts}
    for _ in range(options.repeats):
        for who, root in checkouts.items():
            command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
            environment = os.environ | {"PYTHONPATH": str(root)}
            said = subprocess.check_output(command, env=environment, text=True)
            runs[who].append(json.loads(said))
    for who, each in runs.items():
        best = {name: round(min(one[name] for one in each)) for name in each[0]}
        print(json.dumps({"checkout": who, "us": best}))


def measure() -> dict[str, float]:
    """Measure the `sqlenv` that is imported: microseconds a query."""
    from sqlenv.config import ExecutorConfig
    from sqlenv.executor import Executor

    found = {}
    with tempfile.TemporaryDirectory() as folder, Executor(ExecutorConfig()) as executor:
        database = Path(folder) / "t.sqlite"
        apsw.Connection(str(database)).execute(_SQL)
        executor.execute_many([(database, f"SELECT {number}") for number in range(100)])
        for name, sql in QUERIES.items():
            queries = [(database, sql.format(number)) for number in range(_BATCH)]
            ones = [queries[at : at + _ROUND] for at in range(0, _BATCH, _ROUND)]

            def each(few: list[tuple[Path, str]]) -> None:
                for query in few:
                    executor.execute(*query)

            found[f"{name} one by one"] = quickest(each, ones)
            found[f"{name} in batches"] = quickest(executor.execute_many, [queries] * 3)
            with busy():
                found[f"{name} beside Python"] = quickest(each, ones)
    return found


def quickest(run: Callable[[Any], object], rounds: list[Any]) -> float:
    """Measure rounds of queries: microseconds a query of the quickest."""
    seconds = []
    for queries in rounds:
        start_s = time.perf_counter()
        run(queries)
        seconds.append((time.perf_counter() - start_s) / len(queries))
    return min(seconds) * 1e6


@contextmanager
def busy() -> Generator[None]:
    """Keep the interpreter busy."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
