"""The town, a folder of questions, and executors."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Table
from tests.worlds import TOWN, make_database, make_file

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


def table_of(executor: Executor, database: Path, sql: str) -> Table:
    """Execute a query that gives a table."""
    result = executor.execute(database, sql)
    assert isinstance(result, Table), (sql, result)
    return result


@pytest.fixture(scope="session")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_file(tmp_path_factory.mktemp("town") / "town.sqlite", TOWN)


@pytest.fixture
def database(tmp_path: Path, town: Path) -> Path:
    # Characters that mean something in a URI.
    folder = tmp_path / "data ?#%41"
    folder.mkdir()
    return Path(shutil.copy(town, folder))


@pytest.fixture
def spider_folder(tmp_path: Path) -> Path:
    """A folder in Spider's layout, without questions."""
    make_database(tmp_path / "database", "band")
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
