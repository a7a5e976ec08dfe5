"""Flash attention in JAX itself, for CPUs: scores exist for one block of queries at a time.

The scores of a whole micro-batch are many times what a core's cache holds, and softmax and its
gradient pass over them several times: block by block they stay there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from minirl.model.kernels import NOTHING, Kernel, Keys

# Scores of a block, in bytes: two such arrays lie in the cache of a core.
_BLOCK_BYTES = 2**18


class _Queries(NamedTuple):
    """C blocks of M queries of one key/value head; `place_CM` is theirs in the row."""

    q_CME: Array
    number_CM: Array
    place_CM: Array


def blocks() -> Kernel:
    """Return attention block by block; it serves every call."""
    return Kernel(_forward, _backward, lambda _q, *, packed: True)


def _forward(q_XTHE: Array, keys: Keys, *, causal: bool) -> tuple[Array, Array]:
    def head(queries: _Queries, k_LE: Array, v_LE: Array, number_L: Array) -> tuple[Array, Array]:
        def block(one: _Queries) -> tuple[Array, Array]:
            scores_ML = jnp.where(*_seen(one, k_LE, number_L, causal=causal), NOTHING)
            peak_M1 = scores_ML.max(axis=1, keepdims=True)
            weights_ML = jnp.exp(scores_ML - peak_M1)
            total_M1 = weights_ML.sum(axis=1, keepdims=True)
            out_ME = _product(weights_ML.astype(v_LE.dtype), v_LE) / total_M1
            return out_ME, (peak_M1 + jnp.log(total_M1))[:, 0]

        return jax.lax.map(block, queries)

    cut = _Cut(q_XTHE, keys)
    out, lse = cut.over_heads(head, cut.queries(q_XTHE), *cut.keys())
    return cut.back(out).astype(q_XTHE.dtype), cut.back(lse[..., None])[..., 0]


def _backward(
    q_XTHE: Array, keys: Keys, out_XTHE: Array, lse_XTH: Array, dout_XTHE: Array, *, causal: bool
) -> tuple[Array, Array, Array]:
    def head(
        queries: _Queries,
        lse_CM: Array,
        delta_CM: Array,
        dout_CME: Array,
        k_LE: Array,
        v_LE: Array,
        number_L: Array,
    ) -> tuple[Array, Array, Array]:
        def block(total: tuple[Array, Array], xs: Any) -> tuple[tuple[Array, Array], Array]:
            one, lse_M, delta_M, dout_ME = xs
            is_seen_ML, scores_ML = _seen(one, k_LE, number_L, causal=causal)
            p_ML = jnp.where(is_seen_ML, jnp.exp(scores_ML - lse_M[:, None]), 0.0)
            ds_ML = p_ML * (_product(dout_ME, v_LE.T) - delta_M[:, None])
            p_ML, ds_ML = p_ML.astype(v_LE.dtype), ds_ML.astype(k_LE.dtype)
            dk_LE = total[0] + _product(ds_ML.T, one.q_CME)
            dv_LE = total[1] + _product(p_ML.T, dout_ME)
            return (dk_LE, dv_LE), _product(ds_ML, k_LE)

        zeros = jnp.zeros(k_LE.shape, jnp.float32)
        (dk_LE, dv_LE), dq_CME = jax.lax.scan(
            block, (zeros, zeros), (queries, lse_CM, delta_CM, dout_CME)
        )
        return dq_CME, dk_LE, dv_LE

    cut = _Cut(q_XTHE, keys)
    delta_XTH = (dout_XTHE.astype(jnp.float32) * out_XTHE.astype(jnp.float32)).sum(-1)
    lse, delta = (cut.blocks(array[..., None])[..., 0] for array in (lse_XTH, delta_XTH))
    arrays = (cut.queries(q_XTHE), lse, delta, cut.blocks(dout_XTHE), *cut.keys())
    dq, dk, dv = cut.over_heads(head, *arrays)
    dq_XTHE = cut.back(dq) * q_XTHE.shape[-1] ** -0.5
    dk, dv = (cut.of_keys(array).astype(q_XTHE.dtype) for array in (dk, dv))
    return dq_XTHE.astype(q_XTHE.dtype), dk, dv


def _seen(one: _Queries, k_LE: Array, number_L: Array, *, causal: bool) -> tuple[Array, Array]:
    """Return which keys each query of a block sees, ML, and its scores of all, ML."""
    is_seen_ML = one.number_CM[:, None] == number_L[None]
    if causal:
        is_seen_ML &= one.place_CM[:, None] >= jnp.arange(len(number_L))[None]
    return is_seen_ML, _product(one.q_CME, k_LE.T)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


class _Cut:
    """How queries XTHE are cut: by key/value head (Y = X x K), and into blocks of M = R x t."""

    def __init__(self, q_XTHE: Array, keys: Keys) -> None:
        X, self.T, H, _ = q_XTHE.shape
        L, K = keys.k_XLKE.shape[1:3]
        self.X, self.K, self.R = X, K, H // K
        fitting = max(_BLOCK_BYTES // (4 * L * self.R), 1)
        self.C = -(-self.T // fitting)
        self.t = -(-self.T // self.C)
        self._keys = keys
        # Small heads are taken several at a time.
        self._heads = max(_BLOCK_BYTES // (4 * L * self.R * self.t), 1)

    def over_heads(self, function: Any, *arrays: Any) -> Any:
        return jax.lax.map(lambda xs: function(*xs), arrays, batch_size=self._heads)

    def queries(self, q_XTHE: Array) -> _Queries:
        H = q_XTHE.shape[2]
        place_XT = jnp.broadcast_to(jnp.arange(self.T)[None], (self.X, self.T))
        number, place = (
            self.blocks(jnp.broadcast_to(array[..., None, None], (*array.shape, H, 1)))[..., 0]
            for array in (self._keys.query_number_BT, place_XT)
        )
        return _Queries(self.blocks(q_XTHE * q_XTHE.shape[-1] ** -0.5), number, place)

    def blocks(self, array_XTH: Array) -> Array:
        """Bring an array XTHE as Y, C, M, E."""
        missing = self.C * self.t - self.T
        if missing:
            array_XTH = jnp.pad(array_XTH, ((0, 0), (0, missing), (0, 0), (0, 0)))
        parts = array_XTH.reshape(self.X, self.C, self.t, self.K, self.R, -1)
        parts = parts.transpose(0, 3, 1, 4, 2, 5)
        return parts.reshape(self.X * self.K, self.C, self.R * self.t, -1)

    def back(self, array_YCME: Array) -> Array:
        """Undo `blocks`."""
        parts = array_YCME.reshape(self.X, self.K, self.C, self.R, self.t, -1)
        parts = parts.transpose(0, 2, 4, 1, 3, 5)
        return parts.reshape(self.X, self.C * self.t, self.K * self.R, -1)[:, : self.T]

    def keys(self) -> tuple[Array, Array, Array]:
        """Return keys and values, YLE, and the numbers of keys, YL."""
        k, v = (
            array.swapaxes(1, 2).reshape(self.X * self.K, *array.shape[1::2])
            for array in (self._keys.k_XLKE, self._keys.v_XLKE)
        )
        return k, v, jnp.repeat(self._keys.number_XL, self.K, axis=0)

    def of_keys(self, array_YLE: Array) -> Array:
        """Bring gradients of keys back as XLKE."""
        return array_YLE.reshape(self.X, self.K, *array_YLE.shape[1:]).swapaxes(1, 2)
