"""Tables of runs: from results to intervals, p-values and the questions that differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import report
from launch.evaluation.results import (
    ModelFacts,
    QuestionVerdict,
    ReportSettings,
    summarise,
    write_report,
)
from launch.evaluation.verdicts import Verdict
from launch.reporting.payload import read_payload
from minirl.errors import UserError as ModelError
from sqlenv.errors import UserError


def sheet(path: Path, right: str, *, data: str = "spider-dev", **more: Any) -> Path:
    """Write a result; of each question 1 is right by both measures, + by EX alone, 0 by none."""
    judged = [
        QuestionVerdict(
            id=f"{data}/{number}",
            db_id="d",
            difficulty="easy",
            question="?",
            sql=f"SELECT {number} -- {path.stem}",
            scores={"spider_ex": float(mark in "1+"), "spider_ts": float(mark == "1")},
            predicted="ok",
            gold="ok",
        )
        for number, mark in enumerate(right)
    ]
    settings: dict[str, Any] = {
        "data": data,
        "questions": len(right),
        "fingerprint": "f",
        "databases": "b",
        "model": ModelFacts(path.stem),
        "decode": "greedy",
        "comparators": {"spider_ex": "program @ 1", "spider_ts": "program @ 1"},
        "timeout_s": 60.0,
        "versions": {"sqlite": "3"},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_report(path, summarise(ReportSettings(**settings | more), judged, seed=0))
    return path


def run(first: str | Path, *others: str | Path) -> None:
    """Compare runs with the first one."""
    path = str(first).rpartition("=")[2]
    page = Path(path).parent / "page.html" if Path(path).parent.is_dir() else Path("page.html")
    arguments = [first, *others, "--against", first, "--out", page]
    report.main([str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(report.cli.output, "_width", 160)


def test_two_runs_side_by_side(tmp_path, capsys):
    base = sheet(tmp_path / "base.json", "1+00000000")
    ours = sheet(tmp_path / "ours.json", "0+11111111")
    out, table, lines = tmp_path / "c.json", tmp_path / "t.md", tmp_path / "d.jsonl"
    run(base, ours, "--json", out, "--markdown", table, "--differences", lines)
    found = json.loads(out.read_text())
    assert [one["name"] for one in found["runs"]] == ["base", "ours"]
    assert found["runs"][0]["columns"]["spider-dev/spider_ex"]["mean"] == 0.2
    ex, ts = found["differences"]
    assert (ex["column"], ex["difference"]) == ("spider-dev/spider_ex", pytest.approx(0.7))
    assert ex["mcnemar"] == {"only_first": 1, "only_second": 8, "p": pytest.approx(20 / 512)}
    assert ex["ci95"][0] > 0
    assert ex["p"] < 0.05
    assert len(ts["questions"]) == 9
    assert "spider-dev/1" not in ex["questions"]
    differing = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(differing) == 18
    assert differing[0] == {
        "run": "ours",
        "decode": "greedy",
        "data": "spider-dev",
        "measure": "spider_ex",
        "id": "spider-dev/0",
        "scores": [1.0, 0.0],
        "sql": ["SELECT 0 -- base", "SELECT 0 -- ours"],
    }
    printed = capsys.readouterr().out
    assert "+70.0 [" in printed
    assert "base: execution accuracy 20.0 % [" in printed
    written = table.read_text()
    heads = "Spider dev EX (10 of 1,034) | Spider dev TS (10 of 1,034)"
    assert f"| run | decoding | {heads} |" in written
    assert "| base | greedy | 20.0 [" in written
    assert "+70.0 [" in written
    assert (tmp_path / "page.html").stat().st_size < 200_000


def test_verdicts_of_a_file_of_predictions_have_their_page(tmp_path):
    """Without the text of replies and without rows, which nobody recorded."""
    path = sheet(tmp_path / "file.json", "1+00")
    overview = read_payload([("file", path)]).overview
    [found] = overview["runs"]
    assert found["kind"] == "evaluation"
    assert found["measured"]["answers"]["mean"] == 0.5
    assert [one["seen"][0][4] for one in overview["questions"]] == [1, 1, 0, 0]
    assert overview["notes"] == []


def test_a_row_has_several_test_sets_in_the_papers_order(tmp_path):
    for name, rights in (("base", "1000"), ("ours", "1110")):
        for data in ("spider-dk", "spider-test", "spider-dev"):
            sheet(
                tmp_path / name / data / "verdicts.json", rights, data=data, model=ModelFacts(name)
            )
    model = ModelFacts("ours", base="Qwen|7B", reward="progressive")
    sheet(tmp_path / "ours" / "spider-dk" / "verdicts.json", "1110", data="spider-dk", model=model)
    table = tmp_path / "t.md"
    run(tmp_path / "base", f"mine={tmp_path / 'ours'}", "--markdown", table)
    head, _, first, second = table.read_text().splitlines()[:4]
    names = ("Spider dev EX", "Spider dev TS", "Spider test", "DK")
    assert head.startswith("| run | base model | reward | decoding | ")
    assert [cell.split(" (")[0] for cell in head.split(" | ")[4:8]] == [*names]
    assert "Qwen\\|7B | progressive" in second
    assert first.startswith("| base | - | - | greedy | 25.0 [")
    assert second.startswith("| mine | ")


def test_no_number_is_broken_on_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report.cli.output, "_width", 80)
    model = ModelFacts("m", base="Qwen2.5-Coder-7B-Instruct", reward="progressive")
    for name, rights in (("base", "1000"), ("ours", "1110")):
        for data in ("spider-dev", "spider-syn", "spider-realistic", "spider-dk"):
            sheet(tmp_path / name / data / "verdicts.json", rights, data=data, model=model)
    named = [f"{name}={tmp_path / name}" for name in ("base", "ours")]
    run(*named, "--markdown", tmp_path / "t.md")
    printed = capsys.readouterr().out
    rows = [
        line
        for line in (tmp_path / "t.md").read_text().splitlines()
        if "| Qwen" in line or "| ours |" in line
    ]
    assert all(cell.strip() in printed for row in rows for cell in row.split("|"))


def test_rows_are_split_by_decoding_and_columns_say_of_how_much_they_are(tmp_path):
    model = ModelFacts("m")
    sheet(tmp_path / "r" / "1" / "verdicts.json", "1" * 535, data="spider-dk", model=model)
    sheet(tmp_path / "r" / "2" / "verdicts.json", "11", model=model, decode="vote@8")
    sheet(tmp_path / "r" / "3" / "verdicts.json", "10", model=model)
    table = tmp_path / "t.md"
    run(tmp_path / "r", "--markdown", table)
    head, _, *rows = table.read_text().splitlines()
    wanted = ["Spider dev EX (2 of 1,034)", "Spider dev TS (2 of 1,034)", "DK"]
    assert head.split(" | ")[2:5] == wanted
    assert {row.split(" | ")[1] for row in rows if row.startswith("| m |")} == {"greedy", "vote@8"}


def trained(folder: Path, right: str, *, questions: int | None = None) -> Path:
    """Write what launch.train leaves."""
    (folder / "after").mkdir(parents=True)
    verdicts = [
        Verdict(str(number), "d", "", "?", "SELECT 1", "SELECT 2", mark == "1")
        for number, mark in enumerate(right)
    ]
    lines = (json.dumps({**vars_of(one)}) for one in verdicts)
    (folder / "after" / "predictions.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"questions": questions or len(right)}))
    config = {"model": {"path": "models/Qwen"}, "reward": {"kind": "expo"}, "env": {"match": "set"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def vars_of(verdict: Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in Verdict.__slots__}


def test_runs_of_training_are_compared_after_it(tmp_path, capsys):
    run(trained(tmp_path / "one", "1100"), trained(tmp_path / "two", "1111"))
    printed = capsys.readouterr().out
    assert "one/after" in printed
    assert "Qwen" in printed
    assert "expo" in printed
    assert "+50.0 [" in printed


def test_another_sqlite_is_told(tmp_path, caplog):
    run(
        sheet(tmp_path / "a.json", "10"),
        sheet(tmp_path / "b.json", "11", versions={"sqlite": "4"}),
    )
    assert "SQLite is 3 there and 4 here" in caplog.text


def mistake(*arguments: str | Path) -> str:
    with pytest.raises((UserError, ModelError)) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_compared_is_refused(tmp_path):
    base = sheet(tmp_path / "base.json", "10")
    short = sheet(tmp_path / "short.json", "1")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    sheet(tmp_path / "other.json", "11", fingerprint="g")
    sheet(tmp_path / "edited.json", "11", databases="c")
    sheet(tmp_path / "suite.json", "11", suite="s")
    sheet(tmp_path / "dk.json", "11", data="spider-dk")
    part = tmp_path / "begun" / "verdicts.json.part"
    part.parent.mkdir()
    part.write_text("")
    trained(tmp_path / "three", "11", questions=3)
    (tmp_path / "foreign.json").write_text('[{"file": "a"}]')
    for name, key in {
        "short.json": "other questions of spider-dev",
        "other.json": "other questions under the name spider-dev",
        "edited.json": "other databases under the name spider-dev",
        "suite.json": "other test suite under the name spider-dev",
        "dk.json": "in common",
        "nowhere": "nowhere",
        "broken.json": "broken.json: ",
        "foreign.json": "foreign.json: should be a mapping of keys to values, not [{'file': 'a'}]; "
        "this is no result of launch.eval",
        "empty": "empty: ",
        "begun": f"{part}: ",
        "three": "3 questions",
    }.items():
        assert key in mistake(base, tmp_path / name)
    assert "called x and are of spider-dev" in mistake(f"x={base}", f"x={short}")
    (tmp_path / "three" / "result.json").unlink()
    assert "result.json" in mistake(base, tmp_path / "three")


def test_nothing_is_written_over(tmp_path):
    base, ours = sheet(tmp_path / "base.json", "10"), sheet(tmp_path / "ours.json", "11")
    before = ours.read_bytes()
    assert str(ours) in mistake(base, f"x={ours}", "--json", ours)
    assert ours.read_bytes() == before
    twice = ("--markdown", tmp_path / "t", "--differences", tmp_path / "t")
    assert str(tmp_path / "t") in mistake(base, ours, *twice)
    assert str(tmp_path) in mistake(base, ours, "--markdown", tmp_path)
    # Whatever a user has there.
    database = tmp_path / "shop.sqlite"
    database.write_text("SQLite format 3")
    for option in ("--markdown", "--differences", "--json"):
        assert "shop.sqlite" in mistake(base, ours, option, database)
    assert database.read_text() == "SQLite format 3"


SETTINGS = ReportSettings("d", ModelFacts("m"), "greedy")


def test_a_report_tells_turns_apart_where_there_are_any():
    judged = QuestionVerdict("1", "d", "", "?", "s", {"spider_ex": 1.0}, "ok", "ok", turns=2)
    several = [judged, replace(judged, id="2", scores={"spider_ex": 0.0}), replace(judged, turns=3)]
    parts = summarise(SETTINGS, several, seed=0).parts["turns"]
    assert {turns: (part["share"], part["spider_ex"]) for turns, part in parts.items()} == {
        "2": (0.666667, 0.5),
        "3": (0.333333, 1.0),
    }
    assert "turns" not in summarise(SETTINGS, [replace(judged, turns=0)], seed=0).parts


def test_a_part_is_as_sure_as_its_questions():
    judged = QuestionVerdict("1", "d", "hard", "?", "s", {"ex_f": 0.5}, "ok", "ok")
    easy = replace(judged, id="2", difficulty="easy", scores={"ex_f": 1.0})
    blind = replace(judged, id="3", scores={}, gold="none")
    found = summarise(SETTINGS, [judged, easy, blind], seed=0)
    assert found.measures["ex_f"] == {"mean": 0.75, "ci95": [0.5, 1.0], "questions": 2}
    assert list(found.parts["difficulty"]) == ["easy", "hard"]  # from easy to hard
    assert found.parts["database"]["d"]["ci95"] == {"ex_f": [0.5, 1.0]}
    nothing = summarise(SETTINGS, [blind], seed=0)
    assert (nothing.measures, nothing.first) == ({}, "")
