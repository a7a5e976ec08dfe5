"""What tests ask: database files, and small data sets in the layouts that people download."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.loading import LoadedData, load
from sqlenv.data.sources import by_running
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


def write(path: Path, value: Any, *, encoding: str = "utf-8") -> Path:
    """Write a value as JSON, in a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding=encoding)
    return path


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


# Bands, and questions about them in every layout.

TABLES = {
    "db_id": "band",
    "table_names_original": ["band"],
    "column_names_original": [[-1, "*"], [0, "id"], [0, "name"]],
    "column_names": [[-1, "*"], [0, "id"], [0, "stage name"]],
}


def make_band(folder: Path, name: str = "band") -> Path:
    script = "CREATE TABLE band (id INT, name TEXT); INSERT INTO band VALUES (1, 'a')"
    path = folder / name / f"{name}.sqlite"
    return path if path.exists() else make_file(path, script)


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
    write(folder / f"{name}.json", asked)
    for db_id in golds:
        make_band(folder / "database", db_id)
    return {"layout": "spider", "path": folder, "file": f"{name}.json"}
