"""Weights on their way to servers, and servers that are children of a run."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from minirl.config import SGLANG_PYTHON, LoraConfig, SglangConfig, check_installed
from minirl.errors import UserError
from minirl.model import huggingface
from minirl.model.lora import add_adapters, split
from minirl.model.sharding import make_mesh, param_shardings
from minirl.sglang import push, watch
from minirl.sglang.processes import Child, close, launch
from minirl.sglang.push import remove_versions, write_version
from minirl.sglang.sampler import _whole

ROOT = Path(__file__).parents[2]


def by_file(model, folder):
    """Write a model as exports are, and read the tensors."""
    folder.mkdir()
    params = nnx.state(model, nnx.Param)
    shapes = huggingface.paths_of(params)
    tensors = {path: huggingface.file_tensors(path, shape) for path, shape in shapes.items()}
    huggingface.write_shards(
        folder,
        huggingface.file_shapes(tensors),
        huggingface._arrays(tensors, huggingface.parts_in_tree(params)),
        dtype="float32",
        max_bytes=10**9,
    )
    return load_file(folder / "model.safetensors")


def equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("mesh", [None, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}])
def test_a_version_is_the_model_wherever_it_lies(toy, tmp_path, mesh):
    model = toy.model()
    params = nnx.state(model, nnx.Param)
    if mesh is not None:
        params = jax.device_put(params, param_shardings(params, make_mesh(mesh)))
    folder, size = write_version(tmp_path / "w", "x-3", params, dtype="float32")
    assert folder.name == "version-x-3"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert (folder / "model.safetensors").stat().st_size == size
    equal(load_file(folder / "model.safetensors"), by_file(model, tmp_path / "export"))


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}])
def test_a_tensor_is_one_write_however_it_is_split(toy, tmp_path, monkeypatch, mesh):
    params = nnx.state(toy.model(), nnx.Param)
    plain, _ = write_version(tmp_path / "w", "plain", params, dtype="bfloat16")
    sizes = []

    def counted(file, data, start, write=os.pwrite):
        sizes.append(len(data))
        return write(file, data, start)

    monkeypatch.setattr(os, "pwrite", counted)
    placed = jax.device_put(params, param_shardings(params, make_mesh(mesh)))
    folder, _ = write_version(tmp_path / "w", "split", placed, dtype="bfloat16")
    tensors = by_file(toy.model(), tmp_path / "export")
    assert sorted(sizes) == sorted(array.size * 2 for array in tensors.values())
    files = [path / "model.safetensors" for path in (folder, plain)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_process_writes_its_share_and_asks_for_all_tensors(toy, tmp_path, monkeypatch):
    """A disk that is full here must not leave the others waiting in a collective."""
    params = nnx.state(toy.model(), nnx.Param)
    written, asked = [], []

    def full(file, data, start):
        written.append(start)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def noted(*arguments, whole=push.whole_tensors):
        for one in whole(*arguments):
            asked.append(one[0])
            yield one

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(push, "whole_tensors", noted)
    with pytest.raises(OSError, match=r"No space.*model\.safetensors"):
        write_version(tmp_path / "w", "x", params, dtype="float32")
    assert len(written) == 1
    assert len(asked) == len(by_file(toy.model(), tmp_path / "export"))


def test_adapters_are_merged(toy, tmp_path):
    plain, model = toy.model(), nnx.clone(toy.model())
    add_adapters(model, LoraConfig(rank=2, targets=("q",)), seed=0)
    graph, params, frozen = split(model)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    folder, _ = write_version(tmp_path / "w", "z", _whole(graph, params, frozen), dtype="float32")
    found = load_file(folder / "model.safetensors")
    before = by_file(plain, tmp_path / "export")
    changed = [name for name in found if not np.array_equal(found[name], before[name])]
    assert changed == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]


def test_only_one_version_is_kept(toy, tmp_path):
    params = nnx.state(toy.model(), nnx.Param)
    place = tmp_path / "w"
    kept = [write_version(place, f"a-{n}", params, dtype="bfloat16")[0] for n in range(3)]
    (place / "version-a-9.new").mkdir()
    (place / "other").mkdir()
    remove_versions(place, but=kept[2])
    assert sorted(path.name for path in place.iterdir()) == ["other", "version-a-2"]


PARENT = """
import sys, time
from pathlib import Path
from minirl.sglang.processes import Child
child = Child([sys.executable, "-c", sys.argv[2]], {"WORD": "x"}, 1, Path(sys.argv[1]) / "log")
print("up", flush=True)
if sys.argv[3] == "close":
    while not (Path(sys.argv[1]) / "pids").exists(): time.sleep(0.02)
    child.close()
else:
    time.sleep(60)
"""
# A server with a process of its own, which takes no notice of a polite end.
SERVER = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
path = pathlib.Path(FOLDER) / "part"
path.write_text(f"{os.getpid()} {worker.pid} {os.environ['WORD']}")
path.rename(path.with_name("pids"))
time.sleep(60)
"""


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("end", ["close", "SIGKILL", "SIGTERM"])
def test_children_end_with_the_run_however_it_ends(tmp_path, monkeypatch, end):
    server = SERVER.replace("FOLDER", repr(str(tmp_path)))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), server, end],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    pids = tmp_path / "pids"
    deadline = time.monotonic() + 30
    while not pids.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    one, other, word = pids.read_text().split()
    assert word == "x"
    if end != "close":
        parent.send_signal(getattr(signal, end))
    parent.communicate(timeout=30)
    while is_alive(one) or is_alive(other):
        assert time.monotonic() < deadline + 30
        time.sleep(0.05)


def test_no_two_servers_get_the_same_port(tmp_path, monkeypatch):
    """The system may give a port that was given back to the next who asks."""
    held = set()

    class First:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            held.discard(self.port)

        def bind(self, _):
            self.port = next(port for port in range(5000, 5009) if port not in held)
            held.add(self.port)

        def getsockname(self):
            return "127.0.0.1", self.port

    monkeypatch.setattr("minirl.sglang.processes.socket.socket", First)
    monkeypatch.setattr(Child, "start", lambda self: None)
    children = launch(
        SglangConfig(python=sys.executable, launch=3), tmp_path,
        dtype="float32", seed=0, logs=tmp_path,
    )  # fmt: skip
    assert [child.url.rpartition(":")[2] for child in children] == ["5000", "5001", "5002"]
    assert not held


def test_children_are_ended_all_at_a_time():
    order = []

    class Quiet(Child):
        def __init__(self, name):
            self._lock, self._is_closed = Lock(), False
            self._process: Any = SimpleNamespace(
                stdin=SimpleNamespace(close=lambda: order.append(f"{name} is told")),
                wait=lambda _: order.append(f"{name} ends"),
            )

    close([Quiet("a"), Quiet("b")])
    assert order == ["a is told", "b is told", "a is told", "a ends", "b is told", "b ends"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_server_ends_with_a_leash_that_is_killed():
    server = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    held = subprocess.Popen(
        [sys.executable, "-P", watch.__file__, sys.executable, "-c", server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with held:
        assert held.stdout is not None
        pid = held.stdout.readline().strip()
        assert is_alive(pid)
        held.kill()
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def interpreter(folder):
    """A stand-in that says what it was started as and with, and stays."""
    folder.mkdir()
    path = folder / "python"
    path.write_text('#!/bin/sh\necho "$0 $PATH $CUDA_VISIBLE_DEVICES $1 $2 end"\nexec sleep 60\n')
    path.chmod(0o755)
    return path


def said(log):
    end = time.monotonic() + 60
    while not (text := log.read_text()).endswith("end\n"):
        assert time.monotonic() < end
        time.sleep(0.02)
    return text.split()[:-1]


def test_launched_servers_have_their_interpreter_and_their_devices(tmp_path, monkeypatch):
    named, default = interpreter(tmp_path / "named"), interpreter(tmp_path / "default")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # the learner's
    monkeypatch.setenv(SGLANG_PYTHON, str(default))
    for given, expected in ((str(named), named), (None, default)):
        config = SglangConfig(python=given, launch=2, devices=("4,5", "6,7"))
        logs = tmp_path / f"{expected.parent.name}-logs"
        path = f"{expected.parent}:{os.environ['PATH']}"
        children = launch(config, tmp_path, dtype="float32", seed=0, logs=logs)
        try:
            assert [said(logs / f"sglang-{number}.log") for number in (0, 1)] == [
                [str(expected), path, devices, "-m", "sglang.launch_server"]
                for devices in ("4,5", "6,7")
            ]
        finally:
            for child in children:
                child.close()
    monkeypatch.setenv(SGLANG_PYTHON, "no-such-python")
    with pytest.raises(UserError, match=r"python \(or MINIRL_SGLANG_PYTHON\): .* no-such-python"):
        check_installed(SglangConfig(launch=1))
