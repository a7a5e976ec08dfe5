"""Arms of any configs: their runs resume, their difference is paired, noise is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import compare
from benchmarks.compare import crossed_bootstrap
from launch.evaluation.results import (
    ModelFacts,
    QuestionVerdict,
    ReportSettings,
    summarise,
    write_result,
)


def finish(folder, right):
    write_result(folder / "after", result_of({str(n): one for n, one in enumerate(right)}))
    mean = sum(right) / len(right)
    found = {"ex_before": 0.0, "ex_after": mean, "gain": mean, "gain_ci95": [0, 1], "seconds": 2}
    (folder / "result.json").write_text(json.dumps(found | {"rule": "set"}))


def result_of(right, witness=None):
    settings = ReportSettings(data="test", model=ModelFacts("m"), decode="greedy")
    verdicts = [
        QuestionVerdict(
            *(name, "d", "", "?", "SELECT 1", "SELECT 2"),
            {**({} if witness is None else {"witness": witness}), "set": float(one)},
        )
        for name, one in right.items()
    ]
    return summarise(settings, verdicts, seed=0)


def test_runs_are_made_once_and_compared_by_question(tmp_path, monkeypatch, capsys):
    called = []

    def run(command, **_):
        called.append(command[1:])
        folder = Path(command[-1].partition("=")[2])
        finish(folder, [True, "two" in folder.name, False, False])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(compare.subprocess, "run", run)
    arms = ["--arm", "one", "a.yaml", "reward.kind=expo", "--arm", "two", "a.yaml"]
    words = [*arms, "--seeds", "0", "1", "--folder", str(tmp_path), "--", "train.steps=2"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    for _ in range(2):
        compare.main()
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        (difference,) = shown["differences"]
        assert (difference["arm"], difference["less"], difference["seeds"]) == ("two", "one", 2)
        assert difference["points"] == 25
        assert [one["ex_after"] for one in shown["runs"]] == [0.25, 0.5, 0.25, 0.5]
    assert len(called) == 4
    assert called[0] == [
        *("-m", "launch.train", "--cfg", "a.yaml", "train.steps=2", "reward.kind=expo", "seed=0"),
        f"run.dir={tmp_path}/one-seed0",
    ]


def test_arms_of_other_questions_are_not_compared():
    one, other = ({0: result_of(right)} for right in ({"a": 1.0, "b": 0.0}, {"a": 1.0}))
    assert compare.compare({"one": one, "two": other, "three": {}}) == []


def test_arms_are_compared_by_a_rule_that_both_are_judged_by():
    """One asks witnesses, which nothing is right on, and has the rule's verdicts beside."""
    plain, asks = ({0: result_of({"a": 1.0, "b": 0.0}, witness)} for witness in (None, 0.0))
    for one, other in ((plain, asks), (asks, plain)):
        (found,) = compare.compare({"one": one, "other": other})
        assert (found.rule, found.points) == ("set", 0.0)
    (found,) = compare.compare({"one": asks, "other": asks})
    assert found.rule == "witness"


def test_an_effect_in_every_seed_is_found_and_noise_is_not():
    rng = np.random.default_rng(0)
    right = rng.random((5, 500)) < 0.3
    better = right | (rng.random((5, 500)) < 0.1)
    mean, low, _, p = crossed_bootstrap(better.astype(float) - right)
    assert mean == pytest.approx(better.mean() - right.mean())
    assert low > 0.03
    assert p < 0.001
    other = rng.random((5, 500)) < 0.3
    _, low, high, p = crossed_bootstrap(other.astype(float) - right)
    assert low < 0 < high
    assert p > 0.05
    # One lucky seed of five is no effect, however many questions there are.
    lucky = np.zeros((5, 500))
    lucky[0] = 1.0
    assert crossed_bootstrap(lucky)[-1] > 0.5
