"""What a model in bfloat16 sums in fp32: logits in learner and sampler, the embedding's gradient.

Numbers in bfloat16 have eight bits: from 16 to 32 they are .125 apart, from 256 to 512 two apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minirl.model import logprobs
from minirl.model.decoder import Decoder
from minirl.model.lora import described
from minirl.sample.decode import sample

# Of a hidden state of ones the logits are 16.0625, 16 and 16.125; the first would round to 16.
TABLE_VD = [[16.0, 0.0625], [16.0, 0.0], [16.0, 0.125]]
LOGPROBS = np.array([0.0625, 0.0, 0.125]) - math.log(sum(map(math.exp, (0.0625, 0.0, 0.125))))
# Numbers in fp32 are 2e-6 apart from 16 to 32.
ROUNDED = 1e-5


@pytest.fixture(params=[1000, 1])
def at_once(request, monkeypatch):
    """Compute the logits of all tokens at once, or one by one."""
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * 3 * request.param)


def judge(hidden_BCD, table_VD, target_BC):
    is_trained_BC = jnp.ones(target_BC.shape, bool)
    project = functools.partial(logprobs.project, temperature=1.0)
    return jax.jit(project)(hidden_BCD, table_VD, target_BC, is_trained_BC)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32])
def test_logits_of_the_learner(param_dtype):
    hidden_BCD = jnp.ones((1, 3, 2), jnp.bfloat16)
    table_VD = jnp.array(TABLE_VD, param_dtype)
    found, entropy = judge(hidden_BCD, table_VD, jnp.arange(3)[None])
    np.testing.assert_allclose(found[0], LOGPROBS, rtol=ROUNDED)
    np.testing.assert_allclose(entropy[0], -np.sum(np.exp(LOGPROBS) * LOGPROBS), rtol=ROUNDED)


def model_of(toy, **changes):
    """Describe a decoder that computes in bfloat16 on weights in fp32."""
    return described(dataclasses.replace(toy.CONFIG, **changes), dtype=jnp.bfloat16)


def test_logits_of_the_sampler(toy):
    model = model_of(toy, vocab_size=3, hidden_size=2)
    model.unembed = nnx.Param(jnp.array(TABLE_VD))
    logits_SV = jax.jit(lambda: model.logits(jnp.ones((4, 2), jnp.bfloat16)))()
    np.testing.assert_array_equal(logits_SV, [[16.0625, 16.0, 16.125]] * 4)
    ids_S, logprobs_S = sample(
        logits_SV, jax.random.split(jax.random.key(0), 4), jnp.ones(4), jnp.ones(4),
        any_top_p=False,
    )  # fmt: skip
    np.testing.assert_allclose(logprobs_S, LOGPROBS[ids_S], rtol=ROUNDED)


@pytest.mark.usefixtures("at_once")
def test_the_gradient_of_the_output_table():
    """Of two words with equal logits each has half: 257 ones and 1 / 64 give 128.5 and 1 / 128."""
    hidden_BCD = jnp.ones((1, 258, 1), jnp.bfloat16).at[0, 7].set(1 / 64)
    target_BC = jnp.zeros((1, 258), jnp.int32)
    gradient_VD = jax.grad(lambda table_VD: judge(hidden_BCD, table_VD, target_BC)[0].sum())(
        jnp.zeros((2, 1))
    )
    np.testing.assert_array_equal(gradient_VD[:, 0], [128.5 + 1 / 128, -128.5 - 1 / 128])


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_the_embedding(toy, monkeypatch, tied):
    """A token that stands 513 times; tied, the output adds 3 to every word."""
    graph, shapes = nnx.split(model_of(toy, tie_word_embeddings=tied))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    tokens_BT = jnp.full((2, 257), 5).at[1, 256].set(6)
    seen = []

    def no_layers(_, body, x_BTD, caches, **rest):
        seen.append(x_BTD)
        return x_BTD, caches

    monkeypatch.setattr(Decoder, "_run_layers", no_layers)

    @jax.jit
    @jax.grad
    def gradient(params):
        model = nnx.merge(graph, params)
        model(tokens_BT, jnp.zeros_like(tokens_BT), None)
        ones_BTD = jnp.ones((1, 3, toy.CONFIG.hidden_size), jnp.bfloat16)
        return seen.pop().astype(jnp.float32).sum() + model.logits(ones_BTD).sum()

    found_VD = gradient(params)["embed"][...]
    rest = 3.0 if tied else 0.0
    np.testing.assert_array_equal(found_VD[5], 513 + rest)
    np.testing.assert_array_equal(found_VD[6], 1 + rest)
    np.testing.assert_array_equal(found_VD[7], rest)
