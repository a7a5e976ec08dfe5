"""launch.report: what a page holds, and what is said of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launch import report
from launch.records import shown
from launch.reporting.runs import shown_names
from minirl.exchange import UserError
from sqlenv.types import Denied, SqlError, Table

from .conftest import json_lines, write_lines
from .report_cases import (
    accuracy_in,
    make_run,
    opened,
    unfinish,
    write_page,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return make_run(place / "made-up-seed0")


def test_the_page_holds_the_numbers_and_every_group_of_the_run(run, capsys):
    data = opened(write_page(run))
    result = json.loads((run / "result.json").read_text())
    [found] = data["overview"]["runs"]
    assert found["command"].endswith(f" --cfg {run}/config.yaml run.dir={run}")
    places = ("before", "after")
    means = [found["measured"][where]["set"]["mean"] for where in places]
    assert means == [accuracy_in(run, where) for where in places]
    told, wanted = (each["gains"]["run"]["set"] for each in (found, result))
    assert told.pop("ci95_databases") is not None
    assert {name: wanted[name] for name in told} == told
    printed = capsys.readouterr().out
    ends = (f"{100 * mean:.1f}" for mean in means)
    assert f"from {' to '.join(ends)} % of " in printed
    assert data["overview"]["notes"] == []
    asked = {one["id"]: one for one in data["overview"]["questions"]}
    _, *groups = json_lines(run / "trajectories.jsonl")
    assert len(groups) == 4 * 3
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
            for turn in one["turns"]:
                turn.pop("beside", None)
        assert held == {**held, **group}
        members = group["trajectories"]
        assert seen["total"] == len(members)
        assert set(seen["tags"]) == {tag for one in members for tag in one["turns"][-1]["tags"]}
        if "reward" in members[0]:
            assert seen["right"] == sum(one["correct"] for one in members)


def test_the_verdict_counts_for_more_than_what_a_group_says(place):
    folder = make_run(place / "verdict", steps=1, questions=1)
    path = folder / "after" / "predictions.jsonl"
    [verdict] = json_lines(path)
    right = verdict["scores"]["set"]
    write_lines(path, [verdict | {"scores": {"set": 1 - right}}])
    [asked, *_] = opened(write_page(folder))["overview"]["questions"]
    assert asked["seen"][-1]["view"] == "0.after"
    assert asked["seen"][-1]["right"] == 1 - right


def test_places_of_credit_are_those_of_javascript(place):
    folder = make_run(place / "astral", steps=1, questions=2)
    path = folder / "trajectories.jsonl"
    head, group, *_ = json_lines(path)
    one = group["trajectories"][0]
    one["turns"][0]["reply"] = "\U0001f600 a \U0001f600 b"
    one["turns"][0]["place"] = 2
    one["spans"] = [[0, 2, 3, 1.0], [0, 6, 7, -1.0]]
    write_lines(path, [head, group])
    found = opened(write_page(folder))["piece1"]["groups"][0]["trajectories"][0]
    text = one["turns"][0]["reply"].encode("utf-16-le")
    spans = [text[2 * a : 2 * b].decode("utf-16-le") for _, a, b, _ in found["spans"]]
    assert spans == ["a", "b"]
    assert found["turns"][0]["place"] == found["spans"][0][1]


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


@pytest.mark.parametrize(
    "damaged",
    [
        lambda text: text[:-900],
        lambda text: '{"step": 0, "ver',
        lambda text: "",
        None,
        lambda text: '{"step": 1, "turns": []}\n',
        lambda text: "[" * 10_000,
    ],
    ids=["cut", "cut at once", "empty", "gone", "old", "deep"],
)
def test_what_is_missing_is_told_in_a_line_and_the_rest_is_shown(place, damaged, request):
    folder = make_run(place / request.node.callspec.id)
    path = folder / "trajectories.jsonl"
    text = path.read_text()
    path.unlink()
    if damaged:
        path.write_text(damaged(text))
    overview = opened(write_page(folder))["overview"]
    [note] = overview["notes"]
    assert "trajectories.jsonl: " in note
    assert "\n" not in note
    assert len([one for one in overview["questions"] if one["set"] == "held-out"]) == 40
    assert overview["runs"][0]["numbers"]["step"] == [*range(1, 9)]


def test_a_run_that_goes_on_and_one_that_has_not_begun(place, capsys):
    folder = make_run(place / "going-on")
    unfinish(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "rew')
    begun = place / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text("train: {steps: 3}")
    write_page(folder, begun)
    printed = capsys.readouterr().out
    assert "8 steps so far" in printed
    assert "begun: Not finished: 0 steps so far, and no accuracy yet." in printed


def test_a_run_that_was_measured_and_has_not_learned(place, capsys):
    folder = make_run(place / "measured" / "run")
    for name in ("result.json", "metrics.jsonl", "trajectories.jsonl"):
        (folder / name).unlink()
    shutil.rmtree(folder / "after")
    write_lines(folder / "warm" / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    for given in (folder, folder.parent):
        write_page(given, out=place / "measured.html")
        assert "Before learning " in capsys.readouterr().out


def test_what_helps_is_said_where_few_groups_were_live(place, capsys):
    for live, told in ((0.2, True), (0.5, False)):
        run = make_run(place / f"live-{live}", steps=12, live=live)
        write_page(run, out=place / "live.html")
        printed = capsys.readouterr().out
        assert ("At the end of training, only 20 % of the groups of 10 steps" in printed) == told
        assert ("data.train.pass_rate" in printed) == told


def test_verdicts_that_are_cut_off_are_refused(place):
    folder = make_run(place / "cut-answers")
    path = folder / "before" / "predictions.jsonl"
    text = path.read_text()
    path.write_text(f"{text[:1000]}\n")
    with pytest.raises(UserError, match=r"before/predictions\.jsonl: line \d+: "):
        write_page(folder)


def test_records_that_are_none_are_left_out(place):
    folder = make_run(place / "odd-records")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": null, "reward/total": 1}\n{"step": 9, "reward/total": NaN}\n')
    with (folder / "trajectories.jsonl").open("a") as file:
        file.write('{"step": 9, "id": 5, "trajectories": "x"}\n')
    numbers = opened(write_page(folder))["overview"]["runs"][0]["numbers"]
    assert numbers["step"] == [*range(1, 10)]
    assert numbers["reward/total"][-1] is None


def test_seeds_are_alike_and_settings_that_differ_are_named(place):
    folder = place / "study"
    for name, seed, rate in (("a", 0, 0.001), ("b", 1, 0.001), ("c", 2, 0.002)):
        make_run(folder / name, steps=2, seed=seed, rate=rate)
    overview = opened(write_page(folder))["overview"]
    assert [run["name"] for run in overview["runs"]] == ["a", "b", "c"]
    assert overview["alike"] == [[0, 1], [2]]
    assert overview["differing"] == {
        "seed": [0, 1, 2],
        "model.path": [f"starts/seed{seed}/model" for seed in range(3)],
        "train.optimizer.learning_rate": [0.001, 0.001, 0.002],
    }


def test_names_are_the_ends_of_paths_that_tell_runs_and_configurations_apart(place):
    def named(*paths: str) -> list[str]:
        return shown_names([("", place / path) for path in paths])

    assert named("arms/a-seed0/stage2") == ["stage2"]
    assert named("arms/a-seed0/stage2", "arms/b-seed0/stage2") == [
        "a-seed0/stage2",
        "b-seed0/stage2",
    ]
    assert named("a/seed0", "a/seed1") == ["a/seed0", "a/seed1"]
    assert named("a/x-seed0", "b/x-seed1") == ["a/x-seed0", "b/x-seed1"]
    assert named("x/base.json", "x/base.json") == ["base", "base"]
    both = [("ours", place / "a" / "dev"), ("ours", place / "a" / "dk"), ("base", place / "b")]
    assert shown_names(both) == ["ours/dev", "ours/dk", "base"]


def test_a_base_may_be_called_as_its_row(place, capsys):
    arms = place / "rows-of-arms"
    runs = [make_run(arms / f"two-seed{n}" / "stage2", steps=1, seed=n) for n in range(2)]
    named = [f"first={runs[0]}", f"second={runs[1]}"]
    write_page(*named, against="second", out=place / "rows.html")
    assert "Beside second" in capsys.readouterr().out


def test_mistakes_are_told(place, run):
    page, other = place / "mistake.html", place / "shop.sqlite"
    other.write_text("SQLite format 3")
    for name in ("nothing", "begun-evaluation"):
        (place / name).mkdir()
    (place / "begun-evaluation" / "config.yaml").write_text("decode: greedy")
    wrong = [(place / name, page) for name in ("nowhere", "nothing", "begun-evaluation")]
    for path, out in (*wrong, (run, place), (run, other)):
        with pytest.raises(UserError, match=str(place)):
            write_page(path, out=out)
    with pytest.raises(UserError, match="--against"):
        report.main([str(run), "--markdown", str(place / "t.md")])  # beside which base?
    assert not page.exists()
    assert other.read_text() == "SQLite format 3"
    before = write_page(run).read_bytes()
    assert write_page(run).read_bytes() == before
