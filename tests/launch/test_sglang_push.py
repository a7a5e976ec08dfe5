"""New weights come to two real servers by every backend, while a request is under way."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from minirl.config import TinyConfig
from minirl.model.tiny import make_tiny

from .conftest import ROOT, TINY
from .sglang_server import scheduler_of, serve

LEARNER = Path(__file__).parent / "push_learner.py"
LIMIT_S = 400
# Says where PyTorch is, and for which Python.
FIND = "import sys, torch; print(sys.version_info[:2], torch.__path__[0].removesuffix('/torch'))"


@pytest.fixture(scope="module")
def torch_folder(sglang_python) -> str | None:
    """Return the folder that PyTorch is in; None where it is installed here; else a skip."""
    if importlib.util.find_spec("torch") is not None:
        return None
    found = subprocess.run([sglang_python, "-c", FIND], capture_output=True, text=True, check=True)
    version, _, folder = found.stdout.strip().partition(") ")
    if f"{version})" != str(sys.version_info[:2]):
        pytest.skip(f"PyTorch is neither installed here nor, for this Python, with {sglang_python}")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "model"
    make_tiny(folder, ["SELECT name FROM emp"], TinyConfig(**TINY["model"]["tiny"]), 0)
    return folder


@pytest.fixture(scope="module")
def servers(sglang_python, model) -> Generator[list[str]]:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starts = [serve(sglang_python, model, model.with_name(f"{n}.log")) for n in range(2)]
        yield list(pool.map(stack.enter_context, starts))


@pytest.fixture
def learn(torch_folder, model, servers, tmp_path):
    """Return `learn(push, devices=1, victim=0)`: what a learner tells of its pushes."""

    def run(push: str, *, devices: int = 1, victim: int = 0) -> dict[str, Any]:
        variables = {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            **({} if torch_folder is None else {"MINIRL_TORCH": torch_folder}),
        }
        done = subprocess.run(
            [sys.executable, LEARNER, model, tmp_path, push, str(victim), *servers],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        sys.stderr.write(done.stderr)  # why a server was left out
        assert done.returncode == 0
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(("push", "devices"), [("disk", 1), ("nccl", 1), ("disk", 4), ("nccl", 4)])
def test_servers_compute_what_the_learner_does(learn, tmp_path, push, devices):
    """Also of a learner whose weights are split over four devices."""
    found = learn(push, devices=devices)
    assert len(found["gaps"]) == 3
    assert max(found["gaps"]) < 1e-4
    assert found["moved"] > 1e-2  # what the weights of the step before would be off by
    assert 0 < found["reply"] <= found["asked"]
    told = [*found["pushes"], found["numbers"]]
    assert sum(numbers["sglang/requests"] for numbers in told) == 1
    assert found["pushes"][0]["sglang/servers"] == 2
    for push in told:
        # A reply that old and new weights wrote together may be asked for once more.
        failed = {key for key, value in push.items() if "/failed_" in key and value}
        assert failed <= {"sglang/failed_stale"}
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_server_that_hangs_in_a_push_is_left_out_and_gets_the_next(learn, servers):
    found = learn("nccl", victim=scheduler_of(servers[1]))
    assert found["pushes"][2]["sglang/failed_deadline"] == 1
    assert found["pushes"][2]["sglang/servers"] == 1
    assert found["after"]["sglang/taken_back"] == 1
    assert found["after"]["sglang/probe_gap"] < 1e-4
    assert max(found["gaps"]) < 1e-4
