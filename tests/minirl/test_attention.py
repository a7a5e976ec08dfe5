"""Attention in JAX itself is the mask written out; joins; who computes attention; memory."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.model import attention
from minirl.model.kernels import MASKED, blockwise, join, partial_attention
from minirl.model.sharding import make_mesh

from .attention_cases import (
    LAYOUTS,
    PACKED,
    C,
    E,
    G,
    N,
    P,
    arrays_of,
    assert_close,
    attended,
    own_row_alone,
    segments_of,
    value_and_gradients,
    written_out,
)

# So small that there are several blocks, of heads that are taken together; and all at once.
SIZES = {"blocks": 4 * 2 * 5 * C, "whole": 2**29}


@pytest.fixture(params=[*SIZES.values()], ids=[*SIZES])
def blocks(request, monkeypatch):
    monkeypatch.setitem(attention._KERNELS, "cpu", blockwise(request.param))


@pytest.mark.parametrize(
    ("layout", "heads"), [("unpacked", "grouped"), ("packed", "one"), ("packed", "all")]
)
def test_attention_is_the_mask_written_out(blocks, layout, heads):
    segments, arrays = LAYOUTS[layout], arrays_of(heads)
    expected = value_and_gradients(written_out, segments, arrays)
    for packed in {layout == "packed", True}:
        ours = functools.partial(attended, packed=packed)
        assert_close(value_and_gradients(ours, segments, arrays), expected)


def test_causal_attention(blocks):
    arrays = arrays_of("grouped")[:3]
    no_prefix = segments_of(np.zeros((N, P), int), np.zeros((N * G, C), int), PACKED.own_BC)

    def written(_segments, *arrays):
        prefixes = [jnp.zeros((N, P, 2, E))] * 2
        return written_out(no_prefix, *arrays, *prefixes)

    expected = value_and_gradients(written, PACKED, arrays)
    assert_close(value_and_gradients(own_row_alone, PACKED, arrays), expected)


def test_attention_on_a_mesh(monkeypatch):
    monkeypatch.setitem(attention._KERNELS, "cpu", blockwise(SIZES["blocks"]))
    arrays, mesh = arrays_of("grouped"), make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    ours = functools.partial(attended, packed=True, mesh=mesh)
    expected = value_and_gradients(written_out, PACKED, arrays)
    assert_close(value_and_gradients(ours, PACKED, arrays), expected)


def test_parts_are_joined_to_attention_over_all_keys():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(0, 3, (2, 5, 12)), jnp.float32)
    scores = scores.at[0].add(300).at[1, 2, :4].set(MASKED)
    values = jnp.asarray(rng.normal(0, 1, (2, 12, 3)), jnp.float32)
    whole = partial_attention(scores, values)
    expected = jnp.matmul(jax.nn.softmax(scores), values)
    lse = jax.nn.logsumexp(scores, axis=-1)
    assert_close((whole.out, whole.lse), (expected, lse), tolerance=1e-5)
    cuts = (1, 4, 9)
    pieces = zip(jnp.split(scores, cuts, axis=2), jnp.split(values, cuts, axis=1), strict=True)
    parts = [partial_attention(*piece) for piece in pieces]
    joined = join(parts)
    assert_close((joined.out, joined.lse), (expected, lse), tolerance=1e-5)


def test_the_mesh_names_the_platform():
    q = arrays_of("grouped", dtype=jnp.bfloat16)[0]

    def chosen(platform):
        described: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        return attention._kernel(q, described, packed=False)

    for platform, kernel in attention._KERNELS.items():
        assert chosen(platform) is kernel
    assert chosen("another") is attention._FALLBACK
    assert attention._kernel(q, None, packed=False) is attention._KERNELS["cpu"]


def temporary_bytes(T):
    """Return what the gradient of attention over T tokens holds beside its arguments."""

    def total(q, k, v):
        return attention.causal()(q, k, v, None)[0].sum()

    shapes = [jax.ShapeDtypeStruct((1, T, heads, E), jnp.float32) for heads in (4, 2, 2)]
    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_grows_with_the_length_alone(monkeypatch):
    monkeypatch.setitem(attention._KERNELS, "cpu", blockwise(2**20))
    short, long = temporary_bytes(1024), temporary_bytes(4096)
    assert long < 6 * short
    # All scores, once.
    assert long < 4 * 4 * 4096**2 / 8
