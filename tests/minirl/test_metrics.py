"""Lines of numbers, across kills and resumes."""

from __future__ import annotations

import errno
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minirl.errors import UserError
from minirl.run.metrics import JsonLines, Metrics, Stopwatch, read_metrics


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path, steps, *, resume_step):
    lines = JsonLines(path, resume_step=resume_step)
    for step in steps:
        lines.write(step, {"run": resume_step})


@pytest.mark.parametrize("half", ["", '{"st', '{"step": 6, "run": 0}'])
def test_lines_after_the_checkpoint_are_taken_away_and_half_ones(tmp_path, half):
    path = tmp_path / "new" / "metrics.jsonl"
    write(path, [1, 2, 3, 4, 5], resume_step=0)
    with path.open("a") as file:
        file.write(half)  # left by a kill
    write(path, [4, 5, 6], resume_step=3)
    assert [(line["step"], line["run"]) for line in lines_of(path)] == [
        (1, 0), (2, 0), (3, 0), (4, 3), (5, 3), (6, 3)
    ]  # fmt: skip
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]
    write(path, [1], resume_step=0)
    assert [line["step"] for line in lines_of(path)] == [1]


def test_numbers_and_texts_come_back_and_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "lines.jsonl"
    record = {"text": "Größe, 東京 ", "x": 0.1 + 0.2, "e": 0, "f": "nan"}
    odd = {"a": math.nan, "b": math.inf, "parts": {"c": [1.0, -math.inf]}}
    JsonLines(path, resume_step=0).write(1, record | odd)
    before = path.read_bytes()
    JsonLines(path, resume_step=1)
    assert path.read_bytes() == before
    nulls = {"a": None, "b": None, "parts": {"c": [1.0, None]}}
    assert lines_of(path) == [{"step": 1} | record | nulls]


def test_metrics_are_sorted_and_in_tensorboard_too(tmp_path):
    metrics = Metrics(tmp_path, resume_step=0)
    metrics.write(1, {"b": 2.0, "a": 1.0})
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0, "b": 2.0}\n'
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.stat().st_size > 0


DAMAGES = [
    (b"{\n", "line 1: broken JSON"),
    (b'{"step": 1}\n\xff\xfe\n', "line 2: broken JSON"),
    (b'{"step": "x"}\n', "line 1: step should be a whole number"),
]


@pytest.mark.parametrize("read", [partial(JsonLines, resume_step=1), read_metrics, Metrics])
@pytest.mark.parametrize(("content", "words"), DAMAGES)
def test_a_damaged_line_is_named_and_kept(tmp_path, read, content, words):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path, resume_step=1) if read is Metrics else read(
            tmp_path if read is read_metrics else path
        )
    assert str(caught.value).startswith(f"{path}: {words}")
    assert path.read_bytes() == content


def test_metrics_are_numbers(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": "x"}\n')
    with pytest.raises(UserError, match="line 1: a should be a number"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("kept", [None, 0, 1])
def test_numbers_that_are_lost_stop_a_resume_before_it_begins(tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    if kept is not None:
        path.write_text('{"step": 1, "a": null}\n' * kept)
    with pytest.raises(UserError, match="the numbers of step 2 are not there"):
        Metrics(tmp_path, resume_step=2)


def test_a_full_disk_names_the_file_and_nothing_waits(tmp_path):
    metrics = Metrics(tmp_path, resume_step=0)
    metrics.write(1, {"a": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        metrics.write(2, {"a": 1.0})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    path.unlink()
    # The same of TensorBoard's file.
    board: Any = metrics._board
    recorder = board._file._py_recordio_writer
    recorder._writer.close()
    recorder._writer = Path("/dev/full").open("wb")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device") as caught:
        metrics.write(3, {"a": 1.0})
    assert caught.value.filename == str(tmp_path / "tensorboard")
    metrics.close()
    with pytest.raises(OSError, match="No space left"):
        recorder._writer.close()


def test_stopwatch_adds_up():
    watch = Stopwatch()
    for _ in range(2):
        with watch.phase("rollout"):
            sum(range(1000))
    with pytest.raises(KeyError), watch.phase("update"):
        raise KeyError
    numbers = watch.numbers()
    assert set(numbers) == {"time/rollout_s", "time/update_s", "time/step_s"}
    assert numbers["time/step_s"] >= numbers["time/rollout_s"] + numbers["time/update_s"]
    assert all(seconds > 0 for seconds in numbers.values())
