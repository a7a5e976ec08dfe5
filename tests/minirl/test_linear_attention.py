"""Gated DeltaNet: its rule in chunks and token by token, from a state and with padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.model import linear_attention
from minirl.model.linear_attention import Inputs, Kernels, State
from tests.plain_model import assert_near

B, K, H, E, U, W = 2, 2, 4, 8, 6, 4


def drawn(T, *, seed=0, decay=1.0):
    """Draw rows of tokens; `decay` is the size of the log of what a token leaves."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(0, 1, shape), jnp.float32)  # noqa: E731
    g_BTH = -decay * jnp.abs(normal(B, T, H))
    values = (normal(B, T, K, E), normal(B, T, K, E), normal(B, T, H, U))
    inputs = Inputs(*values, g_BTH, jax.nn.sigmoid(normal(B, T, H)))
    kernels = Kernels(normal(K, E, W), normal(K, E, W), normal(H, U, W))
    tails = (normal(B, W - 1, K, E), normal(B, W - 1, K, E), normal(B, W - 1, H, U))
    return inputs, kernels, State(normal(B, H, U, E), tails)


def token_by_token(inputs, kernels, state, count_B):
    """Run the rule token by token in a loop on the device."""
    T = inputs.g_BTH.shape[1]

    def step(state, xs):
        t, one = xs
        one = jax.tree.map(lambda array: array[:, None], one)
        o, state = linear_attention.run(one, kernels, state, jnp.int32(count_B > t))
        return state, o[:, 0]

    by_time = jax.tree.map(lambda array: array.swapaxes(0, 1), inputs)
    state, o = jax.lax.scan(step, state, (jnp.arange(T), by_time))
    return o.swapaxes(0, 1), state


@partial(jax.jit, static_argnums=0)
def pulled_back(run, arguments, count_B, slopes):
    """Return outputs where there are tokens, the state, and gradients of all arguments."""

    def results(inputs, kernels, state):
        o_BTHU, state = run(inputs, kernels, state, count_B)
        is_token_BT = jnp.arange(o_BTHU.shape[1])[None] < count_B[:, None]
        return jnp.where(is_token_BT[..., None, None], o_BTHU, 0.0), state

    found, pull = jax.vjp(results, *arguments)
    return found, pull(
        jax.tree.map(lambda array, slope: slope * jnp.ones_like(array), *(found, slopes))
    )


# Whole chunks and cut ones; other lengths are those of `test_models.py`.
@pytest.mark.parametrize(("length", "decay"), [(3, 0.05), (128, 0.05), (128, 16.0)])
def test_chunks_equal_token_by_token_with_gradients(length, decay):
    """From a state, with padding inside of a chunk, also where all memory is lost at once: sums of
    logs over a chunk are then 1,000, and rounded as such.
    """
    arguments, count_B = drawn(length, decay=decay), jnp.array([length, max(length - 5, 0)])
    slopes = (1.0, State(0.3, (0.1, 0.2, 0.4)))
    found = pulled_back(linear_attention.run, arguments, count_B, slopes)
    expected = pulled_back(token_by_token, arguments, count_B, slopes)
    assert_near(found, expected, rtol=2e-5 if decay < 1 else 1e-4, least=1e-3)


def test_keys_that_are_all_alike():
    """The system is at its worst: an inverse by squaring is off by thousandths here."""
    inputs, kernels, state = drawn(128, decay=0.001)
    alike = jnp.broadcast_to(inputs.k_BTKE[:, :1], inputs.k_BTKE.shape)
    noise = 0.001 * inputs.k_BTKE
    inputs = inputs._replace(k_BTKE=alike + noise, beta_BTH=0.999 + 0.0 * inputs.beta_BTH)
    count_B = jnp.full(B, 128)
    found = jax.jit(linear_attention.run)(inputs, kernels, state, count_B)
    expected = jax.jit(token_by_token)(inputs, kernels, state, count_B)
    assert_near(found, expected, rtol=5e-5, least=1e-3)
