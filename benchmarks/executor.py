"""How long do queries take, one by one and in batches?

    python benchmarks/executor.py

Queries run on a small database: a tiny one, one that reads a table of 2,000 rows, one of 1,000
rows. Each is measured one by one, and in batches of 100 distinct queries. Prints a JSON object:
microseconds a query, of several rounds the quickest, which other programs disturbed least. To
compare with another checkout, run it there by turns.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor

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
    print(json.dumps(found))


def quickest(run: Callable[[Any], object], rounds: list[Any]) -> int:
    """Measure rounds of queries: microseconds a query of the quickest."""
    seconds = []
    for queries in rounds:
        start_s = time.perf_counter()
        run(queries)
        seconds.append((time.perf_counter() - start_s) / len(queries))
    return round(min(seconds) * 1e6)


if __name__ == "__main__":
    main()
