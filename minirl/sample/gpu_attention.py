"""Attention of one new token a row on NVIDIA GPUs: a kernel that reads no more keys than there are.

Products of matrices would read all positions that a slot has room for, a multiple of those that
hold a token, and write the scores of all of them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from minirl.model.kernels import MASKED, Attended

# Rows of a product on tensor cores, and keys of one.
_ROWS, _KEYS = 16, 64
# Where there is a key, the likeliest one alone adds 1.
_LEAST_TOTAL = 1e-30


def attend_to_first(
    q_XKME: Float[Array, "X K M E"],
    k_XLF: Float[Array, "X L F"],
    v_XLF: Float[Array, "X L F"],
    count_X: Int[Array, "X"],
) -> Attended:
    """Attend to the first keys of each row, F = K E.

    A count beyond the last key is one of all keys: the decode loop goes on beside a reply that has
    ended, whose slot may be full.
    """
    X, K, M, E = q_XKME.shape
    L = k_XLF.shape[1]
    padded_XKME = jnp.pad(q_XKME, ((0, 0), (0, 0), (0, -M % _ROWS), (0, 0)))
    padded = padded_XKME.shape[2]
    rows = pl.BlockSpec((None, None, _ROWS, E), lambda x, k, m: (x, k, m, 0))
    keys = pl.BlockSpec((None, L, E), lambda x, k, _: (x, 0, k))
    values, lse = pl.pallas_call(
        functools.partial(_kernel, block=math.gcd(L, _KEYS)),
        grid=(X, K, padded // _ROWS),
        in_specs=[rows, keys, keys, pl.BlockSpec((None,), lambda x, *_: (x,))],
        out_specs=[rows, pl.BlockSpec((None, None, _ROWS), lambda x, k, m: (x, k, m))],
        out_shape=[
            jax.ShapeDtypeStruct((X, K, padded, E), jnp.float32),
            jax.ShapeDtypeStruct((X, K, padded), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name="attend_to_first",
    )(padded_XKME, k_XLF, v_XLF, jnp.minimum(count_X, L))
    return values[:, :, :M], lse[:, :, :M]


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    count_ref: Any,
    values_ref: Any,
    lse_ref: Any,
    *,
    block: int,
) -> None:
    """Online softmax (arXiv:1805.02867) of 16 queries over blocks of keys."""
    q, count = q_ref[...], count_ref[()]
    head_scale = q.shape[-1] ** -0.5

    def add(number: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, peak, total = sums
        here = pl.ds(number * block, block)
        scores = head_scale * triton.dot(q, k_ref[here, :].T)
        is_seen = number * block + jnp.arange(block) < count
        scores = jnp.where(is_seen[None], scores, MASKED)
        higher = jnp.maximum(peak, scores.max(axis=1))
        weights, scale = jnp.exp(scores - higher[:, None]), jnp.exp(peak - higher)
        values *= scale[:, None]
        values += triton.dot(weights.astype(v_ref.dtype), v_ref[here, :])
        return values, higher, total * scale + weights.sum(axis=1)

    zeros = jnp.zeros(len(q), jnp.float32)
    start = jnp.zeros(q.shape, jnp.float32), zeros + MASKED, zeros
    values, peak, total = jax.lax.fori_loop(0, pl.cdiv(count, block), add, start)
    # A row without a token has no key.
    total = jnp.maximum(total, _LEAST_TOTAL)
    values_ref[...], lse_ref[...] = values / total[:, None], peak + jnp.log(total)
