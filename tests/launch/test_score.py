"""The reward workbench as a command."""

import json
import sqlite3
from contextlib import closing

import pytest

from launch.score import main


def test_one_pair_as_json(database, capsys):
    pair = ["--db", str(database), "--gold", "SELECT name FROM emp", "--pred"]
    main([*pair, "SELECT name FROM emp WHERE sal > 10"])
    record = json.loads(capsys.readouterr().out)
    assert {name: [*part] for name, part in record.items() if isinstance(part, dict)} == {
        "ex": ["set", "bag", "bag_ordered", "test_suite"],
        "progress": ["struct", "lex", "tags"],
        "expo": ["case", "diff_types", "error_clauses", "rewards", "reward"],
        "paverl": ["ex_f", "ex_b", "reward"],
        "astra": ["csmr"],
    }
    families = ["ex", "progress", "expo", "paverl", "astra"]
    assert list(record) == ["status", *families, "seconds"]
    assert record["status"] == "ok"
    assert record["expo"]["error_clauses"] == ["WHERE"]
    assert record["seconds"] > 0


def test_a_query_that_is_right_by_luck_is_told_by_a_witness(database, capsys):
    gold = "SELECT COUNT(*) FROM emp"
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute(gold).fetchone() == (4,)
    words = ["--db", str(database), "--gold", gold, "--pred"]
    main([*words, "SELECT 4"])
    found = json.loads(capsys.readouterr().out)
    assert found["ex"]["set"]
    # Judged on that witness, as in training.
    assert (found["expo"]["case"], found["expo"]["error_clauses"]) == ("incorrect", ["SELECT"])
    assert (found["paverl"]["reward"], found["astra"]["csmr"]) == (0.5, 0.0)
    told_by = found["witness"]["told_by"]
    assert found["witness"] == {"asked": 8, "told_by": told_by}
    assert told_by in range(1, 9)
    main([*words, gold])
    assert json.loads(capsys.readouterr().out)["witness"] == {"asked": 8, "told_by": None}
    main([*words, "SELECT 2"])
    assert "witness" not in json.loads(capsys.readouterr().out)  # wrong without any


LOOP = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i FROM r) SELECT count(*) FROM r"


def test_the_time_limit(database, capsys):
    main(["--db", str(database), "--gold", "SELECT 1", "--pred", LOOP, "--timeout-s", "0.2"])
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["message"]) == ("timeout", "the query takes too long")


def test_a_failing_prediction_has_sqlite_s_message(database, capsys):
    main(["--db", str(database), "--gold", "SELECT 1", "--pred", "SELECT no_such FROM emp"])
    assert json.loads(capsys.readouterr().out)["message"] == "no such column: no_such"


def test_a_failing_gold_is_named(database, capsys, caplog):
    main(["--db", str(database), "--gold", "SELECT", "--pred", "SELECT 1"])
    assert not any(json.loads(capsys.readouterr().out)["ex"].values())
    (told,) = caplog.messages
    assert told.startswith("--gold: does not run, and nothing is right by it: ")
    assert told.endswith("incomplete input")


@pytest.mark.parametrize(
    ("dialect", "gold", "pred", "told"),
    [
        ("mysql", "", "SELECT name FROM emp WHERE dept = 'X' AND sal / 4 = 2.5", ("ok", True)),
        ("mysql", "", "SELECT `name` FROM emp WHERE name REGEXP '^a'", ("error", False)),
        ("mysql", "", " ", ("error", False)),
        ("mysql", "SELECT 1", "DROP TABLE emp", ("not_transpiled", False)),
        ("sqlite", "", "SELECT 'ann'", ("ok", False)),
        ("PostgreSQL", "", "SELECT 1 WHERE 'a' ILIKE 'A'", ("ok", False)),
        ("mysql", "SELECT no_such(name) FROM emp", "SELECT 1", ("ok", False)),
    ],
)
def test_queries_of_other_dialects(database, capsys, caplog, dialect, gold, pred, told):
    """What cannot be carried over to SQLite is told as such, and never right."""
    gold = gold or "SELECT name FROM emp WHERE name = 'ANN'"
    main(["--db", str(database), "--gold", gold, "--pred", pred, "--dialect", dialect])
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["ex"]["set"]) == told
    assert ("does not run" in caplog.text) == ("no_such" in gold)
