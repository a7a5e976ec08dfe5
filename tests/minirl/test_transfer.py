"""Weights made whole for servers, wherever they lie, and never all of them at one place."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from minirl.config import LoraConfig
from minirl.model import huggingface
from minirl.model.lora import add_adapters, trained
from minirl.model.sharding import make_mesh, param_shardings
from minirl.sglang import transfer
from minirl.sglang.transfer import (
    remove_versions,
    whole_tensors,
    write_adapters,
    write_version,
)

from .mesh_update import adapted
from .toy_run import spread

ROOT = Path(__file__).parents[2]


def by_file(model, folder):
    """Write a model as exports are, and read the tensors."""
    source = ROOT / "tests" / "data" / "reference" / "qwen2"
    huggingface.save(model, folder, source=source)
    return load_file(folder / "model.safetensors")


def equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_a_version_is_the_model_wherever_it_lies(toy, tmp_path):
    model = toy.model()
    params = nnx.state(model, nnx.Param)
    params = jax.device_put(params, param_shardings(params, make_mesh({"fsdp": 4, "tensor": 2})))
    folder = write_version(tmp_path / "w", "x-3", params, dtype="float32")
    assert folder == tmp_path / "w" / "version-x-3"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    equal(load_file(folder / "model.safetensors"), by_file(model, tmp_path / "export"))


def test_a_disk_that_is_full_here_leaves_no_process_waiting_in_a_collective(
    toy, tmp_path, monkeypatch
):
    params = nnx.state(toy.model(), nnx.Param)
    asked = []

    def full(folder, shapes, arrays, *, dtype, name, max_bytes):
        next(arrays)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{folder}/{name}.safetensors")

    def noted(*arguments, whole=transfer.whole_tensors):
        for one in whole(*arguments):
            asked.append(one[0])
            yield one

    monkeypatch.setattr(transfer, "write_files", full)
    monkeypatch.setattr(transfer, "whole_tensors", noted)
    with pytest.raises(OSError, match=r"No space.*model\.safetensors"):
        write_version(tmp_path / "w", "x", params, dtype="float32")
    assert sorted(asked) == sorted(by_file(toy.model(), tmp_path / "export"))
    assert not (tmp_path / "w" / "version-x").exists()


def test_of_adapters_a_version_is_peft_s_folder_wherever_they_lie(toy, tmp_path):
    lora = LoraConfig(rank=2, targets=("q", "down"))
    model = spread(toy.model(), make_mesh({"fsdp": 4, "tensor": 2}))
    add_adapters(model, lora, seed=0)
    params = trained(model)
    folder = write_adapters(tmp_path, "x-3", params, lora, base=tmp_path / "base")
    assert folder == tmp_path / "version-x-3"
    shapes = huggingface.tensor_shapes(params)
    expected = huggingface.tensors(params)
    huggingface.write_adapter(tmp_path / "e", shapes, expected, lora, base=str(tmp_path / "base"))
    for path in (tmp_path / "e").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("targets", [("in_qkv", "in_z", "q"), ("in_z",), ("in_qkv", "out")])
def test_adapters_of_linear_attention_are_pushed_as_sglang_joins_them(toy, tmp_path, targets):
    """It stacks A and B of queries, keys, values and gates, and wants all four."""
    lora = LoraConfig(rank=2, targets=targets)
    model = adapted(spread(toy.model(hybrid=True), None), lora)
    expected = dict(huggingface.tensors(trained(model)))
    folder = write_adapters(
        tmp_path, "x", trained(model), lora, base=tmp_path, hybrid=toy.HYBRID.hybrid
    )
    found = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    inputs = "base_model.model.model.layers.2.linear_attn.in_proj_"
    assert len([name for name in found if name.startswith(inputs)]) == 8
    a, b = ([found[f"{inputs}{part}.lora_{end}.weight"] for part in "qkvz"] for end in "AB")
    change = np.concatenate([one @ other for one, other in zip(b, a, strict=True)])

    def whole(name, size):
        own = f"model.layers.2.linear_attn.in_proj_{name}.lora_"
        if f"{own}A.weight" not in expected:
            return np.zeros((size, 16))
        return expected[f"{own}B.weight"] @ expected[f"{own}A.weight"]

    np.testing.assert_allclose(change, np.concatenate([whole("qkv", 56), whole("z", 24)]))
    others = {"q": "q_proj", "out": "out_proj"}
    assert config["target_modules"] == [
        "in_proj_qkvz", *(others[name] for name in targets if name in others)
    ]  # fmt: skip


def test_only_one_version_is_kept(tmp_path):
    for name in ("version-a-2", "version-a-1", ".version-a-9.7.new", "other"):
        (tmp_path / name).mkdir()
    remove_versions(tmp_path, but=tmp_path / "version-a-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "version-a-2"]


def test_tensors_have_the_type_that_servers_compute_in(toy):
    params = nnx.state(toy.model(), nnx.Param)
    params = jax.device_put(params, param_shardings(params, make_mesh({"fsdp": 4, "tensor": 2})))
    found = dict(whole_tensors(params, "bfloat16"))
    kinds = {(array.dtype.name, len(array.sharding.device_set)) for array in found.values()}
    assert kinds == {("bfloat16", 1)}
    norm = toy.model().final_norm[...].astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["model.norm.weight"], norm)


# How much more than the model a process holds while it writes it.
PEAK = """
import dataclasses, sys
import jax, jax.numpy as jnp
from flax import nnx
from pathlib import Path
from tests.minirl.conftest import CONFIG
from minirl.model.decoder import Decoder
from minirl.model.sharding import make_mesh, param_shardings
from minirl.sglang import transfer
from minirl.sglang.transfer import whole_tensors, write_version
from tests.memory import peak_bytes
sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 32}
config = dataclasses.replace(CONFIG, **sizes, num_attention_heads=8)
shapes = nnx.state(nnx.eval_shape(lambda: Decoder(config, key=jax.random.key(0))), nnx.Param)
places = param_shardings(shapes, make_mesh({"fsdp": 2, "tensor": 2}))
params = jax.tree.map(lambda leaf, place: jnp.ones(leaf.shape, device=place), shapes, places)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
next(whole_tensors(params, "float32"))
transfer._FILE_BYTES = 2**25
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak_bytes()
write_version(Path(sys.argv[1]), "x", params, dtype="float32")
print(round((peak_bytes() - before) / size, 3))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_model_is_never_in_memory_twice(copies, tmp_path):
    """A model of 218 MB over four devices; what is above it is one of its files."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    found = copies(tmp_path, cwd=tmp_path, code=PEAK, XLA_FLAGS=flags).end()
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) < 0.6
