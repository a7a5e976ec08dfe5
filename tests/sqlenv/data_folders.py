"""Small data sets on disk, in the layouts that people download."""

from sqlenv.config import DataConfig
from sqlenv.data.loading import load
from sqlenv.data.sources import by_running
from tests.databases import make_file, write


def make_database(folder, name="band"):
    script = "CREATE TABLE band (id INT, name TEXT); INSERT INTO band VALUES (1, 'a')"
    path = folder / name / f"{name}.sqlite"
    return path if path.exists() else make_file(path, script)


def spider(query="SELECT name FROM band", db_id="band", **fields):
    return {"db_id": db_id, "question": "Which names?", "query": query, **fields}


def bird(**fields):
    return {
        "db_id": "band", "question": "Q", "evidence": "E", "SQL": "SELECT 1",
        "difficulty": "simple", **fields,
    }  # fmt: skip


SYNSQL = spider(sql="SELECT 1", external_knowledge="k", sql_complexity="Simple", cot="")
TABLES = {
    "db_id": "band",
    "table_names_original": ["band"],
    "column_names_original": [[-1, "*"], [0, "id"], [0, "name"]],
    "column_names": [[-1, "*"], [0, "id"], [0, "stage name"]],
}


def load_one(path, layout="spider", executor=None, data=None, **source):
    sources = [{"layout": layout, "path": path, **source}]
    return load(DataConfig(sources=sources, **(data or {})), check=by_running(executor))


def make_source(folder, name, golds):
    """Write a question file with some golds on each database; return its source."""
    asked = [
        spider(sql, db_id, question=f"{db_id} {number}?")
        for db_id, queries in golds.items()
        for number, sql in enumerate(queries)
    ]
    write(folder / f"{name}.json", asked)
    for db_id in golds:
        make_database(folder / "database", db_id)
    return {"layout": "spider", "path": folder, "file": f"{name}.json"}
