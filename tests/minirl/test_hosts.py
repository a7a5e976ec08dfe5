"""What two processes of two devices exchange, and how they learn of each other."""

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from minirl.run import distributed
from minirl.sglang.transfer import whole_tensors

from . import toy
from .toy import LIMIT_S, ends, processes

# `ends` kills what hangs, and tells what it said, before pytest ends the test.
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 120)
# What two processes of two devices exchange: values, messages, weights, a signal.
TALK = """
import shutil, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
import jax, numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from minirl.run import distributed, preemption
folder, coordinator, process = Path(sys.argv[1]), sys.argv[2], int(sys.argv[4])
distributed.join(coordinator, 2, process)
from tests.minirl import toy
from minirl.exchange import LostError, UserError
from minirl.model.sharding import MESH_AXES, make_mesh
from minirl.sample.weights import local_mesh, local_params
from minirl.run.checkpoint import Checkpoints
from minirl.sglang.transfer import whole_tensors, write_version
from minirl.train.update import TrainState

def large():
    return np.arange(400_000 + process)

assert distributed.gather(lambda: ("part", process)) == [("part", 0), ("part", 1)]
first, second = distributed.gather(large)
assert (len(first), len(second), second[-1]) == (400_000, 400_001, 400_000)
assert distributed.from_first(lambda: f"of {process}") == "of 0"
assert [list(distributed.process_share(n)) for n in (0, 1, 5)] == [
    [[], [], [0, 1]], [[], [0], [2, 3, 4]]][process]

# Weights on meshes whose devices stand in another order than their numbers, as on a TPU.
whole = jax.tree.leaves(nnx.state(toy.model()))
for order, shape in (([0, 2, 1, 3], (1, 4, 1)), ([3, 1, 0, 2], (2, 1, 2))):
    devices = np.array([jax.devices()[n] for n in order]).reshape(shape)
    mesh = Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    params = nnx.state(toy.spread(toy.model(), mesh))
    for memory, sizes in ((1e9, (2, 1, 1)), (1.0, (1, 1, 2))):
        own = local_mesh(params, jax.local_devices(), dtype=np.float32, memory_bytes=memory)
        assert own.devices.shape == sizes
        copy = jax.tree.leaves(local_params(params, own, np.float32))
        for array, leaf in zip(copy, whole, strict=True):
            np.testing.assert_array_equal(array, leaf)
            assert array.sharding.device_set == set(jax.local_devices())

# A model of which neither has all, for servers.
params = nnx.state(toy.spread(toy.model(), make_mesh(toy.OF_SEVERAL)))
assert not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params))
arrays = {name: np.asarray(array) for name, array in whole_tensors(params, "float32")}
np.savez(folder / f"{process}.npz", **arrays)
write_version(folder / "w", "x", params, dtype="float32")

# A signal to one of them, which waits for the other; that one asks for signals as a rollout does.
def work():
    while process == 0 and preemption.noticed() is None:
        time.sleep(0.1)

with preemption.watched():
    if process == 1:
        signal.raise_signal(signal.SIGTERM)
    distributed.gather(work)
    try:
        distributed.check()
    except preemption.Preempted as stop:
        print(stop.signal.name)

# A disk that is full for one of them.
if process == 1:
    shutil.disk_usage = lambda _: SimpleNamespace(free=0)
try:
    Checkpoints(folder / "c").save(1, TrainState(params, {}), {}, score=0.0)
except UserError as error:
    print("full" if "0.0 MB are free" in str(error) else error)

# What one of them has no way around, all end with.
def fail(error):
    if process == 1:
        raise error

try:
    distributed.gather(lambda: fail(LostError("none is left")))
except LostError:
    try:
        distributed.gather(lambda: fail(UserError("no such file")))
    except UserError as error:
        print(error)
"""
# A run of three steps over servers, played one step ahead.
AHEAD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from minirl.run import distributed
model, coordinator, process = Path(sys.argv[1]), sys.argv[3], int(sys.argv[5])
distributed.join(coordinator, 2, process)
from tests.minirl import toy
from minirl.config import SglangConfig
from minirl.sglang import sampler

sampler.read_config = lambda _: SimpleNamespace(hybrid=None)
config = SglangConfig(urls=sys.argv[2].split(","), timeout_s=60)
servers = sampler.Servers(
    config, model, toy.SAMPLER, dtype="float32", seed=0, folder=model.parent
)
with servers:
    toy.trainer(
        model.parent / "run", servers=servers, lag=1, steps=3, checkpoint_every=3
    ).run(lambda *_: None)
"""


def test_what_two_processes_exchange(copies, tmp_path):
    first, second = ends(processes(copies, [tmp_path], code=TALK))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert first[1].splitlines()[-3:] == ["SIGTERM", "full", "process 1 failed: no such file"]
    assert second[1].splitlines()[-3:] == ["SIGTERM", "full", "no such file"]
    # Each process writes as many tensors, to one, and each of them whole.
    whole = dict(whole_tensors(nnx.state(toy.model(), nnx.Param), "float32"))
    shares = [load_file(path) for path in sorted((tmp_path / "w" / "version-x").iterdir())]
    assert [len(share) for share in shares] == [-(-len(whole) // 2), len(whole) // 2]
    for process in ("0", "1"):
        with np.load(tmp_path / f"{process}.npz") as written:
            for found in (shares[0] | shares[1], written):
                assert set(found) == set(whole)
                for name, array in whole.items():
                    np.testing.assert_array_equal(found[name], array)


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


@pytest.mark.nightly
def test_two_processes_play_ahead_of_their_learner(copies, fakes, served):
    urls = ",".join(fake.url for fake in fakes)
    for status, _, errors in ends(processes(copies, [served, urls], code=AHEAD)):
        assert status == 0, errors
    lines = toy.metrics_of(served.parent / "run")
    assert [line["rollout/age_max"] for line in lines] == [0, 1, 1]
    assert {line["groups/trained"] for line in lines} == {4}
    # Each process has its own half of the episodes from its own server, once.
    assert [len(fake.bodies) for fake in fakes] == [16 * len(lines)] * 2


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
