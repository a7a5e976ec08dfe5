"""`launch/cluster/slurm.sh`: its command is ours, and goes on after it was stopped."""

import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.config import load_config

from .conftest import parsed

FOLDER = Path(__file__).parents[2] / "launch" / "cluster"
SLURM = ["bash", str(FOLDER / "slurm.sh"), "progress.yaml", "runs/progress"]
# The first stands in for Python: it notes its arguments.
PROGRAMS = {
    "python": """#!/bin/bash
printf '%q ' "$@" > arguments
echo "$CUDA_VISIBLE_DEVICES" > devices
exit "$(cat status 2>/dev/null || echo 0)"
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_script(*settings: str) -> tuple[int, SimpleNamespace]:
    """Return its status, and the options that it gave to our command."""
    status = subprocess.run([*SLURM, *settings], check=False).returncode
    module, *arguments = shlex.split(Path("arguments").read_text())[1:]
    assert module == "launch.train"
    return status, SimpleNamespace(**parsed("train", *arguments))


@pytest.mark.parametrize("status", [0, 2])
@pytest.mark.parametrize("is_finished", [True, False])
def test_slurm(place, status, is_finished):
    (place / "status").write_text(str(status))
    if is_finished:
        (place / "runs" / "progress" / "result.json").write_text("{}")
    found, options = run_script("seed=1")
    assert found == status
    # A mistake is not repeated.
    assert (place / "requeued").exists() == (status == 0 and not is_finished)
    assert (options.accel, options.cfg) == ("gpu", "progress.yaml")
    assert options.overrides == ("run.dir=runs/progress", "seed=1")


@pytest.mark.usefixtures("place")
def test_slurm_gives_the_learner_what_servers_leave(monkeypatch):
    """Each GPU of a node belongs to the learner or to one server."""
    servers = ["rollout.sglang.launch=4", 'rollout.sglang.devices=["4", "5", "6", "7"]']
    monkeypatch.setenv("LEARNER_GPUS", "0,1,2,3")
    _, options = run_script(*servers)
    config = load_config("progress-demo.yaml", options.overrides).rollout
    assert (config.sampler, len(config.sglang.devices)) == ("sglang", config.sglang.launch)
    learner = Path("devices").read_text().strip()
    assert sorted(",".join([learner, *config.sglang.devices]).split(",")) == [*"01234567"]
