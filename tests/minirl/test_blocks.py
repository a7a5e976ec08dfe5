"""Attention in blocks, which CPUs compute, is the mask written out."""

from __future__ import annotations

import functools

import pytest

from minirl.model import attention, blocks

from .attention_cases import (
    HEADS,
    LAYOUTS,
    PACKED,
    C,
    arrays_of,
    assert_close,
    assert_same_on_a_mesh,
    attended,
    own_row_alone,
    value_and_gradients,
    written_out,
)


@pytest.fixture
def in_blocks(monkeypatch):
    """Compute it in blocks, so small that there are several, and heads that are taken together."""
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 4 * 2 * 5 * C)
    monkeypatch.setitem(attention._KERNELS, "cpu", blocks.blocks())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_in_blocks(in_blocks, layout, heads):
    segments, arrays = LAYOUTS[layout], arrays_of(heads)
    ours = functools.partial(attended, packed=layout == "packed")
    expected = value_and_gradients(written_out, segments, arrays)
    assert_close(value_and_gradients(ours, segments, arrays), expected)


def test_attention_in_blocks_to_the_own_row_alone(in_blocks, monkeypatch):
    arrays = arrays_of("grouped")[:3]
    ours = value_and_gradients(own_row_alone, PACKED, arrays)
    monkeypatch.delitem(attention._KERNELS, "cpu")
    assert_close(ours, value_and_gradients(own_row_alone, PACKED, arrays))


def test_attention_in_blocks_on_a_mesh(in_blocks):
    assert_same_on_a_mesh({"fsdp": 2, "tensor": 2}, "grouped")
