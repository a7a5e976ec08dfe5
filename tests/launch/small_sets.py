"""Small published test sets on disk, as people download them: Spider's with its suite, BIRD's."""

from collections.abc import Sequence
from pathlib import Path

from tests.worlds import make_file, write

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


def write_golds(path: Path) -> Path:
    """Write the gold queries as predictions, a line a question."""
    path.write_text("".join(f"{gold}\n" for gold in GOLDS))
    return path


def make_pets(path: Path, pets: Sequence[tuple[str, int]]) -> Path:
    rows = ", ".join(f"('{name}', {age})" for name, age in pets)
    return make_file(path, f"CREATE TABLE pet (name TEXT, age INT); INSERT INTO pet VALUES {rows}")


def make_shop(path: Path) -> Path:
    return make_file(
        path, "CREATE TABLE item (name TEXT, price INT); INSERT INTO item VALUES ('pen', 2)"
    )


def _make(root: Path, databases: str, gold: str, **fields: Sequence[str]) -> Path:
    make_pets(root / databases / "pets" / "pets.sqlite", PETS)
    make_shop(root / databases / "shop" / "shop.sqlite")
    records = [
        {"question_id": number, "db_id": db_id, "question": question, gold: sql}
        | {name: values[number] for name, values in fields.items()}
        for number, (db_id, question, sql) in enumerate(ASKED)
    ]
    write(root / "dev.json", records)
    return root


def make_spider(root: Path) -> Path:
    """Make a Spider folder; its suite has a second file of pets, where nobody is of one age."""
    suite = root / "test_suite_database"
    make_pets(suite / "pets" / "pets.sqlite", PETS)
    make_pets(suite / "pets" / "pets_v1.sqlite", [("eve", 1), ("fay", 2), ("eve", 4)])
    make_shop(suite / "shop" / "shop.sqlite")
    return _make(root, "database", "query")


def make_bird(root: Path) -> Path:
    """Make a BIRD folder of the same questions on the same databases."""
    levels = ["simple", "moderate", "challenging", "simple", "simple"]
    return _make(root, "dev_databases", "SQL", difficulty=levels)
