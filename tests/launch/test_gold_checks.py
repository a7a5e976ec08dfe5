"""Gold queries that teach something wrong."""

from __future__ import annotations

import pytest

from launch.data import gold_checks
from launch.data.gold_checks import break_ties, check_golds, open_both
from sqlenv.config import ExecutorConfig
from sqlenv.data.issues import BLANK_GOLD, EMPTY_GOLD, FAILING_GOLD, SLOW_GOLD, UNSTABLE_GOLD
from sqlenv.types import Table

from .conftest import example

GOLDS = {
    "SELECT name FROM emp": "",
    "SELECT name FROM emp ORDER BY name LIMIT 2": "",
    "": "blank",
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
}
ISSUES = {"": (), "blank": (BLANK_GOLD,), "fails": (FAILING_GOLD,), "empty": (EMPTY_GOLD,)}


@pytest.fixture(scope="module")
def both():
    with open_both(ExecutorConfig(isolation="thread", workers=1)) as executors:
        yield executors


def test_issues_of_gold_queries(database, both):
    found = check_golds([example(database, gold) for gold in GOLDS], *both, slow_s=10)
    for (gold, kind), one in zip(GOLDS.items(), found, strict=True):
        assert one.example.gold_sql == gold
        assert one.issues == ISSUES.get(kind, (UNSTABLE_GOLD,)), gold
        assert one.note.partition(":")[0] == (kind if kind not in ("blank", "empty") else ""), gold


def test_a_slow_gold_is_no_query_that_waits_for_the_executor(database, both, monkeypatch):
    gold = example(database, "SELECT 1")
    assert check_golds([gold], *both, slow_s=0)[0].issues == (SLOW_GOLD,)
    seconds = iter([2.0, 0.1])
    results = [Table(("1",), ((1,),))]
    monkeypatch.setattr(gold_checks, "_timed", lambda *_: (results, next(seconds)))
    assert check_golds([gold], *both, slow_s=1)[0].issues == ()


def test_ties_are_broken_by_the_querys_own_order():
    assert break_ties("SELECT a FROM (SELECT a FROM t ORDER BY a)", 1) == []
    upwards, downwards = break_ties("SELECT a, b FROM t ORDER BY c LIMIT 1;", 2)
    assert upwards == "SELECT a, b FROM t ORDER BY c, 1 ASC, 2 ASC LIMIT 1;"
    assert downwards == "SELECT a, b FROM t ORDER BY c, 1 DESC, 2 DESC LIMIT 1;"
