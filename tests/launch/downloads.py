"""The downloads that commands read, in small: each in its own form, in OmniSQL's layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.worlds import make_file, write

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
SYN = {"field": "SpiderSynQuestion", "text": QUESTION.replace("lives", "dwells")}
BIRD = {"gold": "SQL", "evidence": "young refers to age < 30", "difficulty": "simple"}
SYNSQL = {"gold": "sql", "external_knowledge": "", "cot": "first, ..."}
LEVELS = ("Simple", "Moderate", "Complex", "Highly Complex")


def records(
    names: Sequence[str],
    *,
    field: str = "question",
    text: str = QUESTION,
    gold: str = "query",
    **more: Any,
) -> list[dict[str, Any]]:
    """Ask every gold of each database."""
    return [
        {"db_id": name, field: text.format(db=name, number=number), gold: sql, **more}
        for name in names
        for number, sql in enumerate(GOLDS)
    ]


MADE = [f"made_{number}" for number in range(4)]
# Of each question file: its folder of databases, those that are asked about, and its records.
FILES: dict[str, tuple[str, list[str], list[dict[str, Any]]]] = {
    file: (databases, names, records(names, **form))
    for file, databases, names, form in (
        ("spider/train_spider.json", "spider/database", ["farm", "shop"], {}),
        ("spider/train_others.json", "spider/database", ["bank"], {}),
        ("spider/dev.json", "spider/database", ["club"], {}),
        ("spider/test.json", "spider/test_database", ["port"], {}),
        ("Spider-Syn/train_spider.json", "spider/database", ["farm", "shop"], SYN),
        ("Spider-Syn/dev.json", "spider/database", ["club"], SYN),
        ("spider-realistic/spider-realistic.json", "spider/database", ["club"], {}),
        ("Spider-DK/Spider-DK.json", "Spider-DK/database", ["club", "new_pets_1"], {}),
        ("bird/train/train.json", "bird/train/train_databases", ["mine", "mill", "farm_two"], BIRD),
        ("bird/dev_20240627/dev.json", "bird/dev_20240627/dev_databases", ["pub"], BIRD),
        ("SynSQL-2.5M/data.json", "SynSQL-2.5M/databases", MADE, SYNSQL),
    )
}
for place, one in enumerate(FILES["SynSQL-2.5M/data.json"][2]):
    style = "Formal" if place % 5 else "Multi-turn Dialogue"
    one |= {"sql_complexity": LEVELS[place % 4], "question_style": style}
FILES["spider2_sqlite/test.json"] = "spider2_sqlite/databases", ["sky"], [
    {"instance_id": "local001", "db_id": "sky", "question": "Q?", "external_knowledge": "k.md"},
    {"instance_id": "bq001", "db_id": "cloud", "question": "Q?", "external_knowledge": None},
]  # fmt: skip
DESCRIPTION = (
    "original_column_name,column_name,column_description,data_format,value_description\n"
    'NAME,full name,"the name",text,"first\nand last"\n'
)


def make_database(folder: Path, name: str) -> Path:
    """Make a database, if it is not there; each has a table of its own beside the common one."""
    path, script = folder / name / f"{name}.sqlite", f'{PEOPLE} CREATE TABLE "of {name}" (x INT)'
    return path if path.exists() else make_file(path, script)


def natural_names(names: Sequence[str]) -> list[dict[str, Any]]:
    """Write the records of a tables.json."""
    columns = [[-1, "*"], [0, "id"], [0, "name"], [0, "age"], [0, "City"]]
    common = {
        "table_names_original": ["person"],
        "table_names": ["person"],
        "column_names_original": columns,
        "column_names": [*columns[:3], [0, "years of age"], [0, "city"]],
        "column_types": ["text", "number", "text", "number", "text"],
    }
    return [{"db_id": name, **common} for name in names]


def make_downloads(root: Path, start: str = "") -> Path:
    """Make the downloads whose question files' paths start so."""
    every = [name for _, names, _ in FILES.values() for name in names]
    for file, (databases, names, asked) in FILES.items():
        if not file.startswith(start):
            continue
        path = write(root / file, asked)
        is_bird = file.startswith("bird")
        tables = f"{path.stem}_tables.json" if is_bird else "tables.json"
        write(path.with_name(tables), natural_names(every))
        for name in names:
            made = make_database(root / databases, name)
            if is_bird:
                described = made.parent / "database_description" / "Person.csv"
                described.parent.mkdir(exist_ok=True)
                described.write_text(DESCRIPTION)
    # Beside them lie OmniSQL's finished prompts, and files that evidence names.
    for name in ("train_spider", "dev_bird", "train_synsql"):
        write(root / f"{name}.json", [{"input_seq": "Task Overview", "output_seq": "SELECT 1"}])
    document = root / "spider2_sqlite" / "resource" / "documents" / "k.md"
    document.parent.mkdir(parents=True)
    document.write_text("what RFM means")
    return root
