"""The downloads that `launch.prepare` reads, in small: each in its own form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.databases import make_file

PEOPLE = """
CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT, age INTEGER, City TEXT);
INSERT INTO person VALUES
  (1, 'Ann', 30, 'New York'), (2, 'Bo', 20, 'Oslo'), (3, 'Cid', 20, 'Bern'), (4, 'Dee', 50, '12');
"""
GOLDS = (
    "SELECT name FROM person WHERE City = 'New York'",
    "SELECT nme FROM person",  # fails
    "SELECT name FROM person WHERE age > 90",  # empty
    "SELECT name FROM person ORDER BY age LIMIT 1",  # ties
    "SELECT count(*) FROM person",
    "SELECT avg(age) FROM person",
)
QUESTION = "Who of database {db} lives in New York, number {number}?"


def make_database(folder: Path, name: str, more: str = "") -> Path:
    """Make a database; each has a table of its own beside the common one."""
    script = f'{PEOPLE} CREATE TABLE "of {name}" (x INT); {more}'
    return make_file(folder / name / f"{name}.sqlite", script)


def records(names: Sequence[str], *, gold: str = "query", **more: Any) -> list[dict[str, Any]]:
    """Ask every gold of each database."""
    return [
        {
            "db_id": name,
            "question": QUESTION.format(db=name, number=number),
            gold: sql,
            **more,
        }
        for name in names
        for number, sql in enumerate(GOLDS)
    ]


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    columns = [[-1, "*"], [0, "id"], [0, "name"], [0, "age"], [0, "City"]]
    return [
        {
            "db_id": name,
            "table_names_original": ["person"],
            "table_names": ["person"],
            "column_names_original": columns,
            "column_names": [*columns[:3], [0, "years of age"], [0, "city"]],
            "column_types": ["text", "number", "text", "number", "text"],
            "primary_keys": [1],
            "foreign_keys": [],
        }
        for name in names
    ]


def make_spider(folder: Path) -> None:
    train, others, dev, test = ["farm", "shop"], ["bank"], ["club"], ["port"]
    for name in (*train, *others, *dev):
        make_database(folder / "database", name)
    for name in (*train, *others, *dev, *test):
        make_database(folder / "test_database", name)
    write(folder / "train_spider.json", records(train, sql=None, query_toks=[]))
    write(folder / "train_others.json", records(others, sql=None))
    write(folder / "dev.json", records(dev, sql=None))
    write(folder / "test.json", records(test, sql=None))
    write(folder / "tables.json", schemas((*train, *others, *dev)))
    write(folder / "test_tables.json", schemas(test))


def make_variants(root: Path) -> None:
    for split, names in (("train_spider", ["farm", "shop"]), ("dev", ["club"])):
        syn = records(names)
        for one in syn:
            one["SpiderQuestion"] = one.pop("question")
            one["SpiderSynQuestion"] = one["SpiderQuestion"].replace("lives", "dwells")
        write(root / "Spider-Syn" / f"{split}.json", syn)
    write(root / "spider-realistic" / "spider-realistic.json", records(["club"]))
    make_database(root / "Spider-DK" / "database", "new_pets_1")
    write(root / "Spider-DK" / "Spider-DK.json", records(["club", "new_pets_1"], type="SQL"))
    write(root / "Spider-DK" / "tables.json", schemas(["club", "new_pets_1"]))


DESCRIPTION = (
    "\ufefforiginal_column_name,column_name,column_description,data_format,value_description\r\n"
    ' NAME ,full name,"the caf\u00e9 name",text,"first\r\nand last"\r\n'
    "age,age,age in years,integer,\r\n"
)


def make_bird(folder: Path) -> None:
    places = {
        "train": (folder / "train", "train.json", "train_databases", ["mine", "mill", "farm_two"]),
        "dev": (folder / "dev_20240627", "dev.json", "dev_databases", ["pub"]),
    }
    for split, (place, file, databases, names) in places.items():
        asked = records(names, gold="SQL", evidence="young refers to age < 30")
        if split == "dev":
            asked = [
                {**one, "question_id": i, "difficulty": "simple"} for i, one in enumerate(asked)
            ]
        write(place / file, asked)
        write(place / f"{split}_tables.json", schemas(names))
        for name in names:
            path = make_database(place / databases, name)
            text = path.parent / "database_description" / "Person.csv"
            text.parent.mkdir()
            # The train files are in an old encoding.
            encoding = "utf-8" if split == "dev" else "cp1252"
            content = DESCRIPTION if split == "dev" else DESCRIPTION[1:]
            text.write_bytes(content.encode(encoding))


def make_synsql(folder: Path, databases: int = 4) -> None:
    levels = ("Simple", "Moderate", "Complex", "Highly Complex")
    names = [f"made_{number}" for number in range(databases)]
    for name in names:
        make_database(folder / "databases", name)
    asked = [
        {
            **one,
            "sql_complexity": levels[number % 4],
            "question_style": "Multi-turn Dialogue" if number % 5 == 0 else "Formal",
            "external_knowledge": "",
            "cot": "first, ...",
        }
        for number, one in enumerate(records(names, gold="sql"))
    ]
    write(folder / "data.json", asked)
    write(folder / "tables.json", [{**one, "ddls": []} for one in schemas(names)])


def make_spider2(folder: Path) -> None:
    make_database(folder / "databases", "sky")
    asked: list[Mapping[str, Any]] = [
        {"instance_id": "local001", "db_id": "sky", "question": "Q?", "external_knowledge": "k.md"},
        {"instance_id": "bq001", "db_id": "cloud", "question": "Q?", "external_knowledge": None},
    ]
    write(folder / "test.json", asked)
    write(folder / "resource" / "documents" / "k.md", "")
    (folder / "resource" / "documents" / "k.md").write_text("what RFM means")


def make_downloads(root: Path) -> Path:
    """Make all of them in OmniSQL's layout, finished prompts included."""
    make_spider(root / "spider")
    make_variants(root)
    make_bird(root / "bird")
    make_synsql(root / "SynSQL-2.5M")
    make_spider2(root / "spider2_sqlite")
    for name in ("train_spider", "dev_bird", "train_synsql"):
        write(root / f"{name}.json", [{"input_seq": "Task Overview", "output_seq": "SELECT 1"}])
    return root
