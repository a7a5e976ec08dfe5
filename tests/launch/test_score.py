"""`launch.score`: the workbench's record of a pair (tests/rewards/test_workbench.py) as JSON."""

import json
import sqlite3
from contextlib import closing

import pytest

from launch.score import main


@pytest.fixture
def scored(database, capsys):
    """Return what scores a prediction beside a gold query: the record that is printed."""

    def run(gold: str, pred: str, *more: str):
        main(["--db", str(database), "--gold", gold, "--pred", pred, *more])
        return json.loads(capsys.readouterr().out)

    return run


def test_a_query_that_is_right_by_luck_is_told_by_a_witness(database, scored):
    gold = "SELECT COUNT(*) FROM emp"
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute(gold).fetchone() == (4,)
    found = scored(gold, "SELECT 4")
    assert found["ex"]["set"]
    # Judged on that witness, as in training.
    assert (found["expo"]["case"], found["expo"]["error_clauses"]) == ("incorrect", ["SELECT"])
    assert (found["paverl"]["reward"], found["astra"]["csmr"]) == (0.5, 0.0)
    told_by = found["witness"]["told_by"]
    assert found["witness"] == {"asked": 8, "told_by": told_by}
    assert told_by in range(1, 9)
    assert scored(gold, gold)["witness"] == {"asked": 8, "told_by": None}
    assert "witness" not in scored(gold, "SELECT 2")  # wrong without any


ANN = "SELECT name FROM emp WHERE name = 'ANN'"
LOOP = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i FROM r) SELECT count(*) FROM r"
MYSQL = "--dialect mysql"


@pytest.mark.parametrize(
    ("words", "gold", "pred", "status", "message"),
    [
        ("--timeout-s 0.2", "SELECT 1", LOOP, "timeout", "the query takes too long"),
        ("", "SELECT 1", "SELECT no_such FROM emp", "error", "no such column: no_such"),
        (MYSQL, ANN, "SELECT name FROM emp WHERE dept = 'X' AND sal / 4 = 2.5", "right", ""),
        (MYSQL, ANN, "SELECT `name` FROM emp WHERE name REGEXP '^a'", "error", "REGEXP"),
        (MYSQL, ANN, " ", "error", ""),
        (MYSQL, "SELECT 1", "DROP TABLE emp", "not_transpiled", ""),
        ("", ANN, "SELECT 'ann'", "ok", ""),
        ("--dialect PostgreSQL", ANN, "SELECT 1 WHERE 'a' ILIKE 'A'", "ok", ""),
    ],
)
def test_what_is_printed_of_a_query(scored, words, gold, pred, status, message):
    """What cannot be carried over to SQLite from a dialect is told as such, and never right."""
    found = scored(gold, pred, *words.split())
    assert ("right" if found["ex"]["set"] else found["status"]) == status
    assert message in found.get("message", "")


@pytest.mark.parametrize("gold", ["SELECT", "SELECT no_such(name) FROM emp"])
def test_a_failing_gold_is_named(scored, caplog, gold):
    assert not any(scored(gold, "SELECT 1", *MYSQL.split())["ex"].values())
    (told,) = caplog.messages
    assert told.startswith("--gold: does not run, and nothing is right by it: ")
