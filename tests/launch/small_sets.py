"""Small published test sets on disk, as people download them: Spider's with its suite, BIRD's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.databases import make_file

PETS = [("ann", 3), ("bob", 5), ("cid", 5), ("dee", 9)]
# Question, gold query: on database pets, then on shop.
ASKED = [
    ("pets", "Who is there?", "SELECT name FROM pet"),
    ("pets", "Which ages are there?", "SELECT DISTINCT age FROM pet"),
    ("pets", "Who is the oldest?", "SELECT name FROM pet ORDER BY age DESC LIMIT 1"),
    ("shop", "How many items?", "SELECT count(*) FROM item"),
    ("shop", "Which items cost nothing?", "SELECT name FROM item WHERE price = 0"),
]
GOLDS = [gold for _, _, gold in ASKED]


def make_pets(path: Path, pets: Sequence[tuple[str, int]]) -> Path:
    rows = ", ".join(f"('{name}', {age})" for name, age in pets)
    return make_file(path, f"CREATE TABLE pet (name TEXT, age INT); INSERT INTO pet VALUES {rows}")


def make_shop(path: Path) -> Path:
    return make_file(
        path, "CREATE TABLE item (name TEXT, price INT); INSERT INTO item VALUES ('pen', 2)"
    )


def make_spider(root: Path) -> Path:
    """Make a Spider folder; its suite has a second file of pets, where nobody is of one age."""
    make_pets(root / "database" / "pets" / "pets.sqlite", PETS)
    make_shop(root / "database" / "shop" / "shop.sqlite")
    suite = root / "test_suite_database"
    make_pets(suite / "pets" / "pets.sqlite", PETS)
    make_pets(suite / "pets" / "pets_v1.sqlite", [("eve", 1), ("fay", 2), ("eve", 4)])
    make_shop(suite / "shop" / "shop.sqlite")
    records = [
        {"db_id": db_id, "question": question, "query": gold} for db_id, question, gold in ASKED
    ]
    (root / "dev.json").write_text(json.dumps(records))
    return root


def make_bird(root: Path) -> Path:
    """Make a BIRD folder of the same questions on the same databases."""
    make_pets(root / "dev_databases" / "pets" / "pets.sqlite", PETS)
    make_shop(root / "dev_databases" / "shop" / "shop.sqlite")
    levels = ["simple", "moderate", "challenging", "simple", "simple"]
    records = [
        {
            "question_id": number,
            "db_id": db_id,
            "question": question,
            "evidence": "",
            "SQL": gold,
            "difficulty": level,
        }
        for number, ((db_id, question, gold), level) in enumerate(zip(ASKED, levels, strict=True))
    ]
    (root / "dev.json").write_text(json.dumps(records))
    return root
