"""The native sampler says on every mesh what it says on one device, with its share of the cache."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from minirl.config import SamplerConfig
from minirl.model.lora import split
from minirl.model.sharding import MESH_AXES, make_mesh, param_shardings
from minirl.sample.cache import cache_shapes, device_memory, empty_cache, plan_cache
from minirl.sample.decode import lowered_programs
from minirl.types import Decoding, Request

MESHES = ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
PLAIN, GREEDY = Decoding(), Decoding(temperature=0.0)


def prompt(length, *, seed):
    return tuple(np.random.default_rng(seed).integers(4, 60, length).tolist())


def on_mesh(model, shape):
    graphdef, weights = nnx.split(model)
    places = param_shardings(weights, make_mesh(shape))
    return nnx.merge(graphdef, jax.tree.map(jax.device_put, weights, places))


def mixed_requests():
    """Groups that share a prompt and single episodes, sampled and greedy."""
    return [
        Request(e, prompt(9 + 5 * (e // 4), seed=e // 4), 12, GREEDY if e % 4 == 3 else PLAIN)
        for e in range(18)
    ]


@pytest.fixture(scope="module")
def on_one_device(toy):
    return toy.run(toy.sampler(toy.model(), slots=8, group_size=4), mixed_requests())


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_weights_on_a_mesh_sample_the_same(toy, on_one_device, shape):
    spread = on_mesh(toy.model(), shape)
    replies = toy.run(toy.sampler(spread, slots=8, group_size=4), mixed_requests())
    for episode, reply in replies.items():
        assert reply.ids == on_one_device[episode].ids
        np.testing.assert_allclose(reply.logprobs, on_one_device[episode].logprobs, atol=1e-5)


def test_slots_and_heads_that_the_mesh_does_not_divide(toy):
    # Six slots on two parts of three; two key/value heads on four devices, each with both.
    spread, requests = on_mesh(toy.model(), {"data": 2, "tensor": 4}), mixed_requests()[:7]
    whole = toy.run(toy.sampler(toy.model(), slots=5), requests)
    split = toy.run(toy.sampler(spread, slots=5), requests)
    assert {e: r.ids for e, r in split.items()} == {e: r.ids for e, r in whole.items()}


@pytest.mark.parametrize("shape", [None, *MESHES], ids=str)
def test_every_device_keeps_its_share_of_the_cache(toy, shape):
    mesh = None if shape is None else make_mesh(shape)
    config = SamplerConfig(slots=16, max_prompt_tokens=96, max_response_tokens=96, cache_gb=1.0)
    shape = plan_cache(toy.CONFIG, config, group_size=4, itemsize=4, mesh=mesh)
    cache = empty_cache(cache_shapes(shape, toy.CONFIG, dtype=np.float32, mesh=mesh))
    # 16 slots of 96 tokens; 2 layers, keys and values, 2 heads of 8.
    sizes = [array.nbytes for array in jax.tree.leaves(cache.own)]
    assert sum(sizes) == 16 * 96 * 2 * 2 * 2 * 8 * 4
    if mesh is not None:
        for array in jax.tree.leaves(cache):
            assert {shard.data.nbytes for shard in array.addressable_shards} == {array.nbytes // 8}


def test_the_cache_is_cut_to_its_bytes(toy):
    config = SamplerConfig(
        slots=16, max_prompt_tokens=96, max_response_tokens=96, cache_gb=200_000e-9
    )
    shape = plan_cache(toy.CONFIG, config, group_size=4, itemsize=4, mesh=None)
    cache = cache_shapes(shape, toy.CONFIG, dtype=np.float32, mesh=None)
    taken = sum(array.size * 4 for array in jax.tree.leaves(cache))
    assert 140_000 < taken <= 200_000
    assert shape.slots < 16


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
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices[2:])
    assert device_memory(None) == 80e9


@pytest.mark.parametrize("shape", [None, {"fsdp": 4, "tensor": 2}], ids=str)
def test_programs_can_be_compiled_ahead_of_time(toy, shape):
    mesh = None if shape is None else make_mesh(shape)
    graphdef, weights, frozen = split(toy.model())
    places = param_shardings(weights, mesh) if mesh else jax.tree.map(lambda _: None, weights)
    weights = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        weights,
        places,
    )
    config = SamplerConfig(slots=8, max_prompt_tokens=96, max_response_tokens=96)
    shape = plan_cache(toy.CONFIG, config, group_size=4, itemsize=4, mesh=mesh)
    model = graphdef, weights, frozen
    calls = lowered_programs(model, shape, config=toy.CONFIG, dtype=np.float32, mesh=mesh)
    fill, decode = (calls[name].compile().memory_analysis() for name in ("fill", "decode"))
    assert fill is not None
    assert decode is not None
    parts = 1 if mesh is None else 8
    # What is written comes back in its place: two prompts a part, or all slots; 256 bytes a token.
    prompts = shape.parts * shape.prompts * 96 * 256 // parts
    assert fill.alias_size_in_bytes == prompts
    assert decode.alias_size_in_bytes == 8 * 96 * 256 // parts


def test_no_device_asks_another_in_the_decode_loop(toy):
    mesh = make_mesh({"data": 8})
    graphdef, weights, frozen = split(toy.model())
    places = param_shardings(weights, mesh)
    weights = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        weights,
        places,
    )
    config = SamplerConfig(slots=16, max_prompt_tokens=96, max_response_tokens=96)
    shape = plan_cache(toy.CONFIG, config, group_size=2, itemsize=4, mesh=mesh)
    model = graphdef, weights, frozen
    calls = lowered_programs(model, shape, config=toy.CONFIG, dtype=np.float32, mesh=mesh)
    text = calls["decode"].compile().as_text()
    assert text is not None
    assert "while" in text
    for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert name not in text
