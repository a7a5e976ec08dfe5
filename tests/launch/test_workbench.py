"""The command line of the reward workbench: pairs, files and episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.evaluation.official import BIRD_MARK
from launch.score import main as run_command
from sqlenv.config import DemoConfig
from sqlenv.demo import generate
from sqlenv.errors import UserError
from sqlenv.sql.extraction import extract_sql

from .conftest import ROOT


def main(words: list[str]) -> int:
    """Run the command, and tell a mistake as `cli.run` does."""
    try:
        run_command(words)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_one_pair_as_json(database, capsys):
    pair = ["--db", str(database), "--gold", "SELECT name FROM emp", "--pred"]
    assert main([*pair, "SELECT name FROM emp WHERE sal > 10", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record) == ["status", "ex", "progress", "expo", "paverl", "astra", "seconds"]
    assert record["status"] == "ok"
    assert list(record["ex"]) == ["set", "bag", "bag_ordered", "test_suite"]
    assert list(record["progress"]) == ["struct", "lex", "tags"]
    assert list(record["expo"]) == ["case", "diff_types", "error_clauses", "rewards"]
    assert record["expo"]["error_clauses"] == ["WHERE"]
    assert list(record["paverl"]) == ["ex_f", "ex_b", "reward"]
    assert list(record["astra"]) == ["csmr"]


@pytest.mark.parametrize(
    ("limit", "pred", "status"),
    [
        (["--max-rows", "2"], "SELECT name FROM emp", "too_large"),
        (["--max-bytes", "10"], "SELECT name FROM emp", "too_large"),
        (
            ["--timeout-s", "0.2"],
            "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i FROM r) SELECT count(*) FROM r",
            "timeout",
        ),
    ],
)
def test_limits(database, capsys, limit, pred, status):
    pair = ["--db", str(database), "--gold", "SELECT 1", "--pred", pred, "--json"]
    assert main([*pair, *limit]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == status


def test_a_failing_gold_is_named(database, capsys):
    assert main(["--db", str(database), "--gold", "SELECT", "--pred", "SELECT 1", "--json"]) == 0
    captured = capsys.readouterr()
    assert not any(json.loads(captured.out)["ex"].values())
    assert captured.err == "warning: 1 gold queries do not run: emp\n"


def test_a_file_of_pairs_keeps_order_and_ids(tmp_path, database, capsys):
    """Enough pairs for several processes; a prediction that is no text is one without SQL."""
    pairs: list[dict[str, Any]] = [
        {"id": n, "db": str(database), "gold": "SELECT 1", "pred": f"SELECT {n % 3}"}
        for n in range(80)
    ]
    pairs.append({"id": "none", "db": str(database), "gold": "SELECT 1", "pred": None})
    pairs.append({"id": None, "db": str(database), "gold": "SELECT 1", "pred": "\ud800"})
    path = write_lines(tmp_path / "pairs.jsonl", pairs)
    assert main(["--file", str(path), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert [record["id"] for record in records] == [pair["id"] for pair in pairs]
    assert [record["ex"]["set"] for record in records[:80]] == [n % 3 == 1 for n in range(80)]
    assert [record["status"] for record in records[80:]] == ["error", "error"]
    assert [record["expo"]["case"] for record in records[80:]] == ["format", "error"]


def test_mistakes_are_one_line_and_status_2(tmp_path, database, capsys):
    text = tmp_path / "text.sqlite"
    text.write_text("no database")
    pair = {"id": 1, "db": str(database), "gold": "SELECT 1", "pred": "SELECT 1"}
    lines = {
        "bad.jsonl:2: not a JSON object": [pair, {"db": str(database)}],
        "bad.jsonl:1: not a JSON object": [{**pair, "id": float("nan")}],
        "bad.jsonl:1: gone.sqlite: no such database file; check the path": [
            {**pair, "db": "gone.sqlite"}
        ],
        "`db` and `gold` have to be text": [{**pair, "gold": 3}],
        "the gold query is empty": [{**pair, "gold": " "}],
    }
    for words, records in lines.items():
        path = write_lines(tmp_path / "bad.jsonl", records)
        assert mistake(capsys, ["--file", str(path), "--json"]).count(words) == 1
    one = ["--gold", "SELECT 1", "--pred", "SELECT 1"]
    assert "no such database file" in mistake(capsys, ["--db", str(tmp_path / "no"), *one])
    assert "not a SQLite database" in mistake(capsys, ["--db", str(text), *one])
    assert "all of --db" in mistake(capsys, one)
    assert "give one pair" in mistake(capsys, [])
    assert "--out goes with" in mistake(capsys, ["--db", str(database), *one, "--out", "x"])
    assert "add --json" in mistake(capsys, ["--file", "x.jsonl"])
    assert "needs the questions: --data" in mistake(capsys, ["--predictions", "x.sql"])
    assert "--max-rows" in mistake(capsys, ["--db", str(database), *one, "--max-rows", "0"])
    assert "no.jsonl: no such file" in mistake(
        capsys, ["--file", str(tmp_path / "no.jsonl"), "--json"]
    )
    for words in (["--nonsense"], ["extra"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_messages_speak_of_the_commands_own_options(tmp_path, root, capsys):
    """Who scores predictions has no config whose keys could be set."""
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"id": "1", "gold": "", "turns": []}\n"größer"\n'.encode("latin-1"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dev.json").write_text(json.dumps(questions(root)))
    spider = ["--data-root", str(root), "--data", "train_spider.json"]

    def asked(folder: Path | str, file: str = "dev.json") -> list[str]:
        return ["--predictions", str(latin), "--data-root", str(folder), "--data", file]

    cases = {
        "latin.jsonl: cannot be read as text, byte 40": ["--predictions", str(latin), *spider],
        "no.jsonl: no such file; check the path": ["--predictions", "no.jsonl", *spider],
        f"{tmp_path}: cannot be read (Is a directory)": ["--file", str(tmp_path), "--json"],
        "--data-root nowhere: there is no such folder": asked("nowhere"),
        f"--data-root {latin}: is a file": asked(latin),
        "--data no.json: not in ": asked(root, "no.json"),
        ", which has dev.json; give one": asked(tmp_path / "data", "no.json"),
        "--data dev.json as --layout spider: ": asked(tmp_path / "data"),
        "--out ": ["--predictions", write_golds(tmp_path, root), *spider, "--out", str(tmp_path)],
    }
    for words, command in cases.items():
        told = mistake(capsys, command)
        assert words in told
        assert not any(key in told for key in ("`path`", "`layout`", "`split`", "data."))


def write_golds(folder: Path, root: Path) -> str:
    path = folder / "golds.sql"
    path.write_text("".join(f"{question['query']}\n" for question in questions(root)))
    return str(path)


def mistake(capsys, words: list[str]) -> str:
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    return printed


def test_without_jax(database):
    """The base install has no JAX; the command must not ask for it."""
    code = (
        "import sys; from launch.score import main; "
        f"main(['--db', {str(database)!r}, '--gold', 'SELECT 1', '--pred', 'SELECT 2']); "
        "assert not {'jax', 'flax', 'numpy'} & set(sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "≠ 1" in run.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "demo"
    config = DemoConfig(
        train_databases=1, validation_databases=1, test_databases=1, questions_per_database=8
    )
    generate(folder, config)
    return folder


def questions(root: Path) -> list[dict[str, Any]]:
    return json.loads((root / "train_spider.json").read_text())


def test_predictions_in_every_form_give_the_same(tmp_path, root, capsys):
    golds = [question["query"] for question in questions(root)]
    plain, lines, bird = (tmp_path / name for name in ("a.sql", "b.jsonl", "c.json"))
    plain.write_text("\n".join(golds) + "\n")
    write_lines(lines, [{"pred": gold} for gold in golds])
    marked = [f"{question['query']}{BIRD_MARK}{question['db_id']}" for question in questions(root)]
    bird.write_text(json.dumps(dict(enumerate(marked))))
    out = tmp_path / "out.jsonl"
    files = [str(path) for path in (plain, lines, bird)]
    data = ["--data-root", str(root), "--data", "train_spider.json", "--out", str(out)]
    assert main(["--predictions", *files, *data]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["file"] for record in records] == [c for c in "abc" for _ in golds]
    assert {record["astra"]["csmr"] for record in records} == {1.0}
    assert records[0]["id"] == "spider/train_spider/0"
    shown = capsys.readouterr().out
    assert "SQL-ASTRA CSMR" in shown
    assert "GROUP_BY_MISSING" in shown
    assert main(["--predictions", *files, *data[:4], "--json"]) == 0
    lines_again = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["id"] for line in lines_again] == [r["id"] for r in records]


def test_lines_are_matched_by_their_question(tmp_path, root, capsys):
    """In another order, and several to one question: a file may hold several systems."""
    asked = questions(root)
    lines = [{"question": q["question"], "pred": q["query"], "db_id": q["db_id"]} for q in asked]
    path = write_lines(tmp_path / "p.jsonl", [*lines[::-1], lines[2], {**lines[1], "pred": None}])
    data = ["--data-root", str(root), "--data", "train_spider.json", "--json"]
    assert main(["--predictions", str(path), *data]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    numbers = [*reversed(range(len(asked))), 2, 1]
    assert [each["id"] for each in records] == [f"spider/train_spider/{n}" for n in numbers]
    assert [each["ex"]["set"] for each in records] == [True] * (len(asked) + 1) + [False]
    other = {**lines[0], "question": "Who?"}
    told = mistake(capsys, ["--predictions", str(write_lines(path, [lines[0], other])), *data])
    assert f"{path}:2: its `question` is none of --data" in told
    write_lines(path, [{**line, "question": "Who?"} for line in lines])  # prompts, say: by order
    assert main(["--predictions", str(path), *data]) == 0
    assert all(json.loads(line)["ex"]["set"] for line in capsys.readouterr().out.splitlines())


def test_tables_of_many_files_stay_readable(tmp_path, root, capsys, monkeypatch):
    """No number and no label is cut: files that have no room beside others come below them."""
    monkeypatch.setenv("COLUMNS", "80")
    golds = Path(write_golds(tmp_path, root)).read_text()
    files = [tmp_path / f"a-system-of-a-long-name-{n}.sql" for n in range(7)]
    for path in files:
        path.write_text(golds)
    data = ["--data-root", str(root), "--data", "train_spider.json"]
    assert main(["--predictions", *map(str, files), *data]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    rows = [line.split("│")[2:-1] for line in shown.splitlines() if "PaVeRL-SQL reward" in line]
    assert [float(cell) for row in rows for cell in row] == [10.0] * 7
    assert len(rows) > 1


def episode(root: Path, replies: list[str], **more: Any) -> dict[str, Any]:
    turns = [{"reply": reply, "sql": extract_sql(reply, "sql_tag")} for reply in replies]
    gold = questions(root)[0]["query"]
    return {"step": 3, "id": "spider/train_spider/0", "gold": gold, "turns": turns, **more}


def test_trajectories_give_every_familys_reward(tmp_path, root, capsys):
    gold = questions(root)[0]["query"]
    right = f"<think> … </think> <sql> {gold} </sql>"
    path = write_lines(tmp_path / "trajectories.jsonl", [episode(root, ["nothing", right])])
    out = tmp_path / "out.jsonl"
    data = ["--data-root", str(root), "--data", "train_spider.json"]
    assert main(["--predictions", str(path), *data, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["step"] == 3
    assert record["progressive"] == pytest.approx(0.5 + 0.25 + 1 + 1)
    assert record["astra"] == pytest.approx(0.9999)
    assert (record["expo"], record["paverl"], record["turns"]) == (1.5, 10, 2)
    assert "Trajectory rewards" in capsys.readouterr().out
    called = episode(root, [right, right])
    called["turns"][1] |= {"reply": "<tool_call>{", "sql": "", "kind": "bad_call"}
    assert main(["--predictions", str(write_lines(path, [called])), *data, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["correct"], record["paverl"], record["turns"]) == (0, 0, 2)
    other = episode(root, [right])
    other["turns"][0]["kind"] = "guess"
    without = {**episode(root, []), "turns": [{"reply": right}]}
    for wrong in (
        episode(root, [right], gold="SELECT 1"),
        {**episode(root, []), "turns": [1]},
        *(other, without),
    ):
        write_lines(path, [wrong])
        assert "trajectories.jsonl:1: " in mistake(capsys, ["--predictions", str(path), *data])


def test_a_reader_that_leaves_is_no_error(tmp_path, database):
    pair = {"db": str(database), "gold": "SELECT 1", "pred": "SELECT 1"}
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


def test_queries_of_other_dialects(tmp_path, database, capsys):
    """What cannot be carried over to SQLite is told as such, and never right."""
    pair = {"id": 1, "db": str(database), "gold": "SELECT name FROM emp WHERE name = 'ANN'"}
    records = [
        {**pair, "pred": "SELECT name FROM emp WHERE dept = 'X' AND sal / 4 = 2.5"},
        {**pair, "pred": "SELECT `name` FROM emp WHERE name REGEXP '^a'"},
        {**pair, "pred": " "},
        {**pair, "gold": "SELECT name FROM emp LIMIT 1", "pred": "DROP TABLE emp"},
        {**pair, "pred": "SELECT 'ann'", "dialect": "sqlite"},
        {**pair, "pred": "SELECT 'ann' WHERE 'a' ILIKE 'A'", "dialect": "PostgreSQL"},
        {**pair, "gold": "SELECT YEAR(name) FROM emp", "pred": "SELECT 1"},
    ]
    path = write_lines(tmp_path / "pairs.jsonl", records)
    assert main(["--file", str(path), "--json", "--dialect", "mysql"]) == 0
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [(each["status"], each["ex"]["set"]) for each in found] == [
        ("ok", True),
        ("not_carried", False),
        ("error", False),
        ("not_carried", False),
        ("ok", False),
        ("ok", False),
        ("ok", False),
    ]
    assert [each["expo"]["case"] for each in found[:3]] == ["correct", "error", "format"]
    assert printed.err.endswith("warning: 1 gold queries do not run: 1\n")
    one = ["--db", str(database), "--gold", pair["gold"], "--pred", "SELECT name REGEXP 'a'"]
    assert main([*one, "--dialect", "mysql"]) == 0
    assert "not transpiled from MySQL" in capsys.readouterr().out
    write_lines(path, [{**records[0], "dialect": "oracle"}])
    told = mistake(capsys, ["--file", str(path), "--json"])
    assert "pairs.jsonl:1: dialect oracle: should be one of sqlite, mysql, postgres" in told
