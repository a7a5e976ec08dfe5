"""What a large question file costs: many records in SynSQL's form, loaded by a run twice.

    python benchmarks/prepare.py --records 1000000 --databases 5000
    python benchmarks/prepare.py --records 100000 --databases 500 --prepare

Makes databases and data.json in a temporary folder (some 2 GB for a million). Then a run of
EXPO-SQL draws its 5,000 questions (of few records, one in twenty) and those held out, and executes
their gold queries: in a first start, with an empty cache, and in a second one. --prepare also times
launch.prepare between them. Each is a process of its own, whose memory is measured with that of its
helpers. A line of JSON each.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

_EVERY_S = 0.2
_NAMES = ("Ada", "Bo", "Cid", "Dee", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon")
_PLACES = ("Oslo", "Paris", "Lyon", "New York", "Rome", "Bern", "Graz", "Kyoto")
_START = """
import sys
from launch.config import load_config
from launch.data.preflight import held_out, load_split
from pathlib import Path
from sqlenv.cache import shared_cache
from sqlenv.executor import Executor
root, total = sys.argv[1:]
config = load_config("expo.yaml", [f"data.root={root}", f"data.train.total={total}"])
with Executor(config.executor, shared_cache()) as executor:
    held = held_out(config, config.data.root, executor)
    loaded = load_split(config, "train", config.data.root, executor, held=held)
assert len(loaded.examples) == int(total), loaded.lines()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--databases", type=int, default=5_000)
    parser.add_argument("--prepare", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "SynSQL-2.5M"
        make(root, records=options.records, databases=options.databases)
        # Of complex questions there is one in four, and of some golds the result is empty.
        total = min(5_000, options.records // 20)
        start = [sys.executable, "-c", _START, str(root), str(total)]
        checked = ["-m", "launch.prepare", "--data-root", str(root), "--out", f"{folder}/doubtful"]
        commands = {"first start": start, "second start": start}
        if options.prepare:
            prepare = [sys.executable, *checked]
            commands = {"first start": start, "prepare": prepare, "second start": start}
        for name, command in commands.items():
            measure(name, command, Path(folder) / "cache")


def make(root: Path, *, records: int, databases: int) -> None:
    """Write a folder in SynSQL's layout; the same numbers give the same records."""
    for number in range(databases):
        make_database(root / "databases", number)
    with (root / "data.json").open("w") as file:
        file.write("[")
        for number, record in enumerate(questions(records, databases)):
            file.write(",\n" * bool(number) + json.dumps(record))
        file.write("]")
    print(f"{(root / 'data.json').stat().st_size / 1e9:.2f} GB of records", flush=True)


def make_database(folder: Path, number: int) -> None:
    rng, path = Random(number), folder / f"db_{number}" / f"db_{number}.sqlite"
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as db:
        db.executescript(
            "PRAGMA synchronous = off; PRAGMA page_size = 1024;"
            "CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT);"
            "CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT, age INTEGER,"
            " city_id INTEGER REFERENCES city (id));"
        )
        cities = rng.sample(_PLACES, 2)
        db.executemany("INSERT INTO city VALUES (?, ?)", enumerate(cities))
        people = [(i, rng.choice(_NAMES), rng.randint(18, 80), i % 2) for i in range(4)]
        db.executemany("INSERT INTO person VALUES (?, ?, ?, ?)", people)
    db.close()


def questions(records: int, databases: int) -> Iterator[dict[str, Any]]:
    levels = ("Simple", "Moderate", "Complex", "Highly Complex")
    golds = (
        "SELECT name FROM person WHERE age > {n}",
        "SELECT count(*) FROM person WHERE city_id = {n} % 2",
        "SELECT c.name, avg(p.age) FROM person AS p JOIN city AS c ON c.id = p.city_id GROUP BY "
        "c.id HAVING avg(p.age) < {n}",
        "WITH old AS (SELECT * FROM person WHERE age > {n}) SELECT name FROM old ORDER BY age",
        "SELECT nme FROM person WHERE age = {n}",
    )
    for number in range(records):
        rng = Random(number)
        # One of twenty golds is wrong.
        kind = 4 if number % 20 == 0 else rng.randrange(4)
        place = rng.choice(_PLACES)
        yield {
            "db_id": f"db_{rng.randrange(databases)}",
            "sql_complexity": rng.choice(levels),
            "question_style": "Formal",
            "question": f"Question {number}: whom do we know in {place} at {rng.randint(1, 99)}?",
            "external_knowledge": "",
            "cot": f"To answer question {number}, " + "we look at the tables, " * 70,
            "sql": golds[kind].format(n=rng.randint(1, 80)),
        }


def measure(name: str, command: list[str], cache: Path) -> None:
    """Run a command, and print what it takes."""
    start_s, peaks = time.monotonic(), [0.0]
    environment = os.environ | {"MINIRL_CACHE": str(cache)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    threading.Thread(target=_watch, args=(process, peaks), daemon=True).start()
    status = process.wait()
    report = {"seconds": round(time.monotonic() - start_s, 1), "peak_mb": round(max(peaks))}
    told = {"what": name, **report, "status": status, "cpu_count": os.cpu_count()}
    print(json.dumps(told), flush=True)


def _watch(process: subprocess.Popen[bytes], peaks: list[float]) -> None:
    while process.poll() is None:
        peaks.append(max(peaks.pop(), _memory_mb(process.pid)))
        time.sleep(_EVERY_S)


def _memory_mb(pid: int) -> float:
    """Return the memory of a process and of its helpers, as far as it is their own."""
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    except (OSError, ValueError):  # it has just ended
        return 0.0
    own = (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return own + sum(map(_memory_mb, children))


if __name__ == "__main__":
    main()
