"""Rows to attend over, attention with a mask written out, and how two ways are compared."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minirl.model import attention
from minirl.model.attention import Segments

N, G, P, C, E = 2, 3, 9, 13, 8
HEADS = {"grouped": (4, 2), "all": (2, 2), "one": (3, 1)}


def numbers(*lengths, size):
    """Write 1, 2, ... as often as told, then padding."""
    row = [n for n, length in enumerate(lengths, 1) for _ in range(length)]
    return row + [0] * (size - len(row))


def segments_of(prefix, group, own):
    arrays: Any = map(np.asarray, (prefix, group, own))
    return Segments(*arrays)


# One group a unit; the second prefix is a filler's, of no token at all.
UNPACKED = segments_of(
    [numbers(6, size=P), numbers(size=P)],
    np.ones((N * G, C), int),
    np.ones((N * G, C), int),
)
# Two groups in the first unit, and one in the second; rows of up to three trajectories.
PACKED = segments_of(
    [numbers(3, 5, size=P), numbers(7, size=P)],
    np.array(
        [
            [1] * 4 + [1] * 3 + [2] * 5 + [0],
            [2] * 6 + [1] * 4 + [0] * 3,
            [2] * 13,
            [1] * 13,
            [1] * 10 + [0] * 3,
            [0] * 13,
        ]
    ),
    np.array(
        [
            numbers(4, 3, 5, size=C),
            numbers(6, 4, size=C),
            numbers(13, size=C),
            numbers(1, 12, size=C),
            numbers(10, size=C),
            numbers(size=C),
        ]
    ),
)
LAYOUTS = {"unpacked": UNPACKED, "packed": PACKED}


def arrays_of(heads, *, seed=0, dtype=jnp.float32):
    """Draw q, k, v of answers, and k, v of prefixes."""
    H, K = HEADS[heads]
    rng = np.random.default_rng(seed)
    shapes = [(N * G, C, H, E), *[(N * G, C, K, E)] * 2, *[(N, P, K, E)] * 2]
    return tuple(jnp.asarray(rng.normal(0, 1.5, shape), dtype) for shape in shapes)


def visible(segments):
    """Return which of the prefix's and own keys each query may see, BC(P + C)."""
    prefix_BP = np.repeat(segments.prefix_NP, G, axis=0)
    group, own = segments.group_BC[:, :, None], segments.own_BC[:, :, None]
    to_prefix = (group == prefix_BP[:, None]) & (prefix_BP[:, None] != 0)
    to_own = (own == segments.own_BC[:, None]) & np.tril(np.ones((C, C), bool))
    return np.concatenate([to_prefix, to_own], axis=2)


def written_out(segments, q, k, v, k_prefix, v_prefix):
    """Attend with prefixes copied into every row, heads repeated, and one mask."""
    repeats = q.shape[2] // k.shape[2]
    joined = [
        jnp.repeat(jnp.concatenate([jnp.repeat(prefix, G, axis=0), own], axis=1), repeats, axis=2)
        for prefix, own in ((k_prefix, k), (v_prefix, v))
    ]
    scores = jnp.einsum("bthe,bshe->bhts", q, joined[0]) / math.sqrt(E)
    mask = jnp.asarray(visible(segments))[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.einsum("bhts,bshe->bthe", weights, joined[1])


def attended(segments, q, k, v, k_prefix, v_prefix, *, packed, mesh=None):
    attend = attention.shared_prefix(
        Segments(*map(jnp.asarray, segments)), packed=packed, mesh=mesh
    )
    return attend(q, k, v, (k_prefix, v_prefix))[0]


def own_row_alone(segments, q, k, v):
    return attention.causal(jnp.asarray(segments.own_BC))(q, k, v, None)[0]


def value_and_gradients(function, segments, arrays):
    """Return the values of tokens that are no padding, and gradients of a sum of those alone."""
    is_true = jnp.asarray(segments.own_BC != 0)[:, :, None, None]
    slope = jnp.asarray(np.random.default_rng(1).normal(0, 1, arrays[0].shape), jnp.float32)

    def total(*arrays):
        out = function(segments, *arrays)
        return jnp.sum(out * slope, where=is_true), jnp.where(is_true, out, 0)

    every = tuple(range(len(arrays)))
    gradients, out = jax.jit(jax.grad(total, argnums=every, has_aux=True))(*arrays)
    return (out, *gradients)


def assert_close(ours, theirs, *, tolerance=2e-5):
    for one, other in zip(ours, theirs, strict=True):
        assert np.isfinite(np.asarray(one, np.float32)).all()
        np.testing.assert_allclose(
            np.asarray(one, np.float32),
            np.asarray(other, np.float32),
            atol=tolerance,
            rtol=tolerance,
        )
