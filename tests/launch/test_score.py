"""The reward workbench as a command: one pair, and files of pairs."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest

from launch.score import main

from .conftest import ROOT, mistake, write_lines

# Pairs.


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


def test_a_query_that_is_right_by_luck_is_told_by_a_witness(tmp_path, database, capsys):
    pair = {"database": str(database), "gold_sql": "SELECT COUNT(*) FROM emp", "pred": "SELECT 4"}
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute(pair["gold_sql"]).fetchone() == (4,)
    words = ["--db", pair["database"], "--gold", pair["gold_sql"], "--pred"]
    main([*words, pair["pred"]])
    found = json.loads(capsys.readouterr().out)
    assert found["ex"]["set"]
    # Judged on that witness, as in training.
    assert (found["expo"]["case"], found["expo"]["error_clauses"]) == ("incorrect", ["SELECT"])
    assert (found["paverl"]["reward"], found["astra"]["csmr"]) == (0.5, 0.0)
    told_by = found["witness"]["told_by"]
    assert found["witness"] == {"asked": 8, "told_by": told_by}
    assert told_by in range(1, 9)
    main([*words, pair["gold_sql"]])
    assert json.loads(capsys.readouterr().out)["witness"] == {"asked": 8, "told_by": None}
    main([*words, "SELECT 2"])
    assert "witness" not in json.loads(capsys.readouterr().out)  # wrong without any
    write_lines(tmp_path / "pairs.jsonl", [pair])
    main(["--file", str(tmp_path / "pairs.jsonl")])
    assert json.loads(capsys.readouterr().out)["witness"] == found["witness"]


LOOP = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i FROM r) SELECT count(*) FROM r"


@pytest.mark.parametrize(
    ("limit", "pred", "status"),
    [
        (["--max-rows", "2"], "SELECT name FROM emp", "too_large"),
        (["--timeout-s", "0.2"], LOOP, "timeout"),
    ],
)
def test_limits(database, capsys, limit, pred, status):
    main(["--db", str(database), "--gold", "SELECT 1", "--pred", pred, *limit])
    assert json.loads(capsys.readouterr().out)["status"] == status


def test_a_failing_gold_is_named(database, capsys, caplog):
    main(["--db", str(database), "--gold", "SELECT", "--pred", "SELECT 1"])
    assert not any(json.loads(capsys.readouterr().out)["ex"].values())
    assert caplog.messages == ["1 gold queries do not run: emp"]


def test_a_file_of_pairs_keeps_order_and_ids(tmp_path, database, capsys):
    """Enough pairs for several processes; a prediction that is no text is one without SQL."""
    same = {"database": str(database), "gold_sql": "SELECT 1"}
    pairs: list[dict[str, Any]] = [{"id": n, **same, "pred": f"SELECT {n % 3}"} for n in range(80)]
    pairs += [{"id": "none", **same, "pred": None}, {"id": None, **same, "pred": "\ud800"}]
    main(["--file", str(write_lines(tmp_path / "pairs.jsonl", pairs))])
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert [record["id"] for record in records] == [pair["id"] for pair in pairs]
    assert [record["ex"]["set"] for record in records[:80]] == [n % 3 == 1 for n in range(80)]
    assert [record["status"] for record in records[80:]] == ["error", "error"]
    assert [record["expo"]["case"] for record in records[80:]] == ["format", "error"]


def test_queries_of_other_dialects(tmp_path, database, capsys, caplog):
    """What cannot be carried over to SQLite is told as such, and never right."""
    pair = {
        "id": 1,
        "database": str(database),
        "gold_sql": "SELECT name FROM emp WHERE name = 'ANN'",
    }
    mysql = "SELECT name FROM emp WHERE dept = 'X' AND sal / 4 = 2.5"
    records = [
        ({**pair, "pred": mysql}, ("ok", True)),
        ({**pair, "pred": "SELECT `name` FROM emp WHERE name REGEXP '^a'"}, ("error", False)),
        ({**pair, "pred": " "}, ("error", False)),
        ({**pair, "gold_sql": "SELECT 1", "pred": "DROP TABLE emp"}, ("not_transpiled", False)),
        ({**pair, "pred": "SELECT 'ann'", "dialect": "sqlite"}, ("ok", False)),
        ({**pair, "pred": "SELECT 1 WHERE 'a' ILIKE 'A'", "dialect": "PostgreSQL"}, ("ok", False)),
        ({**pair, "gold_sql": "SELECT no_such(name) FROM emp", "pred": "SELECT 1"}, ("ok", False)),
    ]
    path = write_lines(tmp_path / "pairs.jsonl", [record for record, _ in records])
    main(["--file", str(path), "--json", "--dialect", "mysql"])
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [(one["status"], one["ex"]["set"]) for one in found] == [told for _, told in records]
    assert "do not run" in caplog.text  # the gold query with a function that is not there
    write_lines(path, [{**pair, "pred": mysql, "dialect": "oracle"}])
    assert "pairs.jsonl:1: " in mistake(main, ["--file", str(path)])


def test_a_reader_that_leaves_is_no_error(tmp_path, database):
    pair = {"database": str(database), "gold_sql": "SELECT 1", "pred": "SELECT 1"}
    path = write_lines(tmp_path / "pairs.jsonl", [{"id": n, **pair} for n in range(60)])
    command = [sys.executable, "-m", "launch.score", "--file", str(path), "--json"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout
    assert json.loads(run.stdout.readline())["id"] == 0
    run.stdout.close()
    assert run.stderr
    with run.stderr as errors:
        assert b"Traceback" not in errors.read()
    run.wait()


def test_nothing_is_written_over(tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", [{}])
    (tmp_path / "link.jsonl").symlink_to(path)
    words = ["--file", str(path), "--json", str(tmp_path / "link.jsonl")]
    assert "link.jsonl" in mistake(main, words)
    assert path.read_text() == "{}\n"
