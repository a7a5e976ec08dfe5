"""The projection onto the vocabulary: in chunks, of trained tokens alone, in bounded memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from minirl.model import logprobs
from minirl.model.sharding import make_mesh
from tests.plain_model import assert_close, assert_same

B, C, D, V = 4, 24, 16, 64
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def tokens():
    """Draw hidden states, a table, targets, and which are trained: row 1 none, row 2 all."""
    rng = np.random.default_rng(0)
    is_trained_BC = rng.random((B, C)) < 0.4
    is_trained_BC[1], is_trained_BC[2] = False, True
    return (
        jnp.asarray(rng.normal(0, 1, (B, C, D)), jnp.float32),
        jnp.asarray(rng.normal(0, 1, (V, D)), jnp.float32),
        jnp.asarray(rng.integers(0, V, (B, C))),
        jnp.asarray(is_trained_BC),
    )


def judge(hidden_BCD, table_VD, target_BC, is_trained_BC, *, mesh=None):
    """Return log-probabilities, entropies and the gradient of a sum of both."""

    def total(hidden_BCD, table_VD):
        logp, entropy = logprobs.project(
            hidden_BCD, table_VD, target_BC, is_trained_BC, temperature=TEMPERATURE, mesh=mesh
        )
        slope = jnp.cos(jnp.arange(logp.size)).reshape(logp.shape)
        return jnp.sum(logp * slope) + jnp.sum(entropy), (logp, entropy)

    gradient, found = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden_BCD, table_VD)
    return *found, *gradient


def compiled(**settings):
    """Compile `judge` anew: a function that was compiled before would keep its chunks."""
    return jax.jit(functools.partial(judge, **settings))


def written_out(hidden_BCD, table_VD, target_BC, is_trained_BC):
    def total(hidden_BCD, table_VD):
        logp_BCV = jax.nn.log_softmax(hidden_BCD @ table_VD.T / TEMPERATURE)
        logp = jnp.sum(logp_BCV * jax.nn.one_hot(target_BC, V), axis=-1)
        entropy = -jnp.sum(jnp.exp(logp_BCV) * logp_BCV, axis=-1)
        logp, entropy = (jnp.where(is_trained_BC, one, 0) for one in (logp, entropy))
        slope = jnp.cos(jnp.arange(logp.size)).reshape(logp.shape)
        # Entropy is a statistic: nothing flows back through it.
        return jnp.sum(logp * slope), (logp, entropy)

    gradient, found = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden_BCD, table_VD)
    return *found, *gradient


def widest(function, *args):
    """Return the elements of the largest array in a program."""
    program = str(jax.make_jaxpr(function)(*args))
    shapes = re.findall(r"\b(?:f32|i32|bool)\[([\d,]+)\]", program)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


# The least chunks, of 12 tokens; chunks of 10, which do not divide 96 tokens.
@pytest.mark.parametrize("at_once", [12, 10])
def test_every_chunk_size_gives_what_is_written_out(tokens, monkeypatch, at_once):
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * V * at_once)
    assert_close(compiled()(*tokens), jax.jit(written_out)(*tokens), rtol=5e-5, atol=5e-5)
    # The logits of a chunk, or all hidden states in whole chunks.
    whole = -(-B * C // at_once) * at_once
    assert widest(functools.partial(judge), *tokens) == max(V * at_once, whole * D)


def test_tokens_that_are_not_trained_are_not_projected(tokens, monkeypatch):
    hidden_BCD, table_VD, target_BC, _ = tokens
    # Forty trained tokens fill four chunks, and what is not a number elsewhere is not looked at.
    is_trained_BC = jnp.asarray(np.random.default_rng(1).permutation(B * C) < 40).reshape(B, C)
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * V * 10)
    program = compiled()
    expected = program(hidden_BCD, table_VD, target_BC, is_trained_BC)
    broken_BCD = jnp.where(is_trained_BC[..., None], hidden_BCD, jnp.nan)
    found = program(broken_BCD, table_VD, target_BC, is_trained_BC)
    assert_same(found, expected)
    assert_close(program(*tokens[:3], is_trained_BC & False), [jnp.zeros(())] * 4, atol=5e-5)


@pytest.mark.parametrize("shape", [{"fsdp": 2, "tensor": 2}, {"fsdp": 4}], ids=str)
def test_chunks_on_a_mesh(tokens, monkeypatch, shape):
    """Equal to one device, and only the table is gathered."""
    expected = compiled()(*tokens)
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * V * 7)
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape.values())])
    rows = PartitionSpec("fsdp")
    places = (rows, PartitionSpec("tensor", "fsdp"), rows, rows)
    placed = [
        jax.device_put(array, NamedSharding(mesh, place))
        for array, place in zip(tokens, places, strict=True)
    ]
    program = compiled(mesh=mesh).lower(*placed).compile()
    assert_close(program(*placed), expected, rtol=5e-5, atol=5e-5)
    gathered = re.findall(r"= (\w+\[[\d,]*\])\S* all-gather\(", program.as_text() or "")
    assert f"f32[{V // mesh.shape['tensor']},{D}]" in gathered
    if shape == {"fsdp": 4}:
        assert len(set(gathered)) == 1
