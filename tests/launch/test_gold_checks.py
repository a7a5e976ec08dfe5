"""Gold queries that teach something wrong."""

import pytest

from launch.data.checks import check_gold
from sqlenv.cache import DiskCache
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.witness.draw import ties_broken

from .conftest import example

GOLDS = {
    "SELECT name FROM emp": "",
    "SELECT name FROM emp ORDER BY name LIMIT 2": "",
    "SELECT nope FROM emp": "fails",
    "SELECT name FROM emp WHERE sal < 0": "empty",
    "SELECT random()": "varies",
    "SELECT CURRENT_TIMESTAMP": "",
    'SELECT julianday("now") > 0': "",
    "SELECT name FROM emp WHERE name <> 'now' AND date(name) IS NULL": "",
    "SELECT name FROM emp LIMIT 1": "row_order",
    "SELECT name, count(*) FROM emp": "row_order",
    "SELECT name FROM emp WHERE sal = 20 ORDER BY sal LIMIT 1": "ties",
    "SELECT name FROM emp ORDER BY sal -- rising": "ties",
    "SELECT name FROM (SELECT name, sal FROM emp ORDER BY sal)": "",
    "SELECT name FROM emp WHERE sal IN (SELECT sal FROM emp ORDER BY dept LIMIT 3)": "ties",
}
SCALAR = [
    "SELECT random()", "SELECT CURRENT_TIMESTAMP", 'SELECT julianday("now") > 0',
    "SELECT name FROM emp LIMIT 1", "SELECT name FROM emp WHERE sal = 20 ORDER BY sal LIMIT 1",
]  # fmt: skip
ISSUES = {"": (), "fails": ("failing",), "empty": ("empty",), "ties": ("tied",)}


@pytest.fixture
def check(tmp_path):
    config = ExecutorConfig(workers=1)
    disk = DiskCache(tmp_path / "cache")
    with Executor(config, disk) as plain:
        yield lambda examples: [check_gold(one, plain, disk) for one in examples]


def test_issues_of_gold_queries(database, check, monkeypatch):
    examples = [example(database, gold) for gold in GOLDS]
    found = check(examples)
    for (gold, kind), one in zip(GOLDS.items(), found, strict=True):
        assert one.example.gold_sql == gold
        issues = [issue for issue in one.issues if issue != "scalar"]
        assert issues == [*ISSUES.get(kind, ("varying",))], gold
        assert one.note.partition(":")[0] == (kind if kind != "empty" else ""), gold
    assert [one.example.gold_sql for one in found if "scalar" in one.issues] == SCALAR
    # What is known is not run again; what is found of another database is another fact.
    monkeypatch.setattr("sqlenv.executor.executor.Executor.execute", None)
    assert check(examples) == found


def test_ties_are_broken_by_the_querys_own_columns():
    assert ties_broken("SELECT a FROM orders") == ties_broken("SELECT a FRO t ORDER BY a") == ()
    upwards, downwards = ties_broken("SELECT a, b FROM t ORDER BY c LIMIT 1;")
    assert upwards == "SELECT a, b FROM t ORDER BY c, 1 ASC, 2 ASC LIMIT 1"
    assert downwards == "SELECT a, b FROM t ORDER BY c, 1 DESC, 2 DESC LIMIT 1"
