"""Cases for Spider 2's program: its gold results, and queries that give them, changed or not.

The real databases are a download of their own. So each gold result becomes a table of a database
that is made here, and predictions select from it: all of it, other columns, other rows, other
values.
"""

from __future__ import annotations

import csv
import json
import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlenv.evaluators.comparators import Case
from sqlenv.evaluators.spider2 import read_references

Names = Sequence[str]

CHANGES: dict[str, Callable[[Names, random.Random], str]] = {
    "same": lambda names, _: f"SELECT {listed(names)} FROM g",
    "fenced": lambda names, _: f"```sql\nSELECT {listed(names)} FROM g\n```",
    "columns shuffled": lambda n, rng: f"SELECT {listed(rng.sample(n, len(n)))} FROM g",
    "one column less": lambda names, rng: f"SELECT {listed(without_one(names, rng))} FROM g",
    "one column more": lambda names, _: f"SELECT 'x', {listed(names)} FROM g",
    "rows reversed": lambda names, _: f"SELECT {listed(names)} FROM g ORDER BY rowid DESC",
    "one row less": lambda names, _: f"SELECT {listed(names)} FROM g WHERE rowid > 1",
    "rows twice": lambda names, _: f"SELECT {listed(names)} FROM g, (SELECT 1 UNION SELECT 2)",
    "no row": lambda names, _: f"SELECT {listed(names)} FROM g WHERE 0",
    "first of them": lambda names, _: f"SELECT {names[0]} FROM g",
    "a bit more": lambda names, _: f"SELECT {changed(names, '{} + 0.009')} FROM g",
    "more": lambda names, _: f"SELECT {changed(names, '{} + 0.02')} FROM g",
    "nothing is 0": lambda names, _: f"SELECT {changed(names, 'coalesce({}, 0)')} FROM g",
    "0 is nothing": lambda names, _: f"SELECT {changed(names, 'nullif({}, 0)')} FROM g",
    "texts": lambda names, _: f"SELECT {changed(names, 'CAST({} AS TEXT)')} FROM g",
    "floats": lambda names, _: f"SELECT {changed(names, '{} * 1.0')} FROM g",
    "rounded": lambda names, _: f"SELECT {changed(names, 'round({}, 2)')} FROM g",
    "sorted apart": lambda names, _: f"SELECT {listed(names)} FROM g ORDER BY 1",
    "a mixed column": lambda n, _: (
        f"SELECT {changed(n, 'CASE rowid WHEN 2 THEN NULL ELSE {} END')} FROM g"
    ),
    "blob": lambda names, _: f"SELECT {changed(names, 'CAST({} AS BLOB)')} FROM g",
    "none": lambda *_: "",
    "several": lambda names, _: f"SELECT {listed(names)} FROM g; SELECT 1",
    "broken": lambda names, _: f"SELECT {listed(names)} FORM g",
}


def listed(names: Names) -> str:
    return ", ".join(names)


def changed(names: Names, form: str) -> str:
    return ", ".join(form.format(name) for name in names)


def without_one(names: Names, rng: random.Random) -> Names:
    left = [name for name in names if name != rng.choice(names)]
    return left or names


def stage(data: Path, place: Path) -> list[tuple[str, Case]]:
    """Lay out what the program reads, and make the same cases for us, by name of the instance.

    Args:
        data: Of Spider 2, as its repository has it: `evaluation_suite/gold` is read.
        place: An empty folder.
    """
    results, databases = place / "gold/exec_result", place / "resource/databases"
    for folder in (place / "predicted", results, databases):
        folder.mkdir(parents=True)
    standards, records, cases = [], [], {}
    for number, (standard, files) in enumerate(questions(data / "evaluation_suite/gold")):
        for at, (change, write) in enumerate(CHANGES.items()):
            name, rng = f"local{number:03}{at:02}", random.Random(f"{number} {change}")
            source = rng.choice(files)
            database = databases / f"db{number:03}_{source.stem}.sqlite"
            sql = write([f"c{column}" for column in range(load(source, database))], rng)
            (place / f"predicted/{name}.sql").write_text(sql)
            standards.append(standard | {"instance_id": name})
            records.append({"instance_id": name, "db": database.stem})
            cases[name] = Case(sql, "SELECT 1", database)
            for file in files:
                copy = results / file.name.replace(standard["instance_id"], name)
                copy.write_bytes(file.read_bytes())
    for path, lines in (("gold/spider2lite_eval", standards), ("spider2-lite", records)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (place / f"{path}.jsonl").write_text(text)
    references = read_references(place / "gold")
    return [(name, replace(case, reference=references[name])) for name, case in cases.items()]


def questions(gold: Path) -> Iterator[tuple[dict[str, Any], list[Path]]]:
    for line in (gold / "spider2lite_eval.jsonl").read_text().splitlines():
        standard = json.loads(line)
        name = standard["instance_id"]
        files = sorted((gold / "exec_result").glob(f"{name}*.csv"))
        yield standard, [path for path in files if path.stem.partition("_")[0] == name]


def load(file: Path, database: Path) -> int:
    """Make a gold result the table `g` of a database; return its number of columns."""
    with file.open(newline="", encoding="utf-8-sig") as text:
        header, *rows = [row for row in csv.reader(text) if row]
    width = len(header)
    if not database.exists():
        with closing(sqlite3.connect(database)) as connection, connection:
            columns = ", ".join(f"c{column} NUMERIC" for column in range(width))
            connection.execute(f"CREATE TABLE g ({columns})")
            values = [[value or None for value in row] for row in rows if len(row) == width]
            marks = ", ".join("?" * width)
            connection.executemany(f"INSERT INTO g VALUES ({marks})", values)
    return width
