"""How long do queries take, one by one and in batches, in both isolations?

    python benchmarks/executor.py
    python benchmarks/executor.py --repeats 3 --against ../old-checkout

Queries run on a small database: a tiny one, one that reads a table of 20,000 rows, one of 1,000
rows. Each is measured one by one, in batches of 200 distinct queries, and one by one beside a
thread of Python that never waits, as a trainer's. Prints one JSON object a checkout and isolation:
medians in microseconds a query, of rounds by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUERIES = {
    "tiny": "SELECT 1 -- {}",
    "typical": "SELECT g, count(*) FROM t WHERE n % 7 < 3 AND n <> {} GROUP BY g ORDER BY 2",
    "rows": "SELECT n, g FROM t LIMIT 1000 -- {}",
}
_SQL = """
CREATE TABLE t (n INTEGER, g TEXT);
WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 20000)
INSERT INTO t SELECT x, 'group ' || x % 20 FROM r
"""
_ONES, _BATCH, _BUSY = 300, 200, 20


def main() -> None:
    options = parse_arguments()
    if options.isolation:
        print(json.dumps(measure(options.isolation)))
        return
    runs: dict[tuple[Path, str], list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        for root in filter(None, (options.against, ROOT)):
            for isolation in ("thread", "process"):
                runs.setdefault((root, isolation), []).append(run(root, isolation))
    for (root, isolation), each in runs.items():
        medians = {name: round(statistics.median(one[name] for one in each)) for name in each[0]}
        who = "this" if root == ROOT else "other"
        print(json.dumps({"checkout": who, "isolation": isolation, "us": medians}))


def run(root: Path, isolation: str) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(Path(__file__).resolve()), "--isolation", isolation]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


def measure(isolation: str) -> dict[str, float]:
    """Measure the `sqlenv` that is imported: microseconds a query."""
    from sqlenv.config import ExecutorConfig
    from sqlenv.executor import Executor

    found = {}
    config = ExecutorConfig.model_validate({"isolation": isolation})
    with tempfile.TemporaryDirectory() as folder, Executor(config) as executor:
        database = make_database(Path(folder) / "t.sqlite")
        executor.start()
        executor.execute_many([(database, f"SELECT {number}") for number in range(100)])
        for name, sql in QUERIES.items():
            queries = [(database, sql.format(number)) for number in range(_BATCH)]
            start_s = time.perf_counter()
            for number in range(_ONES):
                executor.execute(*queries[number % _BATCH])
            found[f"{name} one by one"] = (time.perf_counter() - start_s) / _ONES * 1e6
            start_s = time.perf_counter()
            executor.execute_many(queries)
            found[f"{name} in batches"] = (time.perf_counter() - start_s) / _BATCH * 1e6
            with busy():
                start_s = time.perf_counter()
                for query in queries[:_BUSY]:
                    executor.execute(*query)
                found[f"{name} beside Python"] = (time.perf_counter() - start_s) / _BUSY * 1e6
    return found


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


def make_database(path: Path) -> Path:
    import apsw

    connection = apsw.Connection(str(path))
    connection.execute(_SQL)
    connection.close()
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--against", type=lambda text: Path(text).resolve(), help="a checkout")
    parser.add_argument("--isolation", choices=("thread", "process"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
