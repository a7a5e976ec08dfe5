"""launch.report: what a page holds, what is said of it, and runs beside each other."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launch import report
from launch.evaluation.answers import ModelFacts
from launch.records import StepRecorder, shown, within_limit
from launch.reporting.runs import shown_names
from sqlenv.types import Denied, SqlError, Table
from tests.worlds import write

from .conftest import json_lines
from .report_cases import (
    make_run,
    opened,
    sheet,
    summary,
    unfinish,
    verdict,
    write_marks,
    write_page,
)


def test_the_page_holds_the_numbers_and_every_group_of_the_run(tmp_path, capsys):
    run = make_run(tmp_path / "a report" / "made-up-seed0", steps=12)
    data = opened(write_page(run))
    result = json.loads((run / "result.json").read_text())
    [found] = data["overview"]["runs"]
    words = shlex.split(found["command"])
    assert words[1:] == ["-m", "launch.train", "--cfg", f"{run}/config.yaml", f"run.dir={run}"]
    assert found["accuracy"] == result["accuracy"]
    assert found["gains"] == result["gains"]
    assert found["gains"]["run"]["set"]["ci95_databases"] is not None
    printed = capsys.readouterr().out
    assert "from 35.0 to 55.0 % of 40 questions" in printed
    assert "At the end of training, only 20 % of the groups of 10 steps" in printed
    assert data["overview"]["notes"] == []
    asked = {one["id"]: one for one in data["overview"]["questions"]}
    _, *groups = json_lines(run / "trajectories.jsonl")
    assert len(groups) == 4 * 4
    places = [(group, f"0.{group['step']}") for group in groups]
    for where in ("before", "after"):
        _, *answers = json_lines(run / where / "trajectories.jsonl")
        places += [(answer, f"0.{where}") for answer in answers]
    for group, view in places:
        [seen] = [one for one in asked[group["id"]]["seen"] if one["view"] == view]
        held = data[f"piece{seen['piece']}"]["groups"][seen["at"]]
        # What the page's writer adds.
        for one, own in zip(held["trajectories"], group["trajectories"], strict=True):
            one.pop("correct") if "correct" not in own else None
        assert held == {**held, **group}
        members = group["trajectories"]
        assert seen["total"] == len(members)
        assert set(seen["tags"]) == {tag for one in members for tag in one["turns"][-1]["tags"]}
        if "reward" in members[0]:
            assert seen["right"] == sum(one["correct"] for one in members)


def test_the_verdict_counts_for_more_than_what_a_group_says(tmp_path):
    folder = make_run(tmp_path / "verdict", steps=1, questions=1)
    path = folder / "after" / "predictions.jsonl"
    [verdict] = json_lines(path)
    right = verdict["scores"]["set"]
    write(path, [verdict | {"scores": {"set": 1 - right}}])
    [asked, *_] = opened(write_page(folder))["overview"]["questions"]
    assert asked["seen"][-1]["view"] == "0.after"
    assert asked["seen"][-1]["right"] == 1 - right


def test_other_questions_of_the_same_ids_stand_apart(tmp_path):
    """Such as those of two question files of one name."""
    first = sheet(tmp_path / "first.json", "1")
    found = json.loads(first.read_text())
    found["questions"][0]["question"] = "another?"
    second = write(tmp_path / "second.json", found)
    third, page = shutil.copy(first, tmp_path / "third.json"), tmp_path / "page.html"
    report.main([str(first), str(second), str(third), "--out", str(page)])
    told = [
        (one["id"], [seen["view"] for seen in one["seen"]])
        for one in opened(page)["overview"]["questions"]
    ]
    assert told == [
        ("spider-dev/0", ["0.answers", "2.answers"]),
        ("spider-dev/0 (2)", ["1.answers"]),
    ]


def test_results_are_bounded():
    wide = Table(tuple(f"c{n}" for n in range(2_000)), ((1,) * 2_000,) * 50)
    found = shown(wide)
    assert (found["count"], found["width"], len(found["columns"])) == (50, 2_000, 100)
    assert len(found["rows"]) <= 20
    odd = Table(("a",) * 5, ((None, b"\x00\xff", 2**60, float("inf"), "x" * 1_000),))
    [row] = shown(odd)["rows"]
    assert row[:4] == [None, {"blob": "00ff"}, {"number": str(2**60)}, {"number": "inf"}]
    assert row[4] == "x" * 200 + "… (1,000 characters)"
    assert len(json.dumps(shown(Table(("a",), (("y" * 9_999,),) * 20)))) < 20_000
    assert shown(SqlError("no")) == {"status": "error", "message": "no"}
    assert shown(Denied("a write")) == {"status": "denied", "message": "not allowed: a write"}


DAMAGED = {"at once": '{"step": 0, "ver', "empty": "", "old": '{"step": 1, "turns": []}\n'}
DAMAGED |= {"deep": "[" * 10_000}


@pytest.mark.parametrize("name", ["cut", "gone", *DAMAGED])
def test_what_is_missing_is_told_in_a_line_and_the_rest_is_shown(tmp_path, name):
    folder = make_run(tmp_path / name)
    path = folder / "trajectories.jsonl"
    path.write_text(DAMAGED.get(name, path.read_text()[:-900]))
    if name == "gone":
        path.unlink()
    overview = opened(write_page(folder))["overview"]
    [note] = overview["notes"]
    assert "trajectories.jsonl: " in note
    assert "\n" not in note
    assert len([one for one in overview["questions"] if one["set"] == "held-out"]) == 40
    assert overview["runs"][0]["numbers"]["step"] == [*range(1, 9)]


def test_a_run_that_is_not_finished_says_how_far_it_is(tmp_path, capsys):
    """It goes on, has not begun, or was measured and has not learned."""
    folder = make_run(tmp_path / "going-on")
    unfinish(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "rew')
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text("train: {steps: 3}")
    write_page(folder, begun)
    printed = capsys.readouterr().out
    assert "8 steps so far" in printed
    assert "begun: Not finished: 0 steps so far, and no accuracy yet." in printed
    measured = shutil.copytree(folder, tmp_path / "measured" / "run")
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        (measured / name).unlink()
    write(measured / "warm" / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    for given in (measured, measured.parent):
        write_page(given, out=tmp_path / "measured.html")
        printed = capsys.readouterr().out
        assert "Before learning " in printed
        assert "trajectories.jsonl" not in printed  # there are none yet


def test_records_that_are_none_are_left_out(tmp_path):
    folder = make_run(tmp_path / "odd-records")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": null, "reward/total": 1}\n{"step": 9, "reward/total": NaN}\n')
        file.write('{"step": 10, "groups/live_share": null}\n')
    with (folder / "trajectories.jsonl").open("a") as file:
        file.write('{"step": 9, "id": 5, "trajectories": "x"}\n')
    numbers = opened(write_page(folder))["overview"]["runs"][0]["numbers"]
    assert numbers["step"] == [*range(1, 11)]
    assert numbers["reward/total"][-2:] == [None, None]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["arms/a-seed0/stage2"], ["stage2"]),
        (["arms/a-seed0/two", "arms/b-seed0/two"], ["a-seed0/two", "b-seed0/two"]),
        (["a/seed0", "a/seed1"], ["seed0", "seed1"]),
        (["x/base.json", "x/base.json"], ["base", "base"]),
        (["ours=a/dev", "ours=a/dk", "base=b"], ["ours/a/dev", "ours/a/dk", "base"]),
    ],
)
def test_names_begin_where_paths_part(tmp_path, given, names):
    parts = [one.rpartition("=") for one in given]
    assert shown_names([(name, tmp_path / path) for name, _, path in parts]) == names


@pytest.mark.parametrize(
    ("given", "against"),
    [
        (["one=PLACE/seed0", "two=PLACE/seed1"], "two"),
        (["PLACE"], "PLACE/seed1"),  # which is read once
        (["PLACE", "two=PLACE/seed1"], "PLACE/../base/seed1"),
    ],
)
def test_a_base_is_a_run_by_its_name_or_its_path(tmp_path, capsys, given, against):
    place = tmp_path / "base"
    for seed in range(2):
        make_run(place / f"seed{seed}", steps=1, seed=seed)
    words = [one.replace("PLACE", str(place)) for one in (*given, against)]
    page = write_page(*words[:-1], against=words[-1], out=tmp_path / "rows.html")
    base, other = opened(page)["overview"]["against"]["runs"]
    assert base["name"] in ("two", "seed1/after")
    assert other["name"] in ("one", "seed0/after")


def test_records_begin_with_their_version_and_are_bounded(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text('{"step": 0, "ver')  # left by a full disk
    StepRecorder(tmp_path, str).write(1, [], [])
    assert path.read_text() == '{"step": 0, "version": 2}\n'
    # A step's first group is written in any case.
    lines = [{"text": "x" * 90}] * 5
    assert [len(list(within_limit(lines, limit))) for limit in (250, 10)] == [2, 1]


# Runs beside each other: intervals, p-values and the questions that differ.


@pytest.mark.parametrize("others", [0, 2, 4])
def test_runs_are_compared_by_what_both_are_judged_by_alike(tmp_path, capsys, others):
    """Accuracy by witnesses is none by the rule alone, nor by another number of witnesses."""
    for name, marks, count in (("base", "1+" * 10 + "00" * 10, others), ("ours", "1+" * 20, 4)):
        programs = {"witness": f"ours: set, up to {count} witnesses", "set": "ours"}
        rights = {"witness": "1", "set": "1+"} if count else {"set": "1+"}
        write_marks(tmp_path / f"{name}.json", marks, rights, comparators=programs)
    write_page(
        *(tmp_path / f"{name}.json" for name in ("base", "ours")), out=tmp_path / "page.html"
    )
    assert "ours: 50.0 % [" in capsys.readouterr().out
    overview = opened(tmp_path / "page.html")["overview"]
    both = ["witness", "set"] if others == 4 else ["set", "witness"]
    assert (overview["rules"], overview["apart"]) == (both, [] if others == 4 else ["witness"])


@pytest.fixture
def beside(tmp_path, monkeypatch, capsys):
    """Return what compares runs with the first one; it gives what is printed, and the Markdown."""

    def compare(first: str | Path, *others: str | Path) -> tuple[str, list[str]]:
        monkeypatch.setattr(report.cli.output, "_width", 160)
        out, table = tmp_path / "page.html", tmp_path / "table.md"
        words = [first, *others, "--against", first, "--out", out, "--markdown", table]
        report.main([str(word) for word in words])
        return capsys.readouterr().out, table.read_text().splitlines()

    return compare


def test_two_runs_side_by_side(tmp_path, beside):
    base = sheet(tmp_path / "base.json", "1+00000000")
    ours = sheet(tmp_path / "ours.json", "0+11111111")
    out = tmp_path / "c.json"
    printed, table = beside(base, ours, "--json", out)
    found = json.loads(out.read_text())
    assert [one["name"] for one in found["runs"]] == ["base", "ours"]
    assert found["runs"][0]["columns"]["spider-dev/spider_ex"]["mean"] == 0.2
    ex, ts = found["differences"]
    assert (ex["column"], ex["difference"]) == ("spider-dev/spider_ex", pytest.approx(0.7))
    counts = [ex[name] for name in ("only_first", "only_second", "p")]
    assert counts == [1, 8, pytest.approx(20 / 512)]
    assert len(ts["questions"]) == 9
    assert "spider-dev/1" not in ex["questions"]
    heads = "spider-dev/spider_ex (10 of 1,034) | spider-dev/spider_ts (10 of 1,034)"
    assert table[0] == f"| run | decoding | {heads} |"
    assert table[2].startswith("| base | greedy | 20.0 [")
    assert "+70.0 [" in printed
    assert "+70.0 [" in table[-2]
    # The page has the same, without the text of replies and without rows, which nobody recorded.
    assert (tmp_path / "page.html").stat().st_size < 200_000
    overview = opened(tmp_path / "page.html")["overview"]
    measured = [one["accuracy"]["answers"]["spider_ex"] for one in overview["runs"]]
    assert [one["mean"] for one in measured] == [0.2, 0.9]
    assert overview["rules"] == ["spider_ex", "spider_ts"]
    assert overview["answer"][1].startswith("ours: 90.0 % [")
    assert [one["right"] for one in overview["questions"][0]["seen"]] == [1, 0]
    difference, *_ = overview["against"]["differences"]
    assert [difference[name] for name in ("only_first", "only_second", "p")] == counts
    assert overview["notes"] == []


def test_a_row_has_several_test_sets_in_the_papers_order(tmp_path, beside):
    model = ModelFacts("m", base="Qwen|7B-Coder-Instruct", reward="progressive")
    for name, rights in (("base", "1000"), ("ours", "1110")):
        for data in ("spider-dk", "spider-realistic", "spider-dev"):
            path = tmp_path / name / data / "verdicts.json"
            sheet(path, rights, data=data, model=model if name == "ours" else ModelFacts(name))
    printed, table = beside(tmp_path / "base", f"mine={tmp_path / 'ours'}")
    head, _, first, second = table[:4]
    names = [
        *("spider-dev/spider_ex", "spider-dev/spider_ts"),
        *("spider-realistic/spider_ex", "spider-realistic/spider_ts", "spider-dk/spider_ex"),
    ]
    assert head.startswith("| run | base model | reward | decoding | ")
    assert [cell.split(" (")[0] for cell in head.split(" | ")[4:9]] == names
    assert first.startswith("| base | - | - | greedy | 25.0 [")
    assert second.startswith("| mine | Qwen\\|7B-Coder-Instruct | progressive | greedy | 75.0 [")
    cells = [cell.strip() for row in (first, table[-1]) for cell in row.split("|")]
    assert all(cell in printed for cell in cells)


def test_rows_are_split_by_decoding_and_columns_say_of_how_much_they_are(tmp_path, beside):
    model = ModelFacts("m")
    sheet(tmp_path / "r" / "1" / "verdicts.json", "1" * 535, data="spider-dk", model=model)
    sheet(tmp_path / "r" / "2" / "verdicts.json", "11", model=model, decode="vote@8")
    sheet(tmp_path / "r" / "3" / "verdicts.json", "10", model=model)
    _, (head, _, *rows) = beside(tmp_path / "r")
    wanted = [f"spider-dev/{one} (2 of 1,034)" for one in ("spider_ex", "spider_ts")]
    wanted.append("spider-dk/spider_ex")
    assert head.split(" | ")[2:5] == wanted
    assert {row.split(" | ")[1] for row in rows if row.startswith("| m |")} == {"greedy", "vote@8"}


def test_another_sqlite_is_told(tmp_path, beside, caplog):
    versions = {"sqlite": "4"}
    beside(sheet(tmp_path / "a.json", "10"), sheet(tmp_path / "b.json", "11", versions=versions))
    assert "SQLite is 3 there and 4 here" in caplog.text


def test_a_page_may_take_the_place_of_a_page(tmp_path):
    base = sheet(tmp_path / "base.json", "10")
    page = write_page(base).read_bytes()
    assert write_page(base).read_bytes() == page


# What a report of an evaluation says.


def test_a_report_tells_turns_apart_where_there_are_any():
    judged = verdict(scores={"spider_ex": 1.0}, turns=2)
    several = [judged, replace(judged, id="2", scores={"spider_ex": 0.0}), replace(judged, turns=3)]
    parts = summary(*several).parts["turns"]
    assert {turns: (part["share"], part["spider_ex"]) for turns, part in parts.items()} == {
        "2": (0.666667, 0.5),
        "3": (0.333333, 1.0),
    }
    assert "turns" not in summary(replace(judged, turns=0)).parts


def test_a_part_is_as_sure_as_its_questions():
    judged = verdict(difficulty="hard", scores={"ex_f": 0.5})
    easy = replace(judged, id="2", difficulty="easy", scores={"ex_f": 1.0})
    blind = replace(judged, id="3", scores={}, gold_status="none")
    found = summary(judged, easy, blind)
    assert found.measures["ex_f"] == {"mean": 0.75, "ci95": [0.5, 1.0], "questions": 2}
    assert list(found.parts["difficulty"]) == ["easy", "hard"]  # from easy to hard
    assert found.parts["database"]["d"]["ci95"] == {"ex_f": [0.5, 1.0]}
    nothing = summary(blind)
    assert (nothing.measures, nothing.first) == ({}, "")
