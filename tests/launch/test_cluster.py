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
from minirl.run.checkpoint import grace_s

FOLDER = Path(__file__).parents[2] / "launch" / "cluster"
JOBSETS = ("jobset-gpu.yaml", "jobset-tpu.yaml")
SLURM = ["bash", str(FOLDER / "slurm.sh"), "progress.yaml", "runs/progress"]
# The first stands in for Python: it notes its arguments, and waits for SIGTERM if told so.
PROGRAMS = {
    "python": """#!/bin/bash
printf '%q ' "$@" > arguments
echo "$CUDA_VISIBLE_DEVICES" > devices
[[ -f patient ]] || exit "$(cat status 2>/dev/null || echo 0)"
trap 'touch noticed; exit 0' TERM
touch waiting
while true; do sleep 0.05; done
""",
    "srun": '#!/bin/bash\nshift\n"$@"\n',
    "scontrol": '#!/bin/bash\necho "$@" > requeued\n',
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with stand-ins for the programs that the scripts call."""
    for name, text in PROGRAMS.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "runs" / "progress").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(name):
    (replicated,) = yaml.safe_load((FOLDER / name).read_text())["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def script(name):
    (container,) = job(name)["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def options_of(line) -> argparse.Namespace:
    """Run a script, and read the arguments that it gave to our command."""
    subprocess.run(line, check=False)
    module, *arguments = shlex.split(Path("arguments").read_text())[1:]
    assert module == "launch.train"
    return train.make_parser().parse_intermixed_args(arguments)


@pytest.mark.parametrize("status", [0, 2])
@pytest.mark.parametrize("is_finished", [True, False])
def test_slurm(place, status, is_finished):
    (place / "status").write_text(str(status))
    if is_finished:
        (place / "runs" / "progress" / "result.json").write_text("{}")
    assert subprocess.run([*SLURM, "seed=1"], check=False).returncode == status
    # A mistake is not repeated.
    assert (place / "requeued").exists() == (status == 0 and not is_finished)
    options = options_of([*SLURM, "seed=1"])
    assert (options.accel, options.cfg) == ("gpu", "progress.yaml")
    assert options.overrides == ["run.dir=runs/progress", "seed=1"]


@pytest.mark.parametrize("name", JOBSETS)
def test_jobsets_pass_the_signal_on_and_fail_until_there_is_a_result(place, name):
    (place / "patient").touch()
    with subprocess.Popen(script(name)) as running:
        until = time.monotonic() + 60
        while not (place / "waiting").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 1
    assert (place / "noticed").exists()
    (place / "patient").unlink()
    (place / "runs" / "progress" / "result.json").write_text("{}")
    assert subprocess.run(script(name), check=False).returncode == 0


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", JOBSETS)
def test_jobsets_start_our_command_on_every_host(name):
    spec, options = job(name), options_of(script(name))
    assert spec["parallelism"] == spec["completions"]
    assert options.accel == name.removeprefix("jobset-").removesuffix(".yaml")
    if options.accel == "gpu":
        own = yaml.safe_load((FOLDER / name).read_text())["metadata"]["name"]
        assert options.coordinator == f"{own}-host-0-0.{own}:12355"
        assert (options.processes, options.process) == (spec["completions"], 3)
    else:
        pod = spec["template"]["spec"]
        x, y, z = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
        assert int(x) * int(y) * int(z) == chips * spec["completions"]


@pytest.mark.parametrize("name", [*JOBSETS, "slurm.sh"])
def test_a_stop_has_the_time_that_saving_a_model_of_7b_takes(name):
    """Weights and two moments in float32, written at 0.4 GB/s."""
    text = (FOLDER / name).read_text()
    (given,) = re.findall(r"(?:TERM@|terminationGracePeriodSeconds: )(\d+)", text)
    size = 12 * 7.615e9
    assert int(given) >= grace_s(size / 0.4e9)


def check_split(options):
    """See that each GPU of a node belongs to the learner or to one server."""
    config = load_config("progress-demo.yaml", options.overrides).rollout
    assert (config.backend, len(config.sglang.devices)) == ("sglang", config.sglang.launch)
    learner = Path("devices").read_text().strip()
    assert sorted(",".join([learner, *config.sglang.devices]).split(",")) == [*"01234567"]


@pytest.mark.usefixtures("place")
def test_slurm_gives_the_learner_what_servers_leave(monkeypatch):
    servers = ["rollout.backend=sglang", "rollout.sglang.launch=4"]
    monkeypatch.setenv("LEARNER_GPUS", "0,1,2,3")
    check_split(options_of([*SLURM, *servers, 'rollout.sglang.devices=["4", "5", "6", "7"]']))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", JOBSETS)
def test_jobsets_with_the_lines_for_servers(name):
    *command, lines = script(name)
    used = re.sub(r"(?m)^#   (?=\S)", "", lines)
    assert used != lines
    options = options_of([*command, used])
    if options.accel == "gpu":
        check_split(options)
    else:
        assert len(load_config("progress-demo.yaml", options.overrides).rollout.sglang.urls) == 2
