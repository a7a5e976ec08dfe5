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


# Whole chunks and cut ones (others: `test_models.py`). Where all memory is lost at once, sums of
# logs over a chunk are 1,000, and rounded as such. Keys that are all alike are the system at its
# worst: an inverse by squaring is off by thousandths there.
@pytest.mark.parametrize(
    ("length", "decay", "are_alike", "tolerance"),
    [
        (3, 0.05, False, 2e-5),
        (128, 0.05, False, 2e-5),
        (128, 16.0, False, 1e-4),
        (128, 0.001, True, 5e-5),
    ],
)
def test_chunks_equal_token_by_token_with_gradients(length, decay, are_alike, tolerance):
    """From a state, with padding inside of a chunk."""
    inputs, *others = drawn(length, decay=decay)
    if are_alike:
        keys = inputs.k_BTKE[:, :1] + 0.001 * inputs.k_BTKE
        inputs = inputs._replace(k_BTKE=keys, beta_BTH=0.999 + 0.0 * inputs.beta_BTH)
    count_B, slopes = jnp.array([length, max(length - 5, 0)]), (1.0, State(0.3, (0.1, 0.2, 0.4)))
    found, expected = (
        pulled_back(run, (inputs, *others), count_B, slopes)
        for run in (linear_attention.run, token_by_token)
    )
    assert_near(found, expected, rtol=tolerance, least=1e-3)
