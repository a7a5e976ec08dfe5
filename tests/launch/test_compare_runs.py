"""launch.report --against: from results to intervals, p-values and the questions that differ."""

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
)

from .conftest import mistake
from .report_cases import opened, write_scores


def sheet(path: Path, right: str, **more: Any) -> Path:
    """Write a result; of each question 1 is right by both measures, + by EX alone, 0 by none."""
    programs = {"spider_ex": "program @ 1", "spider_ts": "program @ 1"}
    settings = {"data": "spider-dev", "fingerprint": "f", "versions": {"sqlite": "3"}}
    scores = [{"spider_ex": float(one in "1+"), "spider_ts": float(one == "1")} for one in right]
    return write_scores(path, scores, comparators=programs, **settings | more)


def witnessed(path: Path, right: str, witnesses: int) -> Path:
    """Write a result like `sheet`: 1 by its witnesses and by the rule, + by the rule alone."""
    programs = {"witness": f"ours: set, up to {witnesses} witnesses", "set": "ours"}
    told = [{"witness": float(one == "1")} if witnesses else {} for one in right]
    scores = [one | {"set": float(mark in "1+")} for one, mark in zip(told, right, strict=True)]
    return write_scores(path, scores, comparators=programs)


@pytest.mark.parametrize("others", [0, 2, 4])
def test_runs_are_compared_by_what_both_are_judged_by_alike(tmp_path, capsys, others):
    """Accuracy by witnesses is none by the rule alone, nor by another number of witnesses."""
    ours = witnessed(tmp_path / "ours.json", "1+" * 20, 4)
    base = witnessed(tmp_path / "base.json", "1+" * 10 + "00" * 10, others)
    rule, points = ("witness", "+25.0") if others == 4 else ("set", "+50.0")
    report.main([str(base), str(ours), "--out", str(tmp_path / "page.html")])
    said = capsys.readouterr().out
    assert f"ours and base differ by {points} points" in said
    assert f"by {rule} (p" in said
    overview = opened(tmp_path / "page.html")["overview"]
    both = ["witness", "set"] if others == 4 else ["set", "witness"]
    assert (overview["rules"], overview["apart"]) == (both, [] if others == 4 else ["witness"])


def trained(folder: Path, right: str, *, questions: int | None = None) -> Path:
    """Write what launch.train leaves."""
    model = ModelFacts(f"{folder.name}/after", base="Qwen", reward="expo")
    path = folder / "after" / "verdicts.json"
    write_scores(path, [{"set": float(mark)} for mark in right], model=model)
    (folder / "result.json").write_text(json.dumps({"questions": questions or len(right)}))
    config = {"train": {}, "model": {"path": "models/Qwen"}, "reward": {"kind": "expo"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"env": {"match": "set"}}))
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return what compares runs with the first one; it gives what is printed, and the Markdown."""

    def run(first: str | Path, *others: str | Path, width: int = 160) -> tuple[str, list[str]]:
        monkeypatch.setattr(report.cli.output, "_width", width)
        table = tmp_path / "table.md"
        table.unlink(missing_ok=True)
        to = () if "--markdown" in others else ("--markdown", table)
        out = tmp_path / "page.html"
        arguments = [first, *others, "--against", first, "--out", out, *to]
        report.main([str(argument) for argument in arguments])
        return capsys.readouterr().out, table.read_text().splitlines() if to else []

    return run


def test_two_runs_side_by_side(tmp_path, run):
    base = sheet(tmp_path / "base.json", "1+00000000")
    ours = sheet(tmp_path / "ours.json", "0+11111111")
    out = tmp_path / "c.json"
    printed, table = run(base, ours, "--json", out)
    found = json.loads(out.read_text())
    assert [one["name"] for one in found["runs"]] == ["base", "ours"]
    assert found["runs"][0]["columns"]["spider-dev/spider_ex"]["mean"] == 0.2
    ex, ts = found["differences"]
    assert (ex["column"], ex["difference"]) == ("spider-dev/spider_ex", pytest.approx(0.7))
    counts = [ex[name] for name in ("only_first", "only_second", "p")]
    assert counts == [1, 8, pytest.approx(20 / 512)]
    assert ex["ci95"][0] > 0
    assert ex["p"] < 0.05
    assert len(ts["questions"]) == 9
    assert "spider-dev/1" not in ex["questions"]
    heads = "Spider dev EX (10 of 1,034) | Spider dev TS (10 of 1,034)"
    assert table[0] == f"| run | decoding | {heads} |"
    assert table[2].startswith("| base | greedy | 20.0 [")
    assert "+70.0 [" in printed
    assert "+70.0 [" in table[-2]
    # The page has the same, without the text of replies and without rows, which nobody recorded.
    assert (tmp_path / "page.html").stat().st_size < 200_000
    overview = opened(tmp_path / "page.html")["overview"]
    measured = [one["measured"]["answers"]["spider_ex"] for one in overview["runs"]]
    assert [one["mean"] for one in measured] == [0.2, 0.9]
    assert overview["rules"] == ["spider_ex", "spider_ts"]
    assert overview["answer"][0].startswith("ours and base differ by +70.0 points [")
    assert [one["right"] for one in overview["questions"][0]["seen"]] == [1, 0]
    assert [overview["against"][0][name] for name in ("only_first", "only_second", "p")] == counts
    assert overview["notes"] == []


def test_a_row_has_several_test_sets_in_the_papers_order_and_no_number_is_broken(tmp_path, run):
    model = ModelFacts("m", base="Qwen|7B-Coder-Instruct", reward="progressive")
    for name, rights in (("base", "1000"), ("ours", "1110")):
        for data in ("spider-dk", "spider-realistic", "spider-dev"):
            path = tmp_path / name / data / "verdicts.json"
            sheet(path, rights, data=data, model=model if name == "ours" else ModelFacts(name))
    printed, table = run(tmp_path / "base", f"mine={tmp_path / 'ours'}", width=80)
    head, _, first, second = table[:4]
    names = ["Spider dev EX", "Spider dev TS", "Realistic EX", "Realistic TS", "DK"]
    assert head.startswith("| run | base model | reward | decoding | ")
    assert [cell.split(" (")[0] for cell in head.split(" | ")[4:9]] == names
    assert first.startswith("| base | - | - | greedy | 25.0 [")
    assert second.startswith("| mine | Qwen\\|7B-Coder-Instruct | progressive | greedy | 75.0 [")
    cells = [cell.strip() for row in (first, table[-1]) for cell in row.split("|")]
    assert all(cell in printed for cell in cells)


def test_rows_are_split_by_decoding_and_columns_say_of_how_much_they_are(tmp_path, run):
    model = ModelFacts("m")
    sheet(tmp_path / "r" / "1" / "verdicts.json", "1" * 535, data="spider-dk", model=model)
    sheet(tmp_path / "r" / "2" / "verdicts.json", "11", model=model, decode="vote@8")
    sheet(tmp_path / "r" / "3" / "verdicts.json", "10", model=model)
    _, (head, _, *rows) = run(tmp_path / "r")
    wanted = ["Spider dev EX (2 of 1,034)", "Spider dev TS (2 of 1,034)", "DK"]
    assert head.split(" | ")[2:5] == wanted
    assert {row.split(" | ")[1] for row in rows if row.startswith("| m |")} == {"greedy", "vote@8"}


def test_runs_of_training_are_compared_after_it(tmp_path, run):
    printed, _ = run(trained(tmp_path / "one", "1100"), trained(tmp_path / "two", "1111"))
    assert all(each in printed for each in ("one/after", "Qwen", "expo", "+50.0 ["))


def test_another_sqlite_is_told(tmp_path, run, caplog):
    versions = {"sqlite": "4"}
    run(sheet(tmp_path / "a.json", "10"), sheet(tmp_path / "b.json", "11", versions=versions))
    assert "SQLite is 3 there and 4 here" in caplog.text


def test_what_cannot_be_compared_is_refused(tmp_path, run):
    base = sheet(tmp_path / "base.json", "10")
    short = sheet(tmp_path / "short.json", "1")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "foreign.json").write_text('[{"file": "a"}]')
    for name in ("empty", "begun"):
        (tmp_path / name).mkdir()
    (tmp_path / "begun" / "verdicts.json.part").write_text("")
    for name, more in {
        "other": {"fingerprint": "g"}, "edited": {"databases": "c"}, "suite": {"suite": "s"},
        "dk": {"data": "spider-dk"},
    }.items():  # fmt: skip
        sheet(tmp_path / f"{name}.json", "11", **more)
    (tmp_path / "nameless.json").write_text(
        json.dumps(json.loads(base.read_text()) | {"settings": {}})
    )
    trained(tmp_path / "three", "11", questions=3)
    trained(tmp_path / "killed", "11")
    (tmp_path / "killed" / "result.json").unlink()
    for name, key in {
        "short.json": "other questions under the name spider-dev",
        "other.json": "other questions under the name spider-dev",
        "edited.json": "other databases under the name spider-dev",
        "suite.json": "other test suite under the name spider-dev",
        "dk.json": "in common",
        "nowhere": "nowhere",
        "broken.json": "broken.json: ",
        "foreign.json": "foreign.json: should be a mapping of keys to values, not [{'file': 'a'}]; "
        "no result of launch.eval, or an older one; repeat the command that made it",
        "nameless.json": "nameless.json: ",
        "empty": "empty: ",
        "begun": "begun: an evaluation that is not finished",
        "three": "three: not finished",
        "killed": "killed: not finished",
    }.items():
        assert key in mistake(run, base, tmp_path / name)
    assert "called x and are of spider-dev" in mistake(run, f"x={base}", f"x={short}")


def test_nothing_is_written_over(tmp_path, run):
    base, ours = sheet(tmp_path / "base.json", "10"), sheet(tmp_path / "ours.json", "11")
    database = tmp_path / "shop.sqlite"
    database.write_text("SQLite format 3")
    before = ours.read_bytes()
    for option, path in (
        ("--json", ours), ("--markdown", tmp_path), ("--markdown", database),
        ("--json", database),
    ):  # fmt: skip
        assert str(path) in mistake(run, base, ours, option, path)
    assert (ours.read_bytes(), database.read_text()) == (before, "SQLite format 3")


# What a report of an evaluation says.

SETTINGS = ReportSettings("d", ModelFacts("m"), "greedy")


def test_a_report_tells_turns_apart_where_there_are_any():
    judged = QuestionVerdict("1", "d", "", "?", "g", "s", {"spider_ex": 1.0}, "ok", "ok", turns=2)
    several = [judged, replace(judged, id="2", scores={"spider_ex": 0.0}), replace(judged, turns=3)]
    parts = summarise(SETTINGS, several, seed=0).parts["turns"]
    assert {turns: (part["share"], part["spider_ex"]) for turns, part in parts.items()} == {
        "2": (0.666667, 0.5),
        "3": (0.333333, 1.0),
    }
    assert "turns" not in summarise(SETTINGS, [replace(judged, turns=0)], seed=0).parts


def test_a_part_is_as_sure_as_its_questions():
    judged = QuestionVerdict("1", "d", "hard", "?", "g", "s", {"ex_f": 0.5}, "ok", "ok")
    easy = replace(judged, id="2", difficulty="easy", scores={"ex_f": 1.0})
    blind = replace(judged, id="3", scores={}, gold_status="none")
    found = summarise(SETTINGS, [judged, easy, blind], seed=0)
    assert found.measures["ex_f"] == {"mean": 0.75, "ci95": [0.5, 1.0], "questions": 2}
    assert list(found.parts["difficulty"]) == ["easy", "hard"]  # from easy to hard
    assert found.parts["database"]["d"]["ci95"] == {"ex_f": [0.5, 1.0]}
    nothing = summarise(SETTINGS, [blind], seed=0)
    assert (nothing.measures, nothing.first) == ({}, "")
