"""Made-up databases and questions in Spider's layout, for runs that download nothing."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from minirl.exchange import UserError
from sqlenv.config import DemoConfig
from sqlenv.demo.databases import Tables, build, draw_schema, fill
from sqlenv.demo.questions import draw_questions
from sqlenv.demo.vocabulary import DOMAINS

STAMP = "demo.json"
SPLIT_FILES = {"train": "train_spider.json", "validation": "dev.json", "test": "test.json"}


def generate(root: Path, config: DemoConfig) -> None:
    """Write the demo data set in Spider's layout, unless it is there already.

    The same settings give the same bytes. A folder that was made with other settings is replaced,
    unless it holds anything else.
    """
    given, names = config.model_dump(), {path.name for path in root.glob("*")}
    if STAMP in names and json.loads((root / STAMP).read_bytes()) == given:
        return
    own = {STAMP, "database", *SPLIT_FILES.values()}
    if root.is_file() or (names and not {STAMP} <= names <= own):
        raise UserError(f"{root}: holds what is not demo data; name another folder")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        _write(fresh, config)
        (fresh / STAMP).write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
        if root.exists():
            root.rename(Path(scratch) / "old")
        fresh.rename(root)


def _write(folder: Path, config: DemoConfig) -> None:
    records: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLIT_FILES}
    for split, domain, db_id, tables in _draw_databases(config):
        path = folder / "database" / db_id / f"{db_id}.sqlite"
        path.parent.mkdir(parents=True)
        with contextlib.closing(build(tables)) as connection:
            path.write_bytes(connection.serialize("main"))
            rng = Random(f"{config.seed} questions {db_id}")
            questions = draw_questions(tables, connection, config.questions_per_database, rng)
        records[split] += [{"db_id": db_id, **asked, "domain": domain} for asked in questions]
    for split, found in records.items():
        lines = ",\n".join(map(json.dumps, found))
        (folder / SPLIT_FILES[split]).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _draw_databases(config: DemoConfig) -> Iterator[tuple[str, str, str, Tables]]:
    """Draw the databases of all splits, no two with the same tables and columns; each with its
    split, its domain and its name.
    """
    seen: set[tuple] = set()
    sizes = (config.train_databases, config.validation_databases, config.test_databases)
    splits = [split for split, size in zip(SPLIT_FILES, sizes, strict=True) for _ in range(size)]
    for at, split in enumerate(splits):
        number, place = divmod(at, len(DOMAINS))
        domain = list(DOMAINS)[place]
        db_id = f"{domain}_{number + 1}"
        rng = Random(f"{config.seed} database {db_id}")
        signature = None
        while signature is None or signature in seen:
            tables = draw_schema(domain, rng)
            signature = tuple((t.name, *sorted(c.name for c in t.columns)) for t in tables)
        seen.add(signature)
        yield split, domain, db_id, fill(tables, rng)
