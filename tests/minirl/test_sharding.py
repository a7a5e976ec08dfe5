"""Parameters are split along named axes, and kept whole where the mesh does not divide them."""

import logging
from dataclasses import replace
from functools import partial

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from minirl.config import LoraConfig
from minirl.exchange import UserError
from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder
from minirl.model.lora import add_adapters
from minirl.model.sharding import PARAM_AXES, make_mesh, param_path, param_shardings

from .toy import CONFIG, HYBRID


def param_shapes(config: ModelConfig = CONFIG) -> nnx.State:
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, key=jax.random.key(0))))


def specs(mesh, config: ModelConfig = CONFIG) -> dict[str, PartitionSpec]:
    leaves = jax.tree.leaves_with_path(param_shardings(param_shapes(config), mesh))
    return {param_path(path): sharding.spec for path, sharding in leaves}


def test_axes_of_a_mesh():
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": len(jax.devices()), "tensor": 1}
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 2}
    with pytest.raises(UserError, match="data 1 x fsdp 3 x tensor 1 is not the 4 devices"):
        make_mesh({"fsdp": 3}, jax.devices()[:4])


def test_the_table_knows_every_parameter():
    def make(config: ModelConfig) -> Decoder:
        model = Decoder(config, key=jax.random.key(0))
        add_adapters(model, LoraConfig(), seed=0)
        return model

    models = [nnx.eval_shape(partial(make, config)) for config in (CONFIG, HYBRID)]
    leaves = [leaf for model in models for leaf in jax.tree.leaves_with_path(nnx.state(model))]
    paths = [param_path(path) for path, _ in leaves]
    assert {path.rpartition(".")[2] for path in paths} == set(PARAM_AXES)
    assert {"layers.q", "layers.linear.in_qkv"} <= {*paths}


def test_specs():
    found = specs(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert found["layers.q"] == PartitionSpec(None, "tensor", "fsdp")
    assert found["layers.q_bias"] == PartitionSpec(None, "tensor")
    assert found["layers.o"] == PartitionSpec(None, "fsdp", "tensor")
    assert found["layers.down"] == PartitionSpec(None, "fsdp", "tensor")
    assert found["embed"] == PartitionSpec("tensor", "fsdp")
    assert found["layers.q_norm"] == PartitionSpec(None, None)


def test_what_does_not_divide_stays_whole_with_a_note(caplog):
    with caplog.at_level(logging.INFO, logger="minirl.model.sharding"):
        found = specs(make_mesh({"fsdp": 2, "tensor": 4}), replace(CONFIG, intermediate_size=26))
    assert found["layers.q"] == PartitionSpec(None, "tensor", "fsdp")
    assert found["layers.gate"] == PartitionSpec(None, None, "fsdp")
    assert "layers.gate: ff = 26 is not split over tensor = 4" in caplog.messages
