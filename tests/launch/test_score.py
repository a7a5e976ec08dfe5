"""The command that scores files of predictions, on demo data made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.evaluation.predictions import pair_up
from launch.reporting.score_tables import pair_means
from launch.score import main, short_names
from rewards.execution import columns_of
from rewards.progress.diagnosis import CATEGORIES
from rewards.workbench import MODES, Workbench
from sqlenv.config import DemoConfig, ExecutorConfig, SourceConfig
from sqlenv.data.loading import read_all
from sqlenv.demo import generate
from sqlenv.envs.tags import TAG_SENTENCES
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.types import Example


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "demo"
    config = DemoConfig(
        train_databases=2, validation_databases=1, test_databases=1, questions_per_database=10
    )
    generate(folder, config)
    return folder


@pytest.fixture(scope="module")
def examples(root) -> tuple[Example, ...]:
    return read_all(SourceConfig(layout="spider", path=root, file="train_spider.json"))


@pytest.fixture(scope="module")
def executor():
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        yield executor


def write(path: Path, queries: list[str]) -> Path:
    if path.suffix == ".jsonl":
        queries = [json.dumps({"pred": query}) for query in queries]
    path.write_text("".join(query + "\n" for query in queries), encoding="utf-8")
    return path


def score_file(path: Path, examples, executor: Executor) -> dict[str, float]:
    bench = Workbench(executor, columns_of())
    return pair_means([bench.score(*pair) for pair in pair_up(path, examples)])


@pytest.mark.parametrize("name", ["gold.sql", "gold.jsonl"])
def test_gold_queries_score_everything(tmp_path, examples, executor, name):
    path = write(tmp_path / name, [example.gold_sql for example in examples])
    score = score_file(path, examples, executor)
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
    score = score_file(write(tmp_path / "half.sql", queries), examples, executor)
    assert score["EX set %"] == score["ok %"] == pytest.approx(50)
    assert score["not parsed %"] == score["error %"] == pytest.approx(50)
    assert score["Progress-SQL struct"] == pytest.approx(0.5)
    for name in (*CATEGORIES, "average"):  # no query differs in every clause
        assert score[f"{name} errors %"] == pytest.approx(50)
    nowhere = score_file(
        write(tmp_path / "n.sql", ["SELECT 1 FROM nowhere"] * len(examples)), examples, executor
    )
    assert nowhere["FROM_OR_JOIN_TABLE_MISMATCH %"] == nowhere["JOIN errors %"] == 100
    average = sum(nowhere[f"{name} errors %"] for name in CATEGORIES) / 4
    assert nowhere["average errors %"] == pytest.approx(average)


def test_command_prints_a_column_a_file(tmp_path, root, examples, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = write(tmp_path / "mine.sql", [example.gold_sql for example in examples])
    files = ["--predictions", str(path), str(path)]
    main([*files, "--data-root", str(root), "--data", "train_spider.json"])
    printed = capsys.readouterr().out
    assert printed.count("mine") == 4  # in both tables
    assert "GROUP_BY_MISSING" in printed
    rows = {
        cells[1].strip(): cells[2:4]
        for line in printed.split("\n")
        if (cells := line.split("│"))[1:]
    }
    assert [float(cell) for cell in rows["EX set %"]] == [100, 100]
    assert [float(cell) for cell in rows["PaVeRL-SQL reward"]] == [10, 10]


@pytest.mark.parametrize("flag", ["--file", "--predictions"])
def test_what_is_read_is_not_written_over(tmp_path, flag):
    path = tmp_path / "pairs.jsonl"
    path.write_text("{}\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with pytest.raises(UserError, match="is read too; write to another file"):
        main([flag, str(path), "--json", "--out", str(link)])
    assert path.read_text() == "{}\n"


def test_predictions_of_our_own_runs_are_matched_by_id(tmp_path, examples, executor):
    """They hold a sample of the questions, in an order of their own, and the field `sql`."""
    sample = examples[::-2]
    verdicts = [{"id": e.id, "db_id": e.db_id, "gold": "?", "sql": e.gold_sql} for e in sample]
    path = tmp_path / "predictions.jsonl"
    path.write_text("".join(json.dumps(verdict) + "\n" for verdict in verdicts))
    assert pair_up(path, examples) == [(e, e.gold_sql) for e in sample]
    score = score_file(path, examples, executor)
    assert (score["questions"], score["EX set %"]) == (len(sample), 100)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["a.sql"], ["a"]),
        (["x/a.sql", "b.jsonl"], ["a", "b"]),
        (
            ["runs/x/predictions.jsonl", "runs/y/predictions.jsonl"],
            ["x/predictions", "y/predictions"],
        ),
        (["u/x/p.sql", "v/x/p.sql", "q.sql"], ["u/x/p", "v/x/p", "q"]),
        (["a.sql", "a.sql"], ["a", "a"]),
        (["a.sql", "a.json"], ["a.sql", "a.json"]),
        ([""], [""]),  # its reader says what is wrong
        ([], []),
    ],
)
def test_files_are_named_apart(files, names):
    assert short_names([Path(file) for file in files]) == names


def test_lines_are_kept_as_they_are(tmp_path, examples):
    path = tmp_path / "p.sql"
    path.write_text("SELECT 'a\u2028b'\n\nSELECT 2\n", encoding="utf-8")
    assert [sql for _, sql in pair_up(path, examples[:3])] == ["SELECT 'a\u2028b'", "", "SELECT 2"]


def test_five_models_on_spider(shared):
    """Sensible to a person: better models have fewer errors, and values are no structure."""
    data = shared / "data/spider_data"
    examples = read_all(SourceConfig(layout="spider", path=data, file="dev_visible.json"))
    folder = shared / "data/predictions/spider_dev"
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        scores = {p.stem: score_file(p, examples, executor) for p in sorted(folder.glob("*.sql"))}
    assert len(scores) == 5
    graphix, few_shot = scores["graphix_t5"], scores["codex_few_shot"]
    assert graphix["EX set %"] > few_shot["EX set %"]
    assert graphix["average errors %"] < few_shot["average errors %"]
    # Never predicts values, and values are no part of a structure.
    for name, extreme in (("Progress-SQL struct", max), ("EX set %", min)):
        assert scores["spider_repo_example"][name] == extreme(s[name] for s in scores.values())
