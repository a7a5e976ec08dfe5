"""The copy of the weights that one process samples from."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minirl.config import LoraConfig
from minirl.model import lora
from minirl.model.sharding import make_mesh
from minirl.plan.memory import device_bytes
from minirl.sample.local import (
    COPY_SHARE,
    copy_shapes,
    in_compute_type,
    local_mesh,
    local_model,
    local_params,
)

from . import toy_run


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_copy_is_split_over_as_few_devices_as_have_the_memory(toy, tensor):
    params = nnx.state(toy.model())
    mesh = local_mesh(params, jax.devices(), dtype=np.float32, memory_bytes=np.inf)
    assert mesh is not None
    assert mesh.devices.shape == (8, 1, 1)
    whole = device_bytes(copy_shapes(params, make_mesh({"data": 8}), np.float32))
    fits = device_bytes(
        copy_shapes(params, make_mesh({"data": 8 // tensor, "tensor": tensor}), np.float32)
    )
    assert fits <= whole
    for memory_bytes, shape in (
        (fits / COPY_SHARE, (8 // tensor, 1, tensor)),
        # No number of devices is enough: all of them share it.
        (fits / COPY_SHARE / 100, (1, 1, 8)),
    ):
        mesh = local_mesh(params, jax.devices(), dtype=np.float32, memory_bytes=memory_bytes)
        assert mesh is not None
        assert mesh.devices.shape == shape


def test_one_device_needs_no_mesh(toy):
    model = toy.model()
    assert local_model(model) is model
    params = nnx.state(model)
    assert local_mesh(params, jax.devices()[:1], dtype=np.float32, memory_bytes=1.0) is None


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_a_copy_has_the_weights_in_the_type_of_the_computation(toy, shape):
    model = toy_run.spread(toy.model(), make_mesh(shape))
    own = local_model(model).mesh
    assert own is not None
    assert own.devices.shape == (8, 1, 1)
    params = nnx.state(model)
    copy = local_params(params, own, jnp.bfloat16)
    described = copy_shapes(params, own, jnp.bfloat16)
    for array, leaf, info in zip(*map(jax.tree.leaves, (copy, params, described)), strict=True):
        assert (array.shape, array.dtype) == (info.shape, info.dtype)
        assert array.sharding.is_equivalent_to(info.sharding, array.ndim)
        assert array.is_fully_replicated
        np.testing.assert_array_equal(array, leaf.astype(array.dtype))
    types = {
        jax.tree_util.keystr(path[-2:]): leaf.dtype
        for path, leaf in jax.tree.leaves_with_path(copy)
    }
    assert {str(dtype) for dtype in types.values()} == {"float32", "bfloat16"}


def test_adapters_are_copied_in_full_precision(toy):
    model = nnx.clone(toy.model())
    lora.add_adapters(model, LoraConfig(rank=2), seed=0)
    _, adapters, frozen = lora.split(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(in_compute_type(adapters, jnp.bfloat16))} == {
        jnp.dtype("float32")
    }
    assert jnp.dtype("bfloat16") in {
        leaf.dtype for leaf in jax.tree.leaves(in_compute_type(frozen, jnp.bfloat16))
    }


def test_samplers_share_what_is_not_trained(toy):
    model = toy_run.spread(toy.model(), make_mesh({"fsdp": 8}))
    lora.add_adapters(model, LoraConfig(rank=2), seed=0)
    first, second = (lora.split(local_model(model))[2] for _ in range(2))
    assert jax.tree.leaves(first)
    for one, other in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        assert one.is_fully_replicated
        assert _places(one) == _places(other)


def test_a_trainer_holds_no_copy_before_it_samples(toy, tmp_path):
    mesh = make_mesh({"fsdp": 8})
    before = _whole_copies(toy.model())
    trainer = toy_run.make_trainer(toy, tmp_path, mesh=mesh)
    assert _whole_copies(toy.model()) == before
    # As a step takes it.
    own = local_mesh(trainer.params, jax.devices(), dtype=np.float32, memory_bytes=np.inf)
    copy = local_params(trainer.params, own, jnp.float32)
    assert _whole_copies(toy.model()) > before
    del copy


def _places(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def _whole_copies(model):
    """Count arrays like the embedding that lie whole on all devices."""
    gc.collect()
    shape = model.embed[...].shape
    return sum(
        array.shape == shape and array.is_fully_replicated and len(array.devices()) == 8
        for array in jax.live_arrays()
    )


def test_a_copy_does_not_share_memory(toy):
    params = jax.tree.map(jnp.copy, nnx.state(toy.model()))
    copy = in_compute_type(params, jnp.float32)
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(copy))
