"""Training with real SGLang servers that are killed, stopped, and outlive nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from .conftest import ROOT, TINY
from .sglang_server import ARGUMENTS, VARIABLES

STEPS, EPISODES = 8, 4
EVALUATION = TINY["evaluation"]
MEASURED = {1: EVALUATION["questions"], STEPS: EVALUATION["validation_questions"]}


def write_config(folder: Path, python: str) -> Path:
    train = {**TINY["train"], "steps": STEPS, "eval_every": STEPS, "kl_every": STEPS}
    servers = {
        "launch": 2,
        "python": python,
        "arguments": ARGUMENTS,
        "variables": VARIABLES,
        "timeout_s": 120,
        "health_s": 8,
    }
    rollout = {"backend": "sglang", "sglang": servers}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "train": train, "rollout": rollout}))
    return path


def start(config: Path, run: Path) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "launch.train", "--cfg", str(config), f"run.dir={run}"]
    variables = {
        "PYTHONPATH": str(ROOT),
        "MINIRL_CACHE": str(run.parent / "cache"),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    with (run.parent / "train.log").open("ab") as log:
        return subprocess.Popen(line, env=os.environ | variables, stdout=log, stderr=log)


def metrics(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(
    is_so: Callable[[], object], job: subprocess.Popen[bytes] | None = None, *, limit_s: float
) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end
        assert job is None or job.poll() is None
        time.sleep(0.1)


def commands() -> dict[int, str]:
    """Return the command line of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found[int(path.parent.name)] = path.read_text().replace("\0", " ")
    return found


def servers(run: Path) -> list[int]:
    """List the processes of all servers that were launched for a run."""
    words = "sglang.launch_server", str(run.parent)
    return [pid for pid, line in commands().items() if all(one in line for one in words)]


def schedulers(run: Path) -> list[int]:
    """List the processes that sample, one for each server."""
    found = (pid for pid, line in commands().items() if line.startswith("sglang::scheduler"))
    sessions = set(servers(run))
    return sorted(pid for pid in found if os.getsid(pid) in sessions)


def left_out(run: Path) -> float:
    return sum(line["sglang/left_out"] for line in metrics(run))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.timeout(1800)
def test_a_run_outlives_its_servers_and_they_do_not_outlive_it(sglang_python, tmp_path):
    run = tmp_path / "run"
    config = write_config(tmp_path, sglang_python)
    job = start(config, run)
    wait_for(lambda: len(metrics(run)) >= 2, job, limit_s=600)
    assert len(servers(run)) == 2
    job.kill()
    job.wait()
    wait_for(lambda: not servers(run), limit_s=20)

    job = start(config, run)
    before = len(metrics(run))
    wait_for(lambda: len(metrics(run)) > before, job, limit_s=600)
    stopped, killed = schedulers(run)
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: left_out(run) >= 1, job, limit_s=300)
    os.kill(killed, signal.SIGKILL)
    assert job.wait(600) == 0
    assert not servers(run)
    assert not list((run / "weights").iterdir())

    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        # Each turn of each episode is one answered request: none is lost, none counted twice.
        # Before the first step the servers were asked the test questions, in the last one those
        # of the validation.
        measured = MEASURED.get(int(line["step"]), 0)
        asked = EPISODES * line["rollout/turns"] + measured
        assert line["sglang/requests"] == pytest.approx(asked)
        assert line["mismatch/gap_max"] < 1e-4
    assert left_out(run) >= 2
    assert sum(line["sglang/failed_hung"] + line["sglang/failed_deadline"] for line in lines) >= 1
    assert sum(line["sglang/restarted"] for line in lines) >= 1
    result = json.loads((run / "result.json").read_text())
    assert result["questions"] == 6
