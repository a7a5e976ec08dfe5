"""Health: a job is well while something new comes into the folder that it holds."""

from __future__ import annotations

import os
import time

import pytest

from launch import health
from launch.folders import claimed


def age(folder, seconds, *, but=()):
    """Let everything in a folder be so old."""
    then = time.time() - seconds
    for path in (*folder.rglob("*"), folder):
        if path not in but:
            os.utime(path, (then, then))


def test_held_folders_are_those_of_running_jobs(tmp_path):
    folder = tmp_path / "run"
    with claimed(folder, "seed: 0\n", key="run.dir"):
        assert folder in health.held_folders()
        (folder / "metrics.jsonl").touch()
    assert folder.exists()
    assert folder not in health.held_folders()
    # Not everything that is open is a job.
    handle = os.open(tmp_path, os.O_RDONLY)
    assert tmp_path not in health.held_folders()
    os.close(handle)


@pytest.mark.parametrize("fresh", ["metrics.jsonl", "checkpoints/4/part", None])
def test_a_job_is_quiet_since_its_newest_file(tmp_path, capsys, monkeypatch, fresh):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    for name in ("metrics.jsonl", "checkpoints/4/part", "sglang-0.log"):
        (tmp_path / name).touch()
    monkeypatch.setattr(health, "held_folders", lambda: {tmp_path})
    # A server that writes of its health is no progress.
    age(tmp_path, 5000, but=[tmp_path / name for name in (fresh, "sglang-0.log") if name])
    health.main(["--quiet-s", "7200"])
    if fresh:
        health.main(["--quiet-s", "4000"])
    else:
        with pytest.raises(SystemExit) as stop:
            health.main(["--quiet-s", "4000"])
        assert stop.value.code == 1
        assert f"{tmp_path}: last written 5000 s ago" in capsys.readouterr().out


def test_a_machine_without_jobs_is_well(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(health, "held_folders", set)
    health.main([])
    assert capsys.readouterr().out == "no job holds a folder here\n"
    assert health.silence_s(tmp_path / "gone") == 0
