"""What tests ask: database files, and small data sets in the layouts that people download."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlenv.config import DataConfig, DemoConfig, SourceConfig
from sqlenv.data.loading import LoadedData, load
from sqlenv.data.sources import by_running
from sqlenv.demo import generate
from sqlenv.executor import Executor
from sqlenv.executor.database import open_new
from sqlenv.types import Example


def make_file(path: Path, script: str) -> Path:
    """Run statements on a database file, which is made where there is none, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = open_new(path)  # also where a name is no text
    connection.execute(f"PRAGMA synchronous = off; {script}")
    connection.close()
    return path


def write(path: Path, value: Any) -> Path:
    """Write a text, or a value as JSON: a .jsonl has an item a line, a .sql a query a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = value
    if not isinstance(value, str):
        line = {".jsonl": json.dumps, ".sql": str}.get(path.suffix)
        text = "".join(f"{line(one)}\n" for one in value) if line else json.dumps(value)
    path.write_text(text, encoding="utf-8")
    return path


def edit(path: Path, number: int, **changes: Any) -> None:
    """Change a record of a question file."""
    records = json.loads(path.read_text(encoding="utf-8"))
    records[number] |= changes
    write(path, records)


# A town, with something in it for every control.

WIDE = f"CREATE TABLE wide ({', '.join(f'c{i}' for i in range(1500))})"
TOWN = f"""
CREATE TABLE city (name TEXT, country TEXT, population INTEGER);
INSERT INTO city VALUES
  ('Paris', 'FR', 2100), ('Lyon', 'FR', 500), ('Berlin', 'DE', 3600), ('Oslo', 'NO', 700);
CREATE TABLE number (n INTEGER);
WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 1000) INSERT INTO number SELECT x FROM r;
CREATE TABLE broken (id INTEGER, label TEXT, data);
INSERT INTO broken VALUES (1, CAST(x'41ff42' AS TEXT), x'ff'), (2, 'good', 2.5), (3, NULL, 'e');
CREATE VIEW french AS SELECT name FROM city WHERE country = 'FR';
CREATE VIEW endless AS
  WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r WHERE x < 0;
CREATE VIRTUAL TABLE words USING fts5(body);
INSERT INTO words VALUES ('hello world'), ('goodbye');
{WIDE}; INSERT INTO wide (c0) VALUES (1);
"""
ENDLESS = "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r"
# Too much for any limit: that of the process is the largest of its executors'.
MEMORY_BOMB = (
    "SELECT count(*) FROM (SELECT DISTINCT a.n || ' ' || b.n || hex(zeroblob(40000)) "
    "FROM number a, number b)"
)


# Small databases: the name says what is in one.

PET = "CREATE TABLE pet (name TEXT, age INT); INSERT INTO pet VALUES"
SCRIPTS = {
    "band": "CREATE TABLE band (id INT, name TEXT); INSERT INTO band VALUES (1, 'a')",
    "emp": """
        CREATE TABLE emp (name TEXT, dept TEXT, sal INT); INSERT INTO emp VALUES
          ('ann', 'x', 10), ('bob', 'x', 20), ('cid', 'y', 20), ('dee', 'y', 30);
    """,
    "music": """
        CREATE TABLE singer (name TEXT, age INTEGER);
        INSERT INTO singer VALUES ('Ada', 19), ('Bo', 30);
    """,
    "pets": f"{PET} ('ann', 3), ('bob', 5), ('cid', 5), ('dee', 9)",
    "shop": "CREATE TABLE item (name TEXT, price INT); INSERT INTO item VALUES ('pen', 2)",
}
# All others are alike, but for a table that each has for itself.
PEOPLE = """
CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT, age INTEGER, City TEXT);
INSERT INTO person VALUES
  (1, 'Ann', 30, 'New York'), (2, 'Bo', 20, 'Oslo'), (3, 'Cid', 20, 'Bern'), (4, 'Dee', 50, '12');
CREATE TABLE "of {}" (x INT);
"""
OVER_20 = "SELECT name FROM singer WHERE age > 20"


def make_database(folder: Path, name: str) -> Path:
    """Make a database in a folder of them, if it is not there."""
    path = folder / name / f"{name}.sqlite"
    return path if path.exists() else make_file(path, SCRIPTS.get(name) or PEOPLE.format(name))


def make_set(file: Path, databases: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write a question file, and make the databases that it asks about."""
    for db_id in dict.fromkeys(one["db_id"] for one in records):
        make_database(databases, db_id)
    return write(file, records)


def one_example(folder: Path) -> Example:
    """Make a question whose answer is one of two rows."""
    return Example("1", "Who is over 20?", "music", make_database(folder, "music"), OVER_20)


# Questions in the layouts, and their natural names.

TABLES = {
    "db_id": "band",
    "table_names_original": ["band"],
    "column_names_original": [[-1, "*"], [0, "id"], [0, "name"]],
    "column_names": [[-1, "*"], [0, "id"], [0, "stage name"]],
}


def spider(query: Any = "SELECT name FROM band", db_id: str = "band", **fields: Any) -> Any:
    return {"db_id": db_id, "question": "Which names?", "query": query, **fields}


def bird(**fields: Any) -> dict[str, Any]:
    told = {"question": "Q", "evidence": "E", "SQL": "SELECT 1", "difficulty": "simple"}
    return {"db_id": "band", **told, **fields}


SYNSQL = spider(sql="SELECT 1", external_knowledge="k", sql_complexity="Simple", cot="")


def load_one(
    path: Path,
    layout: str = "spider",
    executor: Executor | None = None,
    data: Mapping[str, Any] | None = None,
    **source: Any,
) -> LoadedData:
    """Load a source; the executor runs its golds."""
    sources: Any = [{"layout": layout, "path": path, **source}]
    return load(DataConfig(sources=sources, **(data or {})), check=by_running(executor))


def read_all(source: SourceConfig) -> tuple[Example, ...]:
    """Read every question of a source, whatever its gold query."""
    return load(DataConfig(sources=(source,), exclude=())).examples


def make_source(folder: Path, name: str, golds: Mapping[str, Sequence[str]]) -> Any:
    """Write a question file with some golds on each database; return its source."""
    asked = [
        spider(sql, db_id, question=f"{db_id} {number}?")
        for db_id, queries in golds.items()
        for number, sql in enumerate(queries)
    ]
    make_set(folder / f"{name}.json", folder / "database", asked)
    return {"layout": "spider", "path": folder, "file": f"{name}.json"}


def make_demo(folder: Path, questions: int) -> Path:
    """Generate data of one database a split, with so many questions each."""
    one = {"train_databases": 1, "validation_databases": 1, "test_databases": 1}
    generate(folder, DemoConfig(**one, questions_per_database=questions))
    return folder


# A test set as it is published: Spider's with its suite, and BIRD's.

ASKED = [
    ("pets", "Who is there?", "SELECT name FROM pet"),
    ("pets", "Which ages are there?", "SELECT DISTINCT age FROM pet"),
    ("pets", "Who is the oldest?", "SELECT name FROM pet ORDER BY age DESC LIMIT 1"),
    ("shop", "How many items?", "SELECT count(*) FROM item"),
    ("shop", "Which items cost nothing?", "SELECT name FROM item WHERE price = 0"),
]
GOLDS = [gold for _, _, gold in ASKED]
LEVELS = ("simple", "moderate", "challenging", "simple", "simple")


def make_spider(root: Path) -> Path:
    """Make a Spider folder; its suite has a second file of pets, where nobody is of one age."""
    pets, _ = (make_database(root / "test_suite_database", name) for name in ("pets", "shop"))
    make_file(pets.with_stem("pets_v1"), f"{PET} ('eve', 1), ('fay', 2), ('eve', 4)")
    records = [
        spider(gold, db_id, question=question, question_id=number)
        for number, (db_id, question, gold) in enumerate(ASKED)
    ]
    return make_set(root / "dev.json", root / "database", records).parent


def make_bird(root: Path) -> Path:
    """Make a BIRD folder of the same questions on the same databases."""
    records = [
        bird(question_id=number, db_id=db_id, question=question, SQL=gold, difficulty=level)
        for number, ((db_id, question, gold), level) in enumerate(zip(ASKED, LEVELS, strict=True))
    ]
    return make_set(root / "dev.json", root / "dev_databases", records).parent


# Downloads of every data set, side by side; questions about people are good and bad.

PEOPLE_GOLDS = (
    "SELECT name FROM person WHERE City = 'New York'",
    "SELECT nme FROM person",  # fails
    "SELECT name FROM person WHERE age > 90",  # empty
    "SELECT name FROM person ORDER BY age LIMIT 1",  # ties
    "SELECT count(*) FROM person",
    "SELECT avg(age) FROM person",
)
QUESTION = "Who of database {db} lives in New York, number {number}?"


def about_people(
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
        for number, sql in enumerate(PEOPLE_GOLDS)
    ]


SYN = {"field": "SpiderSynQuestion", "text": QUESTION.replace("lives", "dwells")}
BIRD = {"gold": "SQL", "evidence": "young refers to age < 30", "difficulty": "simple"}
SYNTHETIC = {"gold": "sql", "external_knowledge": "", "cot": "first, ..."}
MADE = [f"made_{number}" for number in range(4)]
# Of each question file: its folder of databases, and its records.
FILES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    file: (databases, about_people(names, **form))
    for file, databases, names, form in (
        ("spider/train_spider.json", "spider/database", ["farm", "stall"], {}),
        ("spider/train_others.json", "spider/database", ["bank"], {}),
        ("spider/dev.json", "spider/database", ["club"], {}),
        ("spider/test.json", "spider/test_database", ["port"], {}),
        ("Spider-Syn/train_spider.json", "spider/database", ["farm", "stall"], SYN),
        ("Spider-Syn/dev.json", "spider/database", ["club"], SYN),
        ("spider-realistic/spider-realistic.json", "spider/database", ["club"], {}),
        ("Spider-DK/Spider-DK.json", "Spider-DK/database", ["club", "new_pets_1"], {}),
        ("bird/train/train.json", "bird/train/train_databases", ["mine", "mill", "farm_two"], BIRD),
        ("bird/dev_20240627/dev.json", "bird/dev_20240627/dev_databases", ["pub"], BIRD),
        ("SynSQL-2.5M/data.json", "SynSQL-2.5M/databases", MADE, SYNTHETIC),
    )
}
for place, one in enumerate(FILES["SynSQL-2.5M/data.json"][1]):
    level = ("Simple", "Moderate", "Complex", "Highly Complex")[place % 4]
    style = "Formal" if place % 5 else "Multi-turn Dialogue"
    one |= {"sql_complexity": level, "question_style": style}
FILES["spider2_sqlite/test.json"] = "spider2_sqlite/databases", [
    {"instance_id": name, "db_id": db_id, "question": "Q?", "external_knowledge": document}
    for name, db_id, document in (
        *((f"local00{number}", "sky", "k.md") for number in range(3)), ("bq001", "cloud", None)
    )
]  # fmt: skip
# Spider 2's gold results, and which columns count: of question 1 the first; question 2 has two.
RESULTS = {
    "local000": "a,b\n1,x\n2,\n", "local001": "a,b\n1,x\n",
    "local002_a": "a\n7\n", "local002_b": "a,b\n0.33333,None\n",
}  # fmt: skip
CONDITIONS = [
    {"instance_id": "local000", "condition_cols": [0], "ignore_order": True},
    {"instance_id": "local001", "condition_cols": [0]},
    {"instance_id": "local002"},
]
PERSON = {
    "table_names_original": ["person"],
    "table_names": ["person"],
    "column_names_original": [[-1, "*"], [0, "id"], [0, "name"], [0, "age"], [0, "City"]],
    "column_names": [[-1, "*"], [0, "id"], [0, "name"], [0, "years of age"], [0, "city"]],
    "column_types": ["text", "number", "text", "number", "text"],
}
DESCRIPTION = (
    "original_column_name,column_name,column_description,data_format,value_description\n"
    'NAME,full name,"the name",text,"first\nand last"\n'
)


def make_downloads(root: Path, start: str = "") -> Path:
    """Make the downloads whose question files' paths start so."""
    names = dict.fromkeys(one["db_id"] for _, asked in FILES.values() for one in asked)
    for file, (databases, asked) in FILES.items():
        if not file.startswith(start):
            continue
        path = make_set(root / file, root / databases, asked)
        is_bird = file.startswith("bird")
        tables = f"{path.stem}_tables.json" if is_bird else "tables.json"
        write(path.with_name(tables), [PERSON | {"db_id": name} for name in names])
        for made in (root / databases).iterdir() if is_bird else ():
            write(made / "database_description" / "Person.csv", DESCRIPTION)
    # Beside them lie OmniSQL's finished prompts, files that evidence names, and gold results.
    for name in ("train_spider", "dev_bird", "train_synsql"):
        write(root / f"{name}.json", [{"input_seq": "Task Overview", "output_seq": "SELECT 1"}])
    golds = root / "spider2_sqlite" / "evaluation_suite" / "gold"
    write(golds / "spider2lite_eval.jsonl", CONDITIONS)
    for name, text in RESULTS.items():
        write(golds / "exec_result" / f"{name}.csv", text)
    write(root / "spider2_sqlite" / "resource" / "documents" / "k.md", "what RFM means")
    return root
