"""The scripts of `launch/cluster/`: commands that are ours, and go on after they were stopped."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from launch import train
from launch.config import load_config

FOLDER = Path(__file__).parents[2] / "launch" / "cluster"
JOBSETS = ("jobset-gpu.yaml", "jobset-tpu.yaml")
# Stands in for Python: it notes its arguments, and waits for SIGTERM if told so.
PYTHON = """#!/bin/bash
printf '%q ' "$@" >> arguments
echo "$CUDA_VISIBLE_DEVICES" > devices
[[ -f patient ]] || exit "$(cat status 2>/dev/null || echo 0)"
trap 'touch noticed; exit 0' TERM
touch waiting
while true; do sleep 0.05; done
"""


@pytest.fixture
def place(tmp_path):
    """A folder with stand-ins for the programs that the scripts call."""
    scripts = {
        "python": PYTHON,
        "srun": '#!/bin/bash\nshift\n"$@"\n',
        "scontrol": '#!/bin/bash\necho "$@" > requeued\n',
    }
    for name, text in scripts.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "runs" / "progress").mkdir(parents=True)
    return tmp_path


def environment(place, **more):
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    own = {"PATH": path, "SLURM_JOB_ID": "7", "JOB_COMPLETION_INDEX": "3"}
    return os.environ | own | {"CUDA_VISIBLE_DEVICES": "all"} | more


def job(name):
    (replicated,) = yaml.safe_load((FOLDER / name).read_text())["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container(name):
    (found,) = job(name)["template"]["spec"]["containers"]
    return found


def options_of(line) -> argparse.Namespace:
    """Read a command's arguments as it does."""
    module, *arguments = shlex.split(line)[1:]
    assert module == "launch.train"
    return train.make_parser().parse_intermixed_args(arguments)


@pytest.mark.parametrize("status", [0, 2])
@pytest.mark.parametrize("is_finished", [True, False])
def test_slurm(place, status, is_finished):
    (place / "status").write_text(str(status))
    if is_finished:
        (place / "runs" / "progress" / "result.json").write_text("{}")
    line = ["bash", FOLDER / "slurm.sh", "progress.yaml", "runs/progress", "seed=1"]
    done = subprocess.run(line, cwd=place, env=environment(place), check=False)
    assert done.returncode == status
    options = options_of((place / "arguments").read_text())
    assert (options.accel, options.cfg) == ("gpu", "progress.yaml")
    assert options.overrides == ["run.dir=runs/progress", "seed=1"]
    # A mistake is not repeated.
    assert (place / "requeued").exists() == (status == 0 and not is_finished)


@pytest.mark.parametrize("name", JOBSETS)
def test_jobsets_pass_the_signal_on_and_fail_until_there_is_a_result(place, name):
    line = [*container(name)["command"], *container(name)["args"]]
    (place / "patient").touch()
    with subprocess.Popen(line, cwd=place, env=environment(place)) as running:
        until = time.monotonic() + 60
        while not (place / "waiting").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 1
    assert (place / "noticed").exists()
    (place / "patient").unlink()
    (place / "runs" / "progress" / "result.json").write_text("{}")
    assert subprocess.run(line, cwd=place, env=environment(place), check=False).returncode == 0


@pytest.mark.parametrize("name", JOBSETS)
def test_jobsets_start_our_command_on_every_host(place, name):
    spec = job(name)
    assert spec["parallelism"] == spec["completions"]
    line = [*container(name)["command"], *container(name)["args"]]
    subprocess.run(line, cwd=place, env=environment(place), check=False)
    options = options_of((place / "arguments").read_text())
    assert options.accel == name.removeprefix("jobset-").removesuffix(".yaml")
    if options.accel == "gpu":
        metadata = yaml.safe_load((FOLDER / name).read_text())["metadata"]
        assert options.coordinator == f"{metadata['name']}-host-0-0.{metadata['name']}:12355"
        assert (options.processes, options.process) == (spec["completions"], 3)
    else:
        selector = spec["template"]["spec"]["nodeSelector"]
        x, y, z = selector["cloud.google.com/gke-tpu-topology"].split("x")
        chips = container(name)["resources"]["limits"]["google.com/tpu"]
        assert int(x) * int(y) * int(z) == chips * spec["completions"]


SERVERS = ["rollout.backend=sglang", "rollout.sglang.launch=4"]
SERVERS += ['rollout.sglang.devices=["4", "5", "6", "7"]']


def check_split(place, options):
    """See that each GPU of a node belongs to the learner or to one server."""
    config = load_config("progress-demo.yaml", options.overrides).rollout
    assert config.backend == "sglang"
    assert len(config.sglang.devices) == config.sglang.launch
    learner = (place / "devices").read_text().strip()
    assert sorted(",".join([learner, *config.sglang.devices]).split(",")) == [*"01234567"]


def test_slurm_gives_the_learner_what_servers_leave(place):
    line = ["bash", FOLDER / "slurm.sh", "progress.yaml", "runs/progress", *SERVERS]
    env = environment(place, LEARNER_GPUS="0,1,2,3")
    subprocess.run(line, cwd=place, env=env, check=True)
    check_split(place, options_of((place / "arguments").read_text()))
    subprocess.run(line, cwd=place, env=environment(place, LEARNER_GPUS=""), check=True)
    assert (place / "devices").read_text() == "all\n"


@pytest.mark.parametrize("name", JOBSETS)
def test_jobsets_with_the_lines_for_servers(place, name):
    (script,) = container(name)["args"]
    lines = re.sub(r"(?m)^#   (?=\S)", "", script)
    assert lines != script
    subprocess.run(
        [*container(name)["command"], lines], cwd=place, env=environment(place), check=False
    )
    options = options_of((place / "arguments").read_text())
    if options.accel == "gpu":
        check_split(place, options)
    else:
        assert len(load_config("progress-demo.yaml", options.overrides).rollout.sglang.urls) == 2
