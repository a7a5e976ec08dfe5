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
    gold = data / "evaluation_suite/gold"
    folders = {
        name: place / name for name in ("predicted", "gold/exec_result", "resource/databases")
    }
    for folder in folders.values():
        folder.mkdir(parents=True)
    standards, databases, queries = [], [], {}
    for number, (standard, files) in enumerate(questions(gold)):
        for at, (change, write) in enumerate(CHANGES.items()):
            name, database = f"local{number:03}{at:02}", f"db{number:03}"
            rng = random.Random(f"{number} {change}")
            source = rng.choice(files)
            width = load(source, place / f"resource/databases/{database}_{source.stem}.sqlite")
            names = [f"c{column}" for column in range(width)]
            queries[name] = (write(names, rng), f"{database}_{source.stem}")
            standards.append(standard | {"instance_id": name})
            databases.append({"instance_id": name, "db": f"{database}_{source.stem}"})
            (place / f"predicted/{name}.sql").write_text(queries[name][0])
            for file in files:
                copy = folders["gold/exec_result"] / file.name.replace(
                    standard["instance_id"], name
                )
                copy.write_bytes(file.read_bytes())
    write_lines(place / "gold/spider2lite_eval.jsonl", standards)
    write_lines(place / "spider2-lite.jsonl", databases)
    references = read_references(place / "gold")
    folder = folders["resource/databases"]
    return [
        (name, Case(sql, "SELECT 1", folder / f"{database}.sqlite", reference=references[name]))
        for name, (sql, database) in queries.items()
    ]


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
        columns = ", ".join(f"c{column} NUMERIC" for column in range(width))
        marks = ", ".join("?" * width)
        connection = sqlite3.connect(database)
        connection.execute(f"CREATE TABLE g ({columns})")
        values = [[value or None for value in row] for row in rows if len(row) == width]
        connection.executemany(f"INSERT INTO g VALUES ({marks})", values)
        connection.commit()
        connection.close()
    return width


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
