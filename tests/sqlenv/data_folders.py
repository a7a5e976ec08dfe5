"""Small data sets on disk, in the layouts that people download."""

from sqlenv.config import DataConfig
from sqlenv.data.loading import load
from sqlenv.data.sources import by_running
from tests.databases import make_file


def make_database(folder, name="band"):
    script = "CREATE TABLE band (id INT, name TEXT); INSERT INTO band VALUES (1, 'a')"
    return make_file(folder / name / f"{name}.sqlite", script)


def spider(query="SELECT name FROM band", db_id="band", **fields):
    return {"db_id": db_id, "question": "Which names?", "query": query, **fields}


def bird(**fields):
    return {
        "db_id": "band", "question": "Q", "evidence": "E", "SQL": "SELECT 1",
        "difficulty": "simple", **fields,
    }  # fmt: skip


def load_one(path, layout="spider", executor=None, data=None, **source):
    sources = [{"layout": layout, "path": path, **source}]
    return load(DataConfig(sources=sources, **(data or {})), check=by_running(executor))
