"""The native sampler on a mesh: the same replies; shares of the cache; copies of the weights."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from minirl.config import LoraConfig, SamplerConfig
from minirl.model.lora import add_adapters, split
from minirl.model.sharding import MESH_AXES, device_bytes, make_mesh, with_shardings
from minirl.sample.cache import ROWS, cache_room, cache_shapes, device_memory, plan_cache
from minirl.sample.decode import lowered_programs
from minirl.sample.weights import (
    COPY_SHARE,
    copy_shapes,
    in_compute_type,
    local_mesh,
    local_model,
    local_params,
)
from minirl.types import Decoding, Request

from .toy_run import spread

SIZES = SamplerConfig(slots=16, max_prompt_tokens=96, max_response_tokens=96, cache_gb=1.0)
# Bytes of a token: 2 layers, keys and values, 2 heads of 8, in fp32.
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def mixed_requests():
    """Groups that share a prompt and single episodes, sampled and greedy."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 60, 9 + 5 * n).tolist()) for n in range(5)]
    return [Request(e, prompts[e // 4], 12, Decoding(float(e % 4 < 3))) for e in range(18)]


@pytest.fixture(scope="module")
def on_one_device(toy):
    return toy.run(toy.sampler(toy.model(), slots=7, group_size=4), mixed_requests())


# The last does not divide the two key/value heads, and no mesh the seven slots.
@pytest.mark.parametrize("shape", [{"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_mesh_samples_the_same(toy, on_one_device, shape, platform, monkeypatch):
    """Whether the cache is in the order of CPUs and GPUs, or in that of TPUs."""
    monkeypatch.setattr("minirl.sample.cache.platform_of", lambda _: platform)
    monkeypatch.setattr("minirl.sample.weights.local_mesh", lambda *_, **__: make_mesh(shape))
    # The last episodes leave slots empty, not the same number in every part.
    monkeypatch.setitem(ROWS, "cpu", (1, 2))
    model = spread(toy.model(), make_mesh({"fsdp": 4, "tensor": 2}))
    replies = toy.run(toy.sampler(model, slots=7, group_size=4), mixed_requests())
    for episode, reply in replies.items():
        assert reply.ids == on_one_device[episode].ids
        np.testing.assert_allclose(reply.logprobs, on_one_device[episode].logprobs, atol=1e-5)


# The last does not divide the two heads of keys.
@pytest.mark.parametrize("shape", [{"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}], ids=str)
def test_a_mesh_samples_the_same_from_states(toy, shape, monkeypatch):
    monkeypatch.setattr("minirl.sample.weights.local_mesh", lambda *_, **__: make_mesh(shape))
    monkeypatch.setitem(ROWS, "cpu", (2,))
    model, requests = toy.model(hybrid=True), mixed_requests()[:10]
    alone = toy.run(toy.sampler(model, slots=7, group_size=4), requests)
    spread_model = spread(model, make_mesh({"fsdp": 4, "tensor": 2}))
    replies = toy.run(toy.sampler(spread_model, slots=7, group_size=4), requests)
    for episode, reply in replies.items():
        assert reply.ids == alone[episode].ids
        np.testing.assert_allclose(reply.logprobs, alone[episode].logprobs, atol=1e-5)


@pytest.mark.parametrize("shape", [None, {"fsdp": 4, "tensor": 2}], ids=str)
def test_states_are_planned_and_kept_as_shares(toy, shape):
    mesh = None if shape is None else make_mesh(shape)
    # In fp32: a memory of 4 heads of 8 x 6 numbers, and three tokens of 2 x 2 x 8 + 4 x 6.
    state_bytes = 3 * 4 * (4 * 8 * 6 + 3 * 56)
    config = SIZES.model_copy(update={"cache_gb": 100_000e-9})
    plan = plan_cache(toy.HYBRID, config, group_size=4, itemsize=4, mesh=mesh, room=1e9)
    cache = cache_shapes(plan, toy.HYBRID, dtype=np.float32, mesh=mesh)
    rows, parts = plan.prompts + plan.slots, 1 if mesh is None else 2
    # One layer of four has keys and values.
    found = rows * state_bytes / parts + plan.tokens * TOKEN_BYTES / 2 / parts
    assert device_bytes(cache) == found <= 100_000
    more = 1 + (plan.prompts == plan.slots)
    assert found + more * (state_bytes + 96 * TOKEN_BYTES / 2) / parts > 100_000 or plan.slots == 4


@pytest.mark.parametrize("shape", [None, {"fsdp": 4, "tensor": 2}], ids=str)
def test_every_device_keeps_its_share_of_the_cache(toy, shape):
    mesh = None if shape is None else make_mesh(shape)
    shape = plan_cache(toy.CONFIG, SIZES, group_size=4, itemsize=4, mesh=mesh, room=1e9)
    cache = cache_shapes(shape, toy.CONFIG, dtype=np.float32, mesh=mesh)
    assert device_bytes(cache.slots) == 16 * 96 * TOKEN_BYTES / (1 if mesh is None else 8)


def test_the_cache_is_cut_to_its_bytes(toy):
    config = SIZES.model_copy(update={"cache_gb": 200_000e-9})
    shape = plan_cache(toy.CONFIG, config, group_size=4, itemsize=4, mesh=None, room=1e9)
    # Four slots and two prompts; a fifth slot would have two prompts more.
    assert (shape.slots, shape.tokens) == (4, 6 * 96)
    assert shape.tokens * TOKEN_BYTES <= 200_000 < (5 + 4) * 96 * TOKEN_BYTES


def test_without_a_setting_the_cache_fills_what_weights_leave(toy):
    """Nine tenths, on accelerators: 512 slots where weights and optimizer take half of an H100."""
    assert cache_room(80e9, held_bytes=40e9, platform="gpu") == pytest.approx(36e9)
    assert cache_room(24e9, held_bytes=4e9, platform="cpu") == pytest.approx(6e9)
    config = SIZES.model_copy(update={"cache_gb": None})
    shape = plan_cache(toy.CONFIG, config, group_size=4, itemsize=4, mesh=None, room=200_000)
    assert shape.slots == 4


class Gpu:
    """A device of one of two processes, as the second sees it: the first's do not tell."""

    platform, device_kind = "gpu", "pretended"

    def __init__(self, number):
        self.id, self.process_index = number, number // 2
        self.client = SimpleNamespace(process_index=lambda: 1)

    def memory_stats(self):
        if self.process_index != 1:
            raise RuntimeError("memory_stats is only supported for addressable devices.")
        return {"bytes_limit": 80e9}


def test_memory_is_that_of_the_process_s_own_devices(monkeypatch):
    devices = [Gpu(number) for number in range(4)]
    mesh = Mesh(np.array(devices).reshape(1, 4, 1), MESH_AXES)
    assert device_memory(mesh) == 80e9
    monkeypatch.setattr(jax, "local_devices", lambda: devices[2:])
    assert device_memory(None) == 80e9


@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("shape", [{"data": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_programs_write_in_place_and_no_device_asks_another_for_a_token(toy, shape, is_hybrid):
    mesh = make_mesh(shape)
    config = toy.HYBRID if is_hybrid else toy.CONFIG
    graph, weights = nnx.split(toy.model(hybrid=is_hybrid))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    model = nnx.merge(graph, with_shardings(like, mesh))
    model.mesh = mesh
    sizes = plan_cache(config, SIZES, group_size=2, itemsize=4, mesh=mesh, room=1e9)
    calls = lowered_programs(model, sizes)
    fill, decode = (calls[name].compile() for name in ("fill", "decode"))
    arrays = cache_shapes(sizes, config, dtype=np.float32, mesh=mesh)
    for program, rows in ((fill, arrays.prompts), (decode, arrays.slots)):
        memory = program.memory_analysis()
        assert memory is not None
        written = device_bytes(rows)
        assert written <= memory.alias_size_in_bytes < 1.01 * written
    text = decode.as_text()
    assert text is not None
    assert "while" in text
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    assert any(name in text for name in names) == ("tensor" in shape)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_copy_is_split_over_as_few_devices_as_have_the_memory(toy, tensor):
    params = nnx.state(toy.model())
    mesh = make_mesh({"data": 8 // tensor, "tensor": tensor})
    fits = device_bytes(copy_shapes(params, mesh, np.float32)) / COPY_SHARE
    # Where no number of devices is enough, all of them share it.
    for memory_bytes, shape in ((fits, (8 // tensor, 1, tensor)), (fits / 100, (1, 1, 8))):
        mesh = local_mesh(params, jax.devices(), dtype=np.float32, memory_bytes=memory_bytes)
        assert mesh.devices.shape == shape
    alone = local_mesh(params, jax.devices()[:1], dtype=np.float32, memory_bytes=1.0)
    assert alone.devices.shape == (1, 1, 1)


def test_a_process_with_one_device_of_several_compiles_each_program_once(toy, caplog):
    """Its cache lies as the weights do, also before a program has written to it."""
    sampler = toy.sampler(spread(toy.model(), make_mesh({}, jax.devices()[:1])), slots=2)
    jax.clear_caches()  # another test may have compiled the same
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        for n in range(3):
            toy.run(sampler, [Request(n, (2, 3, 4 + n, 5), 3, Decoding())])
    for name in ("fill", "decode"):
        assert caplog.text.count(f"Compiling jit({name})") == 1


def test_a_copy_has_the_weights_in_the_type_of_the_computation(toy):
    model = spread(toy.model(), make_mesh({"fsdp": 4, "tensor": 2}))
    own = local_model(model)[2]
    assert own is not None
    params = nnx.state(model)
    copy = local_params(params, own, jnp.bfloat16)
    described = copy_shapes(params, own, jnp.bfloat16)
    for array, leaf, info in zip(*map(jax.tree.leaves, (copy, params, described)), strict=True):
        assert (array.shape, array.dtype) == (info.shape, info.dtype)
        assert array.sharding.is_equivalent_to(info.sharding, array.ndim)
        assert array.is_fully_replicated
        np.testing.assert_array_equal(array, leaf.astype(array.dtype))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(copy)} == {"float32", "bfloat16"}


def test_samplers_share_what_is_not_trained_and_copy_nothing_else_before_there_are_weights(toy):
    model = spread(toy.model(), make_mesh({"fsdp": 8}))
    add_adapters(model, LoraConfig(rank=2), seed=0)
    (_, first, _), (_, second, _) = local_model(model), local_model(model)
    gc.collect()
    shape = model.layers.q_a[...].shape
    assert not any(a.is_fully_replicated for a in jax.live_arrays() if a.shape == shape)
    for one, other in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        assert one is other
        assert one.is_fully_replicated


def test_a_reference_copy_shares_no_memory_and_has_matrices_in_the_type_of_the_computation(toy):
    model = spread(toy.model(), None)
    add_adapters(model, LoraConfig(rank=2), seed=0)
    _, adapters, frozen = split(model)
    copies = [in_compute_type(part, jnp.bfloat16) for part in (adapters, frozen)]
    for leaf in jax.tree.leaves((adapters, frozen)):
        leaf.delete()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(copies))
    types = [{leaf.dtype.name for leaf in jax.tree.leaves(copy)} for copy in copies]
    assert types == [{"bfloat16"}, {"float32", "bfloat16"}]
