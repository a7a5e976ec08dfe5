"""Plain attention is the mask written out; who computes attention, by platform; memory."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.model import attention

from .attention_cases import (
    HEADS,
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

pytestmark = pytest.mark.usefixtures("plain_attention")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_attention_is_the_mask_written_out(layout, heads):
    segments, arrays = LAYOUTS[layout], arrays_of(heads)
    expected = value_and_gradients(written_out, segments, arrays)
    for packed in {layout == "packed", True}:
        plain = functools.partial(attended, packed=packed)
        assert_close(value_and_gradients(plain, segments, arrays), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_attention_in_chunks(layout, monkeypatch):
    plain = functools.partial(attended, packed=layout == "packed")
    segments, arrays = LAYOUTS[layout], arrays_of("grouped")
    expected = value_and_gradients(plain, segments, arrays)
    # Four queries at a time; thirteen are no multiple of it.
    monkeypatch.setattr(attention, "SCORES_BYTES", 4 * 4 * N * G * 4 * (P + C))
    assert_close(value_and_gradients(plain, segments, arrays), expected)


def test_plain_causal_attention(monkeypatch):
    arrays = arrays_of("grouped")[:3]
    no_prefix = segments_of(np.zeros((N, P), int), np.zeros((N * G, C), int), PACKED.own_BC)

    def written(_segments, *arrays):
        prefixes = [jnp.zeros((N, P, 2, E))] * 2
        return written_out(no_prefix, *arrays, *prefixes)

    expected = value_and_gradients(written, PACKED, arrays)
    assert_close(value_and_gradients(own_row_alone, PACKED, arrays), expected)
    monkeypatch.setattr(attention, "SCORES_BYTES", 4 * 4 * N * G * 4 * C)
    assert_close(value_and_gradients(own_row_alone, PACKED, arrays), expected)


def test_causal_attention_without_numbers_is_one_piece_a_row():
    q, k, v, *_ = arrays_of("grouped")
    ones = attention.causal(jnp.ones((N * G, C), int))(q, k, v, None)[0]
    assert_close([attention.causal()(q, k, v, None)[0]], [ones])


def test_the_mesh_names_the_platform():
    q = arrays_of("grouped", dtype=jnp.bfloat16)[0]
    for platform, kernel in attention._KERNELS.items():
        described: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        assert attention._kernel(q, described, packed=False) is kernel
    assert attention._kernel(q, None, packed=False) is None


def temporary_bytes(T):
    """Return what the gradient of plain attention over T tokens holds beside its arguments."""

    def total(q, k, v):
        return attention.causal()(q, k, v, None)[0].sum()

    shapes = [jax.ShapeDtypeStruct((1, T, heads, E), jnp.float32) for heads in (4, 2, 2)]
    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_of_plain_attention_grows_with_the_length_alone(monkeypatch):
    monkeypatch.setattr(attention, "SCORES_BYTES", 2**20)
    short, long = temporary_bytes(1024), temporary_bytes(4096)
    assert long < 6 * short
    # All scores, once.
    assert long < 4 * 4 * 4096**2 / 8
