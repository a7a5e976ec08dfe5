"""Arms of any configs or of finished runs: pooled over seeds, paired by question and by seed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import compare
from benchmarks.compare import pool, seeds_interval
from launch.evaluation.results import Report, paired_difference, write_result
from tests.launch.report_cases import summary, verdict

Shown = Callable[..., dict[str, Any]]


def result_of(
    right: str, *, witness: float | None = None, asked: str = "?", golds: str = ""
) -> Report:
    """Judge questions, each of a database of its own: 1 is right."""
    more = {} if witness is None else {"witness": witness}
    verdicts = [
        verdict(
            f"q{n}", db_id=f"d{n}", question=asked, scores=more | {"set": float(one)},
            status="ok" if one == "1" else "error",
        )
        for n, one in enumerate(right)
    ]  # fmt: skip
    return summary(*verdicts, golds=golds)


def finish(folder: Path, *, seed: int, before: str = "0000", **places: str) -> None:
    for name, right in {"before": before, **places}.items():
        write_result(folder / name, result_of(right))
    (folder / "result.json").write_text(json.dumps({"questions": len(before), "seconds": 2}))
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "train": {}}))


@pytest.fixture
def shown(monkeypatch, capsys) -> Shown:
    """Return what runs the command, and gives the JSON that it prints last."""

    def run(*words: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, words)])
        compare.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def points(found: dict[str, Any]) -> dict[tuple[str, str], tuple[float, list[float]]]:
    """Give the mean and each seed's difference by arm and what."""
    return {
        (one["arm"], one["what"]): (
            one["mean"]["difference"],
            [each["difference"] for each in one["seeds"].values()],
        )
        for one in found["comparisons"]
    }


def test_arms_are_run_once_and_compared_by_question(tmp_path, monkeypatch, shown):
    called = []

    def run(command: Sequence[str], **_: object) -> Any:
        called.append(command[1:])
        folder = Path(command[-1].partition("=")[2])
        seed = int(folder.name[-1])
        finish(folder, seed=seed, after="1100" if "two" in folder.name else "1000")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(compare.subprocess, "run", run)
    arms = ["--arm", "one", "a.yaml", "reward.kind=expo", "--arm", "two", "a.yaml"]
    words = [*arms, "--seeds", "0", "1", "--folder", tmp_path, "--", "train.steps=2"]
    for _ in range(2):
        found = shown(*words)
        assert points(found) == {
            ("one", "run"): (0.25, [0.25, 0.25]),
            ("two", "run"): (0.5, [0.5, 0.5]),
            ("two", "less one"): (0.25, [0.25, 0.25]),
        }
        ends = [one["accuracy"]["after"]["set"]["mean"] for one in found["runs"]]
        assert ends == [0.25, 0.25, 0.5, 0.5]
        assert found["runs"][0]["failing"] == {"before": 4, "after": 3}
    assert len(called) == 4
    assert called[0] == [
        *("-m", "launch.train", "--cfg", "a.yaml", "train.steps=2", "reward.kind=expo", "seed=0"),
        f"run.dir={tmp_path}/one-seed0",
    ]


def test_finished_runs_are_paired_by_seed_and_stage(tmp_path, shown):
    """Each seed's warm start wins a question, and reinforcement two of seed 0, none of seed 1."""
    finish(tmp_path / "own-seed0", seed=0, between="1000", after="1110")
    finish(tmp_path / "own-seed1", seed=1, between="0100", after="0100")
    finish(tmp_path / "gold-seed0", seed=0, after="1000")
    finish(tmp_path / "gold-seed1", seed=1, after="1100")
    names = [f"{arm}-seed{seed}" for arm in ("own", "gold") for seed in (0, 1)]
    found = shown("--runs", *(tmp_path / name for name in names))
    assert points(found) == {
        ("own", "run"): (0.5, [0.75, 0.25]),
        ("own", "warm start"): (0.25, [0.25, 0.25]),
        ("own", "reinforcement"): (0.25, [0.5, 0.0]),
        ("gold", "run"): (0.375, [0.25, 0.5]),
        ("gold", "less own"): (-0.125, [-0.5, 0.25]),
    }


def test_results_of_one_model_stand_beside_every_seed(tmp_path, shown):
    write_result(tmp_path / "base", result_of("1000"))
    for seed, right in enumerate(("1100", "1110")):  # of an endpoint, which knows no seed
        write_result(tmp_path / f"own-seed{seed}", result_of(right))
    found = shown("--runs", tmp_path / "base", tmp_path / "own-seed0", tmp_path / "own-seed1")
    assert points(found) == {("own", "less base"): (0.375, [0.25, 0.5])}


def test_two_runs_of_a_seed_are_refused(tmp_path, shown):
    names = [tmp_path / name for name in ("own-seed0", "own_seed0")]
    for name in names:
        write_result(name, result_of("1"))
    with pytest.raises(SystemExit, match=r"^error: .*seed 0"):
        shown("--runs", *names)


def test_the_mean_over_seeds_is_taken_question_by_question():
    """Of four questions on four databases: 0, 1/2, 1/2 and 1 more right, by two seeds."""
    pairs = {0: (result_of("1000"), result_of("1101")), 1: (result_of("1000"), result_of("1011"))}
    (found,) = pool("arm", "run", pairs)
    firsts, seconds = [1.0, 0.0, 0.0, 0.0], [1.0, 0.5, 0.5, 1.0]
    assert found.mean == paired_difference(firsts, seconds, ["d0", "d1", "d2", "d3"])
    assert [one.difference for one in found.seeds.values()] == [0.5, 0.5]
    assert [one.only_second for one in found.seeds.values()] == [2, 2]


def test_the_interval_over_seeds_is_student_s():
    """Of -1, 0 and 1 the standard error is 1 / √3, and t is 4.303 of two degrees of freedom."""
    wanted = {name: paired_difference([0.0], [1.0]) for name in "abc"}
    assert seeds_interval([*wanted.values()]) == (1, 1)
    assert seeds_interval([wanted["a"]]) is None
    ends = ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0))
    found = seeds_interval([paired_difference([a], [b]) for a, b in ends])
    assert found == pytest.approx((-4.3027 / 3**0.5, 4.3027 / 3**0.5), abs=1e-4)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([], "no seed is in both"),
        ([result_of("1")], "other questions or measures"),
        ([result_of("10", asked="!")], "other questions or measures"),  # of the same ids
        ([result_of("10", golds="b")], "other gold queries"),
        ([replace(result_of("10"), measures={})], "other questions or measures"),
    ],
)
def test_arms_that_cannot_be_compared_are_told(others, why, caplog):
    pairs = {seed: (result_of("10"), other) for seed, other in enumerate(others)}
    assert list(pool("two", "less one", pairs)) == []
    assert caplog.messages == [f"two, less one: not compared ({why})"]


def test_seeds_of_other_questions_are_not_mixed_up():
    """Such as those of demo data by the seed, whose ids are the same."""
    seeds = {0: (result_of("0"), result_of("1"))}
    seeds[1] = (result_of("0", asked="!"), result_of("0", asked="!"))
    (found,) = pool("arm", "run", seeds)
    assert (found.mean.difference, found.mean.questions) == (0.5, 2)


def test_arms_are_compared_by_rules_that_both_are_judged_by():
    """One asks witnesses, which nothing is right on, and has the rule's verdicts beside."""
    plain, asks = (result_of("10", witness=witness) for witness in (None, 0.0))
    for pair in ((plain, asks), (asks, plain)):
        (found,) = pool("other", "less one", {0: pair})
        assert (found.rule, found.mean.difference) == ("set", 0.0)
    assert [one.rule for one in pool("other", "less one", {0: (asks, asks)})] == ["witness", "set"]
