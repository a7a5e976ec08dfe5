"""The trajectories of a run's sampled steps are there to read, in bounded files."""

from __future__ import annotations

from collections import Counter

import pytest

from launch.records import StepRecorder, open_records, within_limit
from tests.minirl import toy_run
from tests.minirl.conftest import TOY

from .conftest import json_lines


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The lines that a toy run writes."""
    folder = tmp_path_factory.mktemp("recorded")
    recorder = StepRecorder(folder, TOY.Tokenizer().decode)
    trainer = toy_run.make_trainer(TOY, folder, steps=4, write=recorder.write)
    trainer.run(lambda *_: None)
    return json_lines(folder / "trajectories.jsonl")


def test_trajectories_are_there_to_read(recorded):
    head, *groups = recorded
    assert head == {"step": 0, "version": 2}
    assert Counter(group["step"] for group in groups) == {1: 4, 3: 4}
    assert [group["group"] for group in groups] == 2 * [0, 1, 2, 3]
    for group in groups:
        assert set(group) == {"step", "group", "id", "prompt", "trajectories"}
        assert group["id"] in group["prompt"]
        assert len(group["trajectories"]) == 8
        for one in group["trajectories"]:
            keys = ("reward", "parts", "correct", "advantage", "ended", "versions", "turns")
            assert set(one) == {*keys}
            assert one["versions"] == [group["step"] - 1] * 2
            first, *others = one["turns"]
            assert first == first | {"reply": first["said"]}
            assert set(first) == {"reply", "finish", "said"}
            assert all("NO" in turn["observation"] for turn in others)
        # Of a group's advantages, normalised, the mean is 0; they are in the order of the rewards.
        pairs = [(one["reward"], one["advantage"]) for one in group["trajectories"]]
        assert sum(advantage for _, advantage in pairs) == pytest.approx(0, abs=1e-4)
        assert [a for _, a in sorted(pairs)] == sorted(a for _, a in pairs)


def test_records_begin_with_their_version_and_are_bounded(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text('{"step": 0, "ver')  # left by a full disk
    open_records(path, resume_step=0)
    assert path.read_text() == '{"step": 0, "version": 2}\n'
    # A step's first group is written in any case.
    lines = [{"text": "x" * 90}] * 5
    assert [len(list(within_limit(lines, limit))) for limit in (250, 10)] == [2, 1]
