"""A small database with something in it for every control, and a question to play episodes with."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Example, Table
from tests.databases import make_file

from . import data_folders

SCHEMA = """
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
"""

ENDLESS = "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r"
MEMORY_BOMB = "SELECT count(*) FROM (SELECT DISTINCT n || hex(zeroblob(40000)) FROM number)"

# Small limits: every statement of the corpus ends in a moment.
SMALL: dict[str, Any] = {
    "workers": 2,
    "timeout_s": 10,
    "max_steps": 2_000_000,
    "max_rows": 1000,
    "max_bytes": 1_000_000,
    "max_value_bytes": 100_000,
    "heap_bytes": 16_000_000,
}


def make_database(path: Path) -> Path:
    wide = f"CREATE TABLE wide ({', '.join(f'c{i}' for i in range(1500))})"
    return make_file(path, f"{SCHEMA}{wide}; INSERT INTO wide (c0) VALUES (1)")


def table_of(executor: Executor, database: Path, sql: str) -> Table:
    """Execute a query that gives a table."""
    result = executor.execute(database, sql)
    assert isinstance(result, Table), (sql, result)
    return result


@pytest.fixture(scope="session")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_database(tmp_path_factory.mktemp("town") / "town.sqlite")


@pytest.fixture
def database(tmp_path: Path, town: Path) -> Path:
    # Characters that mean something in a URI.
    folder = tmp_path / "data ?#%41"
    folder.mkdir()
    return Path(shutil.copy(town, folder))


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    path = make_file(
        tmp_path_factory.mktemp("databases") / "music.sqlite",
        "CREATE TABLE singer (name TEXT, age INTEGER);"
        "INSERT INTO singer VALUES ('Ada', 19), ('Bo', 30)",
    )
    gold = "SELECT name FROM singer WHERE age > 20"
    return Example("1", "Who is over 20?", "music", path, gold)


@pytest.fixture
def spider_folder(tmp_path: Path) -> Path:
    """A folder in Spider's layout, without questions."""
    data_folders.make_database(tmp_path / "database")
    return tmp_path


@pytest.fixture(scope="module")
def runner() -> Iterator[Executor]:
    """An executor for tests of what uses one."""
    with Executor(ExecutorConfig(workers=1)) as made:
        yield made


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(ExecutorConfig(**SMALL)) as made:
        yield made
