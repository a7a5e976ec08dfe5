"""Made-up databases and questions in Spider's layout, for runs that download nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from sqlenv.config import DemoConfig
from sqlenv.demo.databases import DemoDatabase, DemoTable, build, draw_schema, fill, sql_type
from sqlenv.demo.questions import DemoQuestion, ask
from sqlenv.demo.vocabulary import DOMAINS
from sqlenv.errors import UserError

STAMP = "demo.json"
SPLIT_FILES = {"train": "train_spider.json", "validation": "dev.json", "test": "test.json"}
_OUR_FILES = {STAMP, "tables.json", "database", *SPLIT_FILES.values()}


def generate(root: Path, config: DemoConfig) -> None:
    """Write the demo data set in Spider's layout, unless it is there already.

    The same settings give the same bytes. A folder that was made with other settings is replaced.
    """
    stamp = json.dumps({"generator": _fingerprint(), "config": config.model_dump()}, indent=1)
    if _is_current(root, stamp):
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        _write(fresh, config)
        (fresh / STAMP).write_text(stamp + "\n", encoding="utf-8")
        # Another process may have made it meanwhile.
        if _is_current(root, stamp):
            return
        if root.exists():
            root.rename(Path(scratch) / "old")
        fresh.rename(root)


def _is_current(root: Path, stamp: str) -> bool:
    """Tell whether the folder has just this data; refuse a folder that is not ours to replace."""
    if not root.exists():
        return False
    if not root.is_dir() or {path.name for path in root.iterdir()} - _OUR_FILES:
        raise UserError(f"{root}: holds files that are not demo data; name another folder")
    ours = root / STAMP
    if not ours.exists() and any(root.iterdir()):
        raise UserError(f"{root}: has no {STAMP}, so it is not demo data; name another folder")
    return ours.exists() and ours.read_text(encoding="utf-8") == stamp + "\n"


def _fingerprint() -> str:
    """Hash the generator's own source, so that data of another version is made anew."""
    digest = hashlib.sha256()
    sources = Path(__file__).parent
    for path in sorted([*sources.glob("*.py"), *sources.glob("*.yaml")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _write(folder: Path, config: DemoConfig) -> None:
    records: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLIT_FILES}
    schemas = []
    for split, database in _draw_databases(config):
        path = folder / "database" / database.db_id / f"{database.db_id}.sqlite"
        path.parent.mkdir(parents=True)
        with contextlib.closing(build(database)) as connection:
            path.write_bytes(connection.serialize("main"))
            rng = Random(f"{config.seed} questions {database.db_id}")
            questions = ask(database, connection, config.questions_per_database, rng)
        records[split] += [_record(database, question) for question in questions]
        schemas.append(_spider_schema(database))
    for split, name in SPLIT_FILES.items():
        _write_json(folder / name, records[split])
    _write_json(folder / "tables.json", schemas)


def _record(database: DemoDatabase, question: DemoQuestion) -> dict[str, Any]:
    return {
        "db_id": database.db_id,
        "question": question.text,
        "query": question.sql,
        "difficulty": question.difficulty,
        "tags": [question.kind],
        "domain": database.domain,
    }


def _write_json(path: Path, content: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(record) for record in content)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _draw_databases(config: DemoConfig) -> Iterator[tuple[str, DemoDatabase]]:
    """Draw the databases of all splits, no two with the same tables and columns."""
    seen_schemas: set[tuple[DemoTable, ...]] = set()
    counters = dict.fromkeys(DOMAINS, 0)
    for split, domain in _split_domains(config):
        counters[domain] += 1
        db_id = f"{domain}_{counters[domain]}"
        rng = Random(f"{config.seed} database {db_id}")
        tables = draw_schema(domain, rng)
        while _signature(tables) in seen_schemas:
            tables = draw_schema(domain, rng)
        seen_schemas.add(_signature(tables))
        yield split, fill(db_id, domain, tables, rng)


def _signature(tables: tuple[DemoTable, ...]) -> tuple:
    return tuple((table.name, *sorted(column.name for column in table.columns)) for table in tables)


def _split_domains(config: DemoConfig) -> Iterator[tuple[str, str]]:
    sizes = {
        "train": config.train_databases,
        "validation": config.validation_databases,
        "test": config.test_databases,
    }
    domains = cycle(DOMAINS)
    for split, size in sizes.items():
        yield from ((split, next(domains)) for _ in range(size))


def _spider_schema(database: DemoDatabase) -> dict[str, Any]:
    names = [table.name for table in database.tables]
    columns = [
        (number, column) for number, table in enumerate(database.tables) for column in table.columns
    ]
    places = {
        (names[number], column.name): place
        for place, (number, column) in enumerate(columns, start=1)
    }
    original = [[-1, "*"], *([number, column.name] for number, column in columns)]
    types = ["text" if sql_type(column) == "TEXT" else "number" for _, column in columns]
    return {
        "db_id": database.db_id,
        "table_names_original": names,
        "table_names": [name.replace("_", " ") for name in names],
        "column_names_original": original,
        "column_names": [[number, str(name).replace("_", " ")] for number, name in original],
        "column_types": ["text", *types],
        "primary_keys": [places[name, "id"] for name in names],
        "foreign_keys": [
            [places[table.name, parent.column], places[parent.table, "id"]]
            for table in database.tables
            for parent in table.parents
        ],
    }
