"""The reward workbench as a command: pairs, files of predictions, and episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from exchange import UserError
from launch import score as score_command
from launch.evaluation.predictions import pair_up
from launch.evaluation.verdicts import BIRD_MARK, Verdict
from launch.reporting.score_tables import pair_means
from launch.score import main
from rewards.execution import columns_of
from rewards.progress.diagnosis import CATEGORIES
from rewards.workbench import MODES, Workbench
from sqlenv.config import DemoConfig, ExecutorConfig, SourceConfig
from sqlenv.data.loading import read_all
from sqlenv.demo import generate
from sqlenv.executor import Executor
from sqlenv.prompts.tags import TAG_SENTENCES
from sqlenv.sql.answers import answer_of
from sqlenv.types import Example

from .conftest import ROOT

QUESTIONS = "train_spider.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "demo"
    config = DemoConfig(
        train_databases=2, validation_databases=1, test_databases=1, questions_per_database=10
    )
    generate(folder, config)
    return folder


@pytest.fixture(scope="module")
def examples(data) -> tuple[Example, ...]:
    return read_all(SourceConfig(layout="spider", path=data, file=QUESTIONS))


@pytest.fixture(scope="module")
def executor():
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        yield executor


@pytest.fixture
def score(data, capsys):
    """Return what runs the command on predictions of the questions; its records."""

    def run(*files: Path) -> list[dict[str, Any]]:
        named = ["--predictions", *map(str, files), "--data-root", str(data), "--data", QUESTIONS]
        main([*named, "--json"])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def write(path: Path, queries: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(query + "\n" for query in queries), encoding="utf-8")
    return path


def write_json(path: Path, records: list[Any]) -> Path:
    return write(path, [json.dumps(record) for record in records])


def mistake(*words: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        main([*map(str, words)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Pairs.


def test_one_pair_as_json(database, capsys):
    pair = ["--db", str(database), "--gold", "SELECT name FROM emp", "--pred"]
    main([*pair, "SELECT name FROM emp WHERE sal > 10", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert {name: [*part] for name, part in record.items() if isinstance(part, dict)} == {
        "ex": ["set", "bag", "bag_ordered", "test_suite"],
        "progress": ["struct", "lex", "tags"],
        "expo": ["case", "diff_types", "error_clauses", "rewards"],
        "paverl": ["ex_f", "ex_b", "reward"],
        "astra": ["csmr"],
    }
    families = ["ex", "progress", "expo", "paverl", "astra"]
    assert list(record) == ["status", *families, "seconds"]
    assert record["status"] == "ok"
    assert record["expo"]["error_clauses"] == ["WHERE"]
    assert record["seconds"] > 0


LOOP = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i FROM r) SELECT count(*) FROM r"


@pytest.mark.parametrize(
    ("limit", "pred", "status"),
    [
        (["--max-rows", "2"], "SELECT name FROM emp", "too_large"),
        (["--max-bytes", "10"], "SELECT name FROM emp", "too_large"),
        (["--timeout-s", "0.2"], LOOP, "timeout"),
    ],
)
def test_limits(database, capsys, limit, pred, status):
    main(["--db", str(database), "--gold", "SELECT 1", "--pred", pred, "--json", *limit])
    assert json.loads(capsys.readouterr().out)["status"] == status


def test_a_failing_gold_is_named(database, capsys):
    main(["--db", str(database), "--gold", "SELECT", "--pred", "SELECT 1", "--json"])
    captured = capsys.readouterr()
    assert not any(json.loads(captured.out)["ex"].values())
    assert (captured.err.count("\n"), "emp" in captured.err) == (1, True)


def test_a_file_of_pairs_keeps_order_and_ids(tmp_path, database, capsys):
    """Enough pairs for several processes; a prediction that is no text is one without SQL."""
    same = {"db": str(database), "gold": "SELECT 1"}
    pairs: list[dict[str, Any]] = [{"id": n, **same, "pred": f"SELECT {n % 3}"} for n in range(80)]
    pairs += [{"id": "none", **same, "pred": None}, {"id": None, **same, "pred": "\ud800"}]
    main(["--file", str(write_json(tmp_path / "pairs.jsonl", pairs)), "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert [record["id"] for record in records] == [pair["id"] for pair in pairs]
    assert [record["ex"]["set"] for record in records[:80]] == [n % 3 == 1 for n in range(80)]
    assert [record["status"] for record in records[80:]] == ["error", "error"]
    assert [record["expo"]["case"] for record in records[80:]] == ["format", "error"]


def test_queries_of_other_dialects(tmp_path, database, capsys):
    """What cannot be carried over to SQLite is told as such, and never right."""
    pair = {"id": 1, "db": str(database), "gold": "SELECT name FROM emp WHERE name = 'ANN'"}
    mysql = "SELECT name FROM emp WHERE dept = 'X' AND sal / 4 = 2.5"
    records = [
        ({**pair, "pred": mysql}, ("ok", True)),
        ({**pair, "pred": "SELECT `name` FROM emp WHERE name REGEXP '^a'"}, ("not_carried", False)),
        ({**pair, "pred": " "}, ("error", False)),
        ({**pair, "gold": "SELECT 1", "pred": "DROP TABLE emp"}, ("not_carried", False)),
        ({**pair, "pred": "SELECT 'ann'", "dialect": "sqlite"}, ("ok", False)),
        ({**pair, "pred": "SELECT 1 WHERE 'a' ILIKE 'A'", "dialect": "PostgreSQL"}, ("ok", False)),
        ({**pair, "gold": "SELECT YEAR(name) FROM emp", "pred": "SELECT 1"}, ("ok", False)),
    ]
    path = write_json(tmp_path / "pairs.jsonl", [record for record, _ in records])
    main(["--file", str(path), "--json", "--dialect", "mysql"])
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [(one["status"], one["ex"]["set"]) for one in found] == [told for _, told in records]
    assert "warning: " in printed.err  # of the gold query that cannot be carried over
    gold = ["--db", str(database), "--gold", "SELECT nam FROM emp", "--pred", "SELECT 1"]
    for how in ([], ["--json"]):  # nor is one pair with such a gold query scored without a word
        main([*gold, *how])
        assert capsys.readouterr().err == "warning: 1 gold queries do not run: emp\n"
    write_json(path, [{**pair, "pred": mysql, "dialect": "oracle"}])
    assert "pairs.jsonl:1: " in mistake("--file", path, "--json")


def test_questions_of_another_layout_are_told_as_such(tmp_path):
    path = write(tmp_path / "dev.json", ['[{"db_id": "d", "question": "?", "SQL": "SELECT 1"}]'])
    told = mistake("--predictions", path, "--data", path)
    assert told.endswith("dev.json: its records are of bird, not of spider; say --layout bird")


def test_a_reader_that_leaves_is_no_error(tmp_path, database):
    pair = {"db": str(database), "gold": "SELECT 1", "pred": "SELECT 1"}
    path = write_json(tmp_path / "pairs.jsonl", [{"id": n, **pair} for n in range(60)])
    command = [sys.executable, "-m", "launch.score", "--file", str(path), "--json"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout
    assert json.loads(run.stdout.readline())["id"] == 0
    run.stdout.close()
    assert run.stderr
    with run.stderr as errors:
        assert b"Traceback" not in errors.read()
    run.wait()


# Files of predictions.


def means(path: Path, examples, executor: Executor) -> dict[str, float]:
    bench = Workbench(executor, columns_of())
    return pair_means([bench.score(*pair) for pair in pair_up(path, examples)])


def test_gold_queries_score_everything(tmp_path, examples, executor):
    path = write(tmp_path / "gold.sql", [example.gold_sql for example in examples])
    score = means(path, examples, executor)
    assert score["questions"] == len(examples)
    assert {score[f"EX {mode} %"] for mode in MODES} == {100}
    assert score["Progress-SQL struct"] == score["Progress-SQL lex"] == 1
    assert (score["EXPO-SQL clause reward"], score["PaVeRL-SQL reward"]) == (1.5, 10)
    assert score["PaVeRL-SQL EX_f"] == score["PaVeRL-SQL EX_b"] == score["SQL-ASTRA CSMR"] == 1
    assert not any(score[f"{tag} %"] for tag in TAG_SENTENCES)
    assert not any(score[f"{category} errors %"] for category in (*CATEGORIES, "average"))
    assert score["not parsed %"] == 0


def test_shares_are_of_all_predictions(tmp_path, examples, executor):
    half = len(examples) // 2
    queries = [example.gold_sql for example in examples]
    queries[:half] = [""] + ["SELECT FROM"] * (half - 1)
    score = means(write(tmp_path / "half.sql", queries), examples, executor)
    assert score["EX set %"] == score["ok %"] == pytest.approx(50)
    assert score["not parsed %"] == score["error %"] == pytest.approx(50)
    assert score["Progress-SQL struct"] == pytest.approx(0.5)
    for name in (*CATEGORIES, "average"):  # no query differs in every clause
        assert score[f"{name} errors %"] == pytest.approx(50)
    lost = write(tmp_path / "n.sql", ["SELECT 1 FROM nowhere"] * len(examples))
    nowhere = means(lost, examples, executor)
    assert nowhere["FROM_OR_JOIN_TABLE_MISMATCH %"] == nowhere["JOIN errors %"] == 100
    average = sum(nowhere[f"{name} errors %"] for name in CATEGORIES) / 4
    assert nowhere["average errors %"] == pytest.approx(average)


@pytest.mark.nightly
def test_five_models_on_spider(shared):
    """Sensible to a person: better models have fewer errors, and values are no structure."""
    data = shared / "data/spider_data"
    examples = read_all(SourceConfig(layout="spider", path=data, file="dev_visible.json"))
    folder = shared / "data/predictions/spider_dev"
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        scores = {p.stem: means(p, examples, executor) for p in sorted(folder.glob("*.sql"))}
    assert len(scores) == 5
    graphix, few_shot = scores["graphix_t5"], scores["codex_few_shot"]
    assert graphix["EX set %"] > few_shot["EX set %"]
    assert graphix["average errors %"] < few_shot["average errors %"]
    # Never predicts values, and values are no part of a structure.
    for name, extreme in (("Progress-SQL struct", max), ("EX set %", min)):
        assert scores["spider_repo_example"][name] == extreme(s[name] for s in scores.values())


def test_a_data_set_is_named_as_in_other_commands(data, examples):
    """It is found in a folder of downloads."""
    place = {"data": Path("spider-train"), "data_root": data.parent, "layout": "spider"}
    assert score_command._examples(Namespace(**place, dialect="sqlite")) == examples


def test_files_of_one_name_are_told_apart(tmp_path, examples, score):
    golds = [one.gold_sql for one in examples]
    marked = [f"{one.gold_sql}{BIRD_MARK}{one.db_id}" for one in examples]
    files = [write(tmp_path / "x" / "p.sql", golds), tmp_path / "y" / "p.json"]
    files[1].parent.mkdir()
    files[1].write_text(json.dumps(dict(enumerate(marked))))
    records = score(*files)
    assert len({record["file"] for record in records}) == 2
    assert [record["id"] for record in records] == [one.id for one in examples] * 2
    assert {record["astra"]["csmr"] for record in records} == {1.0}


def test_lines_are_matched_by_id_and_by_question(tmp_path, examples, score, data):
    """In another order, and several to one question: a file may hold several systems."""
    lines = [{"question": e.question, "pred": e.gold_sql, "db_id": e.db_id} for e in examples]
    path = tmp_path / "p.jsonl"
    write_json(path, [*lines[::-1], lines[2], {**lines[1], "pred": None}])
    records = score(path)
    names = [one.id for one in [*examples[::-1], examples[2], examples[1]]]
    assert [each["id"] for each in records] == names
    assert [each["ex"]["set"] for each in records] == [True] * (len(lines) + 1) + [False]
    write_json(path, [lines[0], {**lines[0], "question": "Who?"}])
    named = ("--data-root", data, "--data", QUESTIONS)
    assert f"{path}:2: " in mistake("--predictions", path, *named)
    write_json(path, [{**line, "question": "Who?"} for line in lines])  # prompts, say: by order
    assert all(each["ex"]["set"] for each in score(path))
    # Predictions of our own runs: a part of the questions, and the query that was chosen.
    part = examples[::-2]
    some: list[dict[str, Any]] = [{}, {"samples": ("SELECT 1", "SELECT 2")}, {"turns": (1,)}]
    for more in some:
        own = [Verdict.of(e, e.gold_sql, correct=True, **more) for e in part]
        write_json(path, [asdict(one) for one in own])
        assert [(each["id"], each["ex"]["set"]) for each in score(path)] == [
            (e.id, True) for e in part
        ]
    # A line is ended by a line feed alone.
    path = write(tmp_path / "p.sql", ["SELECT 'a\u2028b'", "", "SELECT 2"])
    assert [sql for _, sql in pair_up(path, examples[:3])] == ["SELECT 'a\u2028b'", "", "SELECT 2"]


def test_tables_of_many_files_stay_readable(tmp_path, examples, data, capsys, monkeypatch):
    """No number and no label is cut: files that have no room beside others come below them."""
    monkeypatch.setenv("COLUMNS", "80")
    golds = [one.gold_sql for one in examples]
    files = [write(tmp_path / f"a-system-of-a-long-name-{n}.sql", golds) for n in range(7)]
    named = ["--data-root", str(data), "--data", QUESTIONS]
    main(["--predictions", *map(str, files), *named])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "GROUP_BY_MISSING" in shown
    rows = [line.split("│")[2:-1] for line in shown.splitlines() if "PaVeRL-SQL reward" in line]
    assert [float(cell) for row in rows for cell in row] == [10.0] * 7
    assert len(rows) > 1


@pytest.mark.parametrize("flag", ["--file", "--predictions"])
def test_nothing_is_written_over(tmp_path, flag):
    path = write(tmp_path / "pairs.jsonl", ["{}"])
    (tmp_path / "link.jsonl").symlink_to(path)
    assert "link.jsonl" in mistake(flag, path, "--json", "--out", tmp_path / "link.jsonl")
    assert path.read_text() == "{}\n"


def test_messages_speak_of_the_commands_own_options(tmp_path, data):
    """Who scores predictions has no config whose keys could be set."""
    path = write(tmp_path / "p.sql", ["SELECT 1"])
    for root, file, key in (
        ("nowhere", "dev.json", "--data-root nowhere: "),
        (path, "dev.json", f"--data-root {path}: "),
        (data, "no.json", "--data no.json: "),
    ):
        told = mistake("--predictions", path, "--data-root", root, "--data", file)
        assert key in told
        assert not any(key in told for key in ("`path`", "`layout`", "`split`", "data."))


# Episodes.


def episode(gold: str, replies: list[str], **more: Any) -> dict[str, Any]:
    turns = [{"reply": reply, "sql": answer_of(reply, "sql_tag").sql} for reply in replies]
    return {"step": 3, "id": "spider/train_spider/0", "gold": gold, "turns": turns, **more}


def test_trajectories_give_every_familys_reward(tmp_path, examples, data, score):
    gold = examples[0].gold_sql
    right = f"<think> … </think> <sql> {gold} </sql>"
    path = write_json(tmp_path / "trajectories.jsonl", [episode(gold, ["nothing", right])])
    (record,) = score(path)
    assert record["step"] == 3
    assert record["progressive"] == pytest.approx(0.5 + 0.25 + 1 + 1)
    assert record["astra"] == pytest.approx(0.9999)
    assert (record["expo"], record["paverl"], record["turns"]) == (1.5, 10, 2)
    called = episode(gold, [right, right])
    called["turns"][1] |= {"reply": "<tool_call>{", "sql": "", "kind": "bad_call"}
    (record,) = score(write_json(path, [called]))
    assert (record["correct"], record["paverl"], record["turns"]) == (0, 0, 2)
    named = ("--predictions", path, "--data-root", data, "--data", QUESTIONS)
    for wrong in (
        episode("SELECT 1", [right]),
        episode(gold, [right], turns=[1]),
        episode(gold, [right], turns=[{"reply": right}]),
    ):
        write_json(path, [wrong])
        assert "trajectories.jsonl:1: " in mistake(*named)
