"""A run over two processes of two devices is the run of one device, also when one is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from minirl.run import distributed

from . import toy_run
from .test_mesh import batches, numbers_of, start

HERE = Path(__file__).parent
# Of a life; on a free core it takes ten to fifteen seconds, on a loaded machine minutes.
LIMIT_S = 480
# `ends` kills what hangs, and tells what it said, before pytest ends the test.
pytestmark = pytest.mark.timeout(2 * LIMIT_S)
# How one process ends, and with it the other.
ENDS = """
import sys
from minirl.run import distributed
coordinator, process, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.join(distributed.ProcessConfig(coordinator, 2, process, heartbeat_s=10))
from launch import cli
from minirl.errors import UserError

def fail():
    if process == 1:
        raise UserError("no such file")

def main(arguments):
    if kind == "error":
        distributed.gather(fail)
    if process == 1:
        raise UserError("only here") if kind == "alone" else KeyboardInterrupt
    distributed.check()

cli.run(main)
"""
# What two processes of two devices exchange: values, messages, weights, an update.
TALK = """
import sys, time
from types import SimpleNamespace
import jax, numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from minirl.run import distributed
coordinator, process, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.join(distributed.ProcessConfig(coordinator, 2, process))
import conftest, test_mesh, toy_run
from launch import plan
from minirl.model.sharding import MESH_AXES, param_path
from minirl.sample.cache import device_memory
from minirl.sample.weights import local_mesh, local_params

def large():
    return np.arange(400_000 + process)

assert distributed.gather(lambda: ("part", process)) == [("part", 0), ("part", 1)]
first, second = distributed.gather(large)
assert (len(first), len(second), second[-1]) == (400_000, 400_001, 400_000)
assert distributed.from_first(lambda: f"of {process}") == "of 0"
assert [list(distributed.own_share(n)) for n in (0, 1, 5)] == [
    [[], [], [0, 1]], [[], [0], [2, 3, 4]]][process]

# A message is downloaded once, however long the wait.
real, downloaded = distributed.distributed.global_state.client, []

class Client:
    def __getattr__(self, name):
        return getattr(real, name)

    def blocking_key_value_get_bytes(self, key, wait_ms):
        found = real.blocking_key_value_get_bytes(key, wait_ms)
        downloaded.append(key)
        return found

distributed.distributed.global_state.client = Client()
for number in range(3):
    # The second is late, so that the first has to ask again and again.
    time.sleep(process)
    assert distributed.gather(lambda: (number, process)) == [(number, 0), (number, 1)]
assert len(downloaded) == len(set(downloaded)) == 3, downloaded
distributed.distributed.global_state.client = real

# Weights on meshes whose devices stand in another order than their numbers, as on a TPU.
whole = jax.tree.leaves(nnx.state(conftest.toy_model()))
for order, shape in (([0, 2, 1, 3], (1, 4, 1)), ([3, 1, 0, 2], (2, 1, 2))):
    devices = np.array([jax.devices()[n] for n in order]).reshape(shape)
    mesh = Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    params = nnx.state(toy_run.spread(conftest.toy_model(), mesh))
    for memory, sizes in ((1e9, (2, 1, 1)), (1.0, (1, 1, 2))):
        own = local_mesh(params, jax.local_devices(), dtype=np.float32, memory_bytes=memory)
        assert own.devices.shape == sizes
        copy = jax.tree.leaves(local_params(params, own, np.float32))
        for array, leaf in zip(copy, whole, strict=True):
            np.testing.assert_array_equal(array, leaf)
            assert array.sharding.device_set == set(jax.local_devices())

# The update of test_mesh.py.
toy = SimpleNamespace(CONFIG=conftest.CONFIG)
learner, state = test_mesh.start(toy, {"fsdp": 2, "tensor": 2})
reference = jax.tree.map(lambda leaf: leaf.copy(), state.params)
state, stats = learner.update(state, test_mesh.batches(), reference=reference)
leaves = jax.tree.leaves_with_path(state.params)
arrays = {param_path(path): distributed.whole(leaf) for path, leaf in leaves}
(logprobs,) = learner.logprobs(reference, test_mesh.batches())
if distributed.is_first():
    np.savez(f"{folder}/found.npz", loss=stats["loss"], logprobs=logprobs, **arrays)

# GPUs tell their memory to their own process only.
class Gpu:
    platform = "gpu"

    def __init__(self, device):
        self.process_index = device.process_index

    def memory_stats(self):
        if self.process_index != process:
            raise RuntimeError("MemoryStats is only supported for addressable PjRt devices.")
        return {"bytes_limit": 10 + self.process_index}

gpus = [Gpu(device) for device in jax.devices()]
own = [gpu for gpu in gpus if gpu.process_index == process]
mesh = SimpleNamespace(devices=np.array(gpus), size=len(gpus), local_devices=own)
assert distributed.gather(lambda: device_memory(mesh)) == [10, 11]
jax.local_devices = lambda: own
assert distributed.gather(plan._device_limit) == [10, 11]
"""


def processes(*arguments, code="", script="toy_run.py", cwd=HERE, cache=None):
    """Start processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    flags = re.sub(r"device_count=\d+", "device_count=2", os.environ["XLA_FLAGS"])
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}", "XLA_FLAGS": flags}
    if cache is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    lines = (
        [sys.executable, "-c", code, coordinator, process, *arguments]
        if code
        else [sys.executable, HERE / script, *arguments, coordinator, 2, process]
        for process in range(2)
    )
    return [
        subprocess.Popen(
            list(map(str, line)),
            env=environment,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in lines
    ]


def ends(started):
    """Return status, output and errors of all; those that do not end are killed, and it shows."""
    until = time.monotonic() + LIMIT_S
    said = []
    for one in started:
        try:
            said.append(one.communicate(timeout=max(until - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            one.kill()
            said.append(one.communicate())
    return [(one.returncode, *texts) for one, texts in zip(started, said, strict=True)]


def live(folder, cache, moment="", step=0):
    return ends(processes(folder, moment, step, "plain", cache=cache))


def test_an_error_of_one_ends_all_with_its_words(tmp_path):
    first, second = ends(processes("error", code=ENDS, cwd=tmp_path))
    assert (first[0], second[0]) == (2, 2)
    assert "error: process 1 failed: no such file" in first[2].splitlines()
    assert "error: no such file" in second[2].splitlines()


@pytest.mark.parametrize(("kind", "status"), [("alone", 2), ("interrupted", 130)])
def test_a_process_that_leaves_alone_ends_the_others(tmp_path, kind, status):
    first, second = ends(processes(kind, code=ENDS, cwd=tmp_path))
    assert second[0] == status
    assert first[0] not in (0, -signal.SIGKILL)  # with which `ends` ends what hangs
    assert "another task died" in first[2] or "another process" in first[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory):
    """The folder of the run over two processes that nothing befell."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    for code, _, errors in live(folder, cache):
        assert code == 0, errors
    return folder


def test_two_processes_exchange_and_update_as_one_device_does(toy, tmp_path):
    for code, _, errors in ends(processes(tmp_path, code=TALK)):
        assert code == 0, errors
    learner, state = start(toy, None)
    reference = jax.tree.map(lambda leaf: leaf.copy(), state.params)
    (logprobs,) = learner.logprobs(reference, batches())
    state, stats = learner.update(state, batches(), reference=reference)
    with np.load(tmp_path / "found.npz") as found:
        assert found["loss"] == pytest.approx(stats["loss"], rel=1e-6, abs=1e-6)
        np.testing.assert_allclose(found["logprobs"], logprobs, rtol=1e-5, atol=1e-5)
        for key, array in numbers_of(state).items():
            scale = np.abs(array).max()
            np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5 * scale)


def test_a_run_of_two_processes_is_that_of_one_device(toy, whole, tmp_path):
    """The same numbers; and what two processes saved, one device reads."""
    one = toy_run.make_trainer(toy, tmp_path)
    one.run(lambda *_: None)
    ours, theirs = toy_run.metrics_of(whole), toy_run.metrics_of(tmp_path)
    assert len(ours) == len(theirs) == toy_run.STEPS
    for line, twin in zip(ours, theirs, strict=True):
        for numbers in (line, twin):  # of the mesh
            assert numbers.pop("update/padding") > 0
        assert line == pytest.approx(twin, rel=1e-6, abs=1e-6)
    name = "trajectories.jsonl"
    assert (whole / name).read_bytes() == (tmp_path / name).read_bytes()
    shutil.copytree(whole, tmp_path / "copy")
    read = toy_run.make_trainer(toy, tmp_path / "copy")
    assert read.steps_done == toy_run.STEPS
    for leaf, twin in zip(jax.tree.leaves(read.params), jax.tree.leaves(one.params), strict=True):
        scale = np.abs(twin).max()
        # Eight updates of AdamW at a rate of 0.1 make more of the rounding than one does.
        np.testing.assert_allclose(leaf, twin, rtol=1e-3, atol=1e-4 * scale)


# Where each life of a process ends, and of which; checkpoints are due every second step.
LIVES = (("rollout", 2, 1), ("notice", 3, 1), ("apply", 4, 1), ("checkpoint", 6, 0))


@pytest.mark.timeout(6 * LIMIT_S)
def test_a_run_of_which_a_process_is_killed_or_stopped_ends_as_if_none_had_been(
    whole, cache, tmp_path
):
    folder = tmp_path / "run"
    for moment, step, victim in LIVES:
        lives = live(folder, cache, moment, step)
        survivor = lives.pop(1 - victim)
        if moment == "notice":  # SIGTERM
            assert (lives[0][0], survivor[0]) == (0, 0), lives
            assert "stopped by SIGTERM: all 2 steps are saved" in survivor[2]
            continue
        assert lives[0][0] == -signal.SIGKILL, (moment, lives)
        assert survivor[0] not in (0, -signal.SIGKILL)
        assert "a peer process" in survivor[2] or "another task died" in survivor[2], survivor
    assert [code for code, *_ in live(folder, cache)] == [0, 0]
    assert toy_run.without_times(folder) == toy_run.without_times(whole)
    name = "trajectories.jsonl"
    assert (folder / name).read_bytes() == (whole / name).read_bytes()
    arrays = [read_arrays(run / "checkpoints" / str(toy_run.STEPS)) for run in (folder, whole)]
    assert arrays[0].keys() == arrays[1].keys()
    for key, array in arrays[0].items():
        np.testing.assert_array_equal(array, arrays[1][key])


def read_arrays(checkpoint):
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as reader:
        stored = dict(reader.metadata(checkpoint / "tree").item_metadata)
        kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
        return reader.restore(checkpoint / "tree", args=ocp.args.PyTreeRestore(restore_args=kinds))


@pytest.mark.parametrize(
    ("variables", "is_announced"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, False),  # a batch script, not its step
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "t-0"}, False),
        ({"TPU_WORKER_HOSTNAMES": "t-0,t-1"}, True),
    ],
)
def test_where_the_environment_tells_of_others(monkeypatch, variables, is_announced):
    for name in ("SLURM_STEP_NUM_TASKS", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.is_announced() == is_announced


@pytest.mark.parametrize(
    ("tasks", "gpus", "devices"),
    [("1(x4)", "8", [*range(8)]), ("1", "2", [0, 1]), ("8(x4)", "8", None), ("1", "", None)],
)
def test_a_slurm_task_alone_on_its_node_takes_all_gpus(monkeypatch, tasks, gpus, devices):
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert distributed._slurm_devices() == devices
    # The others are for servers; JAX counts those that it sees.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert distributed._slurm_devices() == (devices and [0, 1])
