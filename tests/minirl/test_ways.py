"""Weights made whole for servers, wherever they lie, and never all of them at one place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from minirl.model.sharding import make_mesh, param_shardings
from minirl.sglang.push import whole_tensors
from minirl.sglang.transfer import buckets, host_tensors

from .test_hosts import ends, processes
from .test_push import ROOT, by_file, equal

MESHES = [None, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [whole_tensors, host_tensors])
def test_tensors_are_those_of_an_export_wherever_they_lie(toy, tmp_path, make, mesh):
    params = nnx.state(toy.model(), nnx.Param)
    if mesh is not None:
        params = jax.device_put(params, param_shardings(params, make_mesh(mesh)))
    found = list(make(params, "float32"))
    for _, array in found:
        assert isinstance(array, np.ndarray) or len(array.sharding.device_set) == 1
    equal({name: np.asarray(array) for name, array in found}, by_file(toy.model(), tmp_path / "e"))


@pytest.mark.parametrize("make", [whole_tensors, host_tensors])
def test_tensors_have_the_type_that_servers_compute_in(toy, make):
    params = nnx.state(toy.model(), nnx.Param)
    found = dict(make(params, "bfloat16"))
    assert {array.dtype for array in found.values()} == {jnp.dtype("bfloat16")}
    norm = toy.model().final_norm[...].astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["model.norm.weight"], norm)


def test_buckets_are_bounded_and_in_order():
    sizes = [3, 4, 20, 1, 1, 8, 2]
    tensors = [(str(n), np.zeros(size, np.uint8)) for n, size in enumerate(sizes)]
    found = list(buckets(tensors, max_bytes=10))
    assert [[name for name, _ in one.tensors] for one in found] == [
        ["0", "1"], ["2"], ["3", "4", "5"], ["6"],
    ]  # fmt: skip
    assert [one.nbytes for one in found] == [7, 20, 10, 2]
    assert [one.is_last for one in found] == [False, False, False, True]


# A model over the devices of two processes: neither has all of it.
WHOLE = """
import os, sys
import jax, numpy as np
from flax import nnx
from pathlib import Path
from minirl.run import distributed
distributed.join(distributed.ProcessConfig(sys.argv[1], 2, int(sys.argv[2])))
import conftest, toy_run
from minirl.sglang.push import whole_tensors, write_version
from minirl.model.sharding import make_mesh
folder = Path(sys.argv[3])
params = nnx.state(toy_run.spread(conftest.toy_model(), make_mesh({"fsdp": 2, "tensor": 2})))
assert not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params))
arrays = {name: np.asarray(array) for name, array in whole_tensors(params, "float32")}
np.savez(folder / f"{distributed.jax.process_index()}.npz", **arrays)
sizes, write = [], os.pwrite
os.pwrite = lambda file, data, start: sizes.append(len(data)) or write(file, data, start)
write_version(folder / "w", "x", params, dtype="float32")
np.save(folder / f"sizes-{distributed.jax.process_index()}.npy", sizes)
"""


@pytest.mark.timeout(480)
def test_processes_that_share_a_model_have_every_tensor_whole(toy, tmp_path):
    export = by_file(toy.model(), tmp_path / "export")
    for code, _, errors in ends(processes(tmp_path, code=WHOLE)):
        assert code == 0, errors
    # Each tensor is one write, and each process has as many, to one.
    sizes = [np.load(tmp_path / f"sizes-{process}.npy") for process in (0, 1)]
    assert sorted(np.concatenate(sizes)) == sorted(array.nbytes for array in export.values())
    assert abs(len(sizes[0]) - len(sizes[1])) <= 1
    for process in ("0", "1"):
        with np.load(tmp_path / f"{process}.npz") as found:
            equal(dict(found), export)
    equal(load_file(tmp_path / "w" / "version-x" / "model.safetensors"), export)


# How much more than the model a process holds while it makes parcels of it.
PEAK = """
import dataclasses, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from pathlib import Path
from conftest import CONFIG
from minirl.model.decoder import Decoder
from minirl.sglang.push import whole_tensors, write_version
from minirl.model.sharding import make_mesh, param_shardings
from minirl.sglang.transfer import buckets, host_tensors
sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 32}
config = dataclasses.replace(CONFIG, **sizes, num_attention_heads=8)
shapes = nnx.state(nnx.eval_shape(lambda: Decoder(config, key=jax.random.key(0))), nnx.Param)
places = param_shardings(shapes, make_mesh({"fsdp": 2, "tensor": 2}))
params = jax.tree.map(lambda leaf, place: jnp.ones(leaf.shape, device=place), shapes, places)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

def peak():
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) * 1024

def work(way):
    if way == "disk":
        write_version(Path(sys.argv[1]), "x", params, dtype="float32")
        return
    make = {"whole": whole_tensors, "host": host_tensors}[way]
    for bucket in buckets(make(params, "float32"), max_bytes=size // 32):
        held = [np.array(array) for _, array in bucket.tensors]  # as a tensor of PyTorch would be

for way in sys.argv[2:]:
    next(whole_tensors(params, "float32"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    work(way)
    print(way, round((peak() - before) / size, 3))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_model_is_never_in_memory_twice(tmp_path):
    """A model of 218 MB over four devices; what is above it are buckets, or a part of one."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    variables = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "XLA_FLAGS": flags}
    found = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path, "whole", "host", "disk"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    shares = {line.split()[0]: float(line.split()[1]) for line in found.stdout.splitlines()}
    assert shares.keys() == {"whole", "host", "disk"}
    assert max(shares.values()) < 0.6, shares
