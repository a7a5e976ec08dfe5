"""Gold queries that teach something wrong."""

from __future__ import annotations

import pytest

from launch.lint import FLAWS, Linter, break_ties
from sqlenv.config import ExecutorConfig
from sqlenv.types import Table

from .conftest import example

LINTED = {
    "SELECT name FROM emp": None,
    "SELECT name FROM emp ORDER BY name LIMIT 2": None,
    "SELECT nope FROM emp": "fails",
    "SELECT name FROM emp WHERE sal < 0": "empty",
    "SELECT random()": "varies",
    "SELECT CURRENT_TIMESTAMP": "varies",
    "SELECT date('now', '-1 day')": "varies",
    "SELECT strftime('%Y') - julianday()": "varies",
    'SELECT julianday("now") > 0': "varies",
    """SELECT strftime("%Y", 'now')""": "varies",
    "SELECT timediff('now', '2020-01-01')": "varies",
    "SELECT name FROM emp WHERE name <> 'now' AND date(name) IS NULL": None,
    "SELECT name FROM emp LIMIT 1": "row_order",
    "SELECT name, count(*) FROM emp": "row_order",
    "SELECT name FROM emp WHERE sal = 20 ORDER BY sal LIMIT 1": "ties",
    "SELECT name FROM emp ORDER BY sal -- rising": "ties",
}


@pytest.mark.parametrize(("gold", "flaw"), LINTED.items())
def test_lint_finds_what_is_wrong_with_a_gold(database, gold, flaw):
    with Linter(slow_s=10)(ExecutorConfig(isolation="thread", workers=1)) as look:
        found = look(example(database, gold))
    assert [finding.flaw for finding in found] == ([flaw] if flaw else [])
    assert all(finding.flaw in FLAWS for finding in found)


def test_lint_names_slow_golds(database):
    with Linter(slow_s=0)(ExecutorConfig(isolation="thread", workers=1)) as look:
        assert [finding.flaw for finding in look(example(database, "SELECT 1"))] == ["slow"]


def test_lint_does_not_blame_a_query_for_the_start_of_the_executor(database, monkeypatch):
    seconds = iter([2.0, 0.1])
    monkeypatch.setattr("launch.lint._timed", lambda *_: ([Table(("1",), ((1,),))], next(seconds)))
    with Linter(slow_s=1)(ExecutorConfig(isolation="thread", workers=1)) as look:
        assert look(example(database, "SELECT 1")) == []


def test_ties_are_broken_by_the_querys_own_order():
    assert break_ties("SELECT a FROM t", 1) == []
    assert break_ties("SELECT a FROM (SELECT a FROM t ORDER BY a)", 1) == []
    upwards, downwards = break_ties("SELECT a, b FROM t ORDER BY c LIMIT 1;", 2)
    assert upwards == "SELECT a, b FROM t ORDER BY c, 1 ASC, 2 ASC LIMIT 1;"
    assert downwards == "SELECT a, b FROM t ORDER BY c, 1 DESC, 2 DESC LIMIT 1;"
