"""Lines of numbers, across kills and resumes."""

from __future__ import annotations

import json
import math

import pytest

from minirl.metrics import JsonLines, Metrics, Stopwatch


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path, steps, *, resume_step):
    lines = JsonLines(path, resume_step=resume_step)
    for step in steps:
        lines.write(step, {"run": resume_step})


def test_lines_after_the_checkpoint_are_taken_away(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    write(path, [1, 2, 3, 4, 5], resume_step=0)
    write(path, [4, 5, 6], resume_step=3)
    assert [(line["step"], line["run"]) for line in lines_of(path)] == [
        (1, 0), (2, 0), (3, 0), (4, 3), (5, 3), (6, 3)
    ]  # fmt: skip
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_run_from_the_start_takes_all_away(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2], resume_step=0)
    write(path, [1], resume_step=0)
    assert [line["step"] for line in lines_of(path)] == [1]


@pytest.mark.parametrize("half", ['{"st', '{"step": 3, "run": 0}', "{"])
def test_a_half_line_left_by_a_kill_is_dropped(tmp_path, half):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2], resume_step=0)
    with path.open("a") as file:
        file.write(half)
    write(path, [3], resume_step=2)
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3]


def test_a_resume_without_a_kill_changes_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, resume_step=0)
    lines.write(1, {"text": "Größe, 東京 ", "x": 0.1 + 0.2})
    before = path.read_bytes()
    JsonLines(path, resume_step=1)
    assert path.read_bytes() == before
    assert lines_of(path) == [{"step": 1, "text": "Größe, 東京 ", "x": 0.1 + 0.2}]


def test_what_json_has_no_number_for_is_null(tmp_path):
    lines = JsonLines(tmp_path / "lines.jsonl", resume_step=0)
    lines.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": 0, "f": "nan"})
    assert lines_of(tmp_path / "lines.jsonl") == [
        {"step": 1, "a": None, "b": None, "c": None, "d": 1.5, "e": 0, "f": "nan"}
    ]


def test_numbers_within_records_too(tmp_path):
    lines = JsonLines(tmp_path / "lines.jsonl", resume_step=0)
    lines.write(1, {"parts": {"a": math.nan, "b": [1.0, math.inf]}})
    assert "NaN" not in (tmp_path / "lines.jsonl").read_text()
    assert lines_of(tmp_path / "lines.jsonl") == [
        {"step": 1, "parts": {"a": None, "b": [1.0, None]}}
    ]


def test_metrics_are_sorted_and_in_tensorboard_too(tmp_path):
    metrics = Metrics(tmp_path, resume_step=0)
    metrics.write(1, {"b": 2.0, "a": 1.0})
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0, "b": 2.0}\n'
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.stat().st_size > 0


def test_stopwatch_adds_up():
    watch = Stopwatch()
    for _ in range(2):
        with watch.phase("rollout"):
            sum(range(1000))
    with pytest.raises(KeyError), watch.phase("update"):
        raise KeyError
    numbers = watch.numbers()
    assert set(numbers) == {"time/rollout_s", "time/update_s"}
    assert all(seconds > 0 for seconds in numbers.values())
