"""Attention to one set of keys: what it is, how sets are joined, and flash attention in JAX itself.

Attention to a set is a pair: the values that queries get, and the log-sum-exp (lse) of the scores,
in fp32, which tells what the set counts beside others (`join`). Queries that see no key have any
finite values, and a log-sum-exp far below all others.

`minirl.model.splash` and `minirl.model.cudnn` have the kernels of TPUs and of NVIDIA GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The score of a key that is not seen: finite, so that all keys of a query may be masked.
MASKED = -1e30
# Values and their log-sum-exp, of queries in any shape.
Attended = tuple[Float[Array, "... E"], Float[Array, "..."]]


class KeySet(NamedTuple):
    """Rows of keys and values that rows of queries attend to; both are padded on the right.

    Attributes:
        length_X: Every query of a row attends to so many keys; None where queries and keys are of
            the same tokens, and each attends to those up to itself (causal).
    """

    k_XLKE: Array
    v_XLKE: Array
    length_X: Array | None = None


class Kernel(NamedTuple):
    """Flash attention to one set of keys.

    Attributes:
        forward: (q_XTHE, keys) -> (values XTHE, log-sum-exp XTH).
        backward: (q_XTHE, keys, values, log-sum-exp, gradient of the values) -> gradients of
            (q, k, v); values and log-sum-exp are those over all sets.
        serves: Whether it takes q_XTHE on a device.
    """

    forward: Callable[..., Attended]
    backward: Callable[..., tuple[Array, Array, Array]]
    serves: Callable[[Array, Any], bool] = lambda _q, _device: True


def attend_to_keys(scores: Float[Array, "... Q L"], v: Float[Array, "... L E"]) -> Attended:
    """Attend to one set of keys, from scaled scores in fp32."""
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    values = _product(weights.astype(v.dtype), v) / total
    return values, (peak + jnp.log(total))[..., 0]


def join(parts: Sequence[Attended]) -> Attended:
    """Join attention of the same queries to several sets of keys.

    The rescaling of online softmax (arXiv:1805.02867).
    """
    peak = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    scales = [jnp.exp(lse - peak) for _, lse in parts]
    total = functools.reduce(jnp.add, scales)
    scaled = (s[..., None] * values for s, (values, _) in zip(scales, parts, strict=True))
    return functools.reduce(jnp.add, scaled) / total[..., None], peak + jnp.log(total)


def blockwise(block_bytes: int) -> Kernel:
    """Return flash attention in JAX itself, for any device and call.

    Args:
        block_bytes: Scores computed at a time.
    """
    return Kernel(
        functools.partial(_forward, block_bytes), functools.partial(_backward, block_bytes)
    )


class _Blocks:
    """Queries XTHE by key/value head (Y = X x K), in C blocks of M = heads x t, t positions."""

    def __init__(self, block_bytes: int, q_XTHE: Array, keys: KeySet) -> None:
        self.X, self.T, H, E = q_XTHE.shape
        # Scores are scaled, and not queries: in bf16 they would be rounded once more.
        self.scale, self._keys = E**-0.5, keys
        L, self.K = keys.k_XLKE.shape[1:3]
        self.heads = H // self.K
        query_bytes = 4 * L * self.heads
        self.C = -(-self.T // max(block_bytes // query_bytes, 1))
        self.t = -(-self.T // self.C)
        # Small heads are taken several at a time.
        self._together = max(block_bytes // (query_bytes * self.t), 1)

    def over_heads(self, function: Callable[..., Any], *arrays_XTHE: Array) -> Any:
        """Map over heads: k_LE, v_LE, number of keys or None, and blocks CME of the arrays."""
        k_XLKE, v_XLKE, length_X = self._keys
        k, v = (array.swapaxes(1, 2).reshape(-1, *array.shape[1::2]) for array in (k_XLKE, v_XLKE))
        length_Y = None if length_X is None else jnp.repeat(length_X, self.K)
        arrays = (k, v, length_Y, *map(self._split, arrays_XTHE))
        return jax.lax.map(lambda xs: function(*xs), arrays, batch_size=self._together)

    def _split(self, array_XTHE: Array) -> Array:
        missing = self.C * self.t - self.T
        array_XTHE = jnp.pad(array_XTHE, ((0, 0), (0, missing), (0, 0), (0, 0)))
        parts = array_XTHE.reshape(self.X, self.C, self.t, self.K, self.heads, -1)
        return parts.transpose(0, 3, 1, 4, 2, 5).reshape(
            self.X * self.K, self.C, -1, parts.shape[5]
        )

    def merge(self, array_YCME: Array) -> Array:
        """Bring blocks back as XTHE."""
        parts = array_YCME.reshape(self.X, self.K, self.C, self.heads, self.t, -1)
        parts = parts.transpose(0, 2, 4, 1, 3, 5)
        return parts.reshape(self.X, self.C * self.t, self.K * self.heads, -1)[:, : self.T]

    def merge_keys(self, array_YLE: Array) -> Array:
        """Bring gradients of keys back as XLKE."""
        return array_YLE.reshape(self.X, self.K, *array_YLE.shape[1:]).swapaxes(1, 2)

    def is_seen(self, c: Array, k_LE: Array, length: Array | None) -> Array:
        """Return which keys of one head each query of a block attends to, ML or 1L."""
        position_L = jnp.arange(len(k_LE))
        if length is not None:
            return (position_L < length)[None]
        is_seen_TL = (c * self.t + jnp.arange(self.t))[:, None] >= position_L[None]
        return jnp.tile(is_seen_TL, (self.heads, 1))


def _forward(block_bytes: int, q_XTHE: Array, keys: KeySet) -> Attended:
    blocks = _Blocks(block_bytes, q_XTHE, keys)

    def attend_head(k_LE: Array, v_LE: Array, length: Array | None, q_CME: Array) -> Attended:
        def block(xs: tuple[Array, Array]) -> Attended:
            c, q_ME = xs
            scores_ML = blocks.scale * _product(q_ME, k_LE.T)
            return attend_to_keys(
                jnp.where(blocks.is_seen(c, k_LE, length), scores_ML, MASKED), v_LE
            )

        return jax.lax.map(block, (jnp.arange(blocks.C), q_CME))

    values, lse = map(blocks.merge, blocks.over_heads(attend_head, q_XTHE))
    return values.astype(q_XTHE.dtype), lse[..., 0]


def _backward(
    block_bytes: int,
    q_XTHE: Array,
    keys: KeySet,
    out_XTHE: Array,
    lse_XTH: Array,
    dout_XTHE: Array,
) -> tuple[Array, Array, Array]:
    blocks = _Blocks(block_bytes, q_XTHE, keys)

    def pull_back(
        k_LE: Array, v_LE: Array, length: Array | None, *queries: Array
    ) -> tuple[Array, ...]:
        k_EL = k_LE.T

        def block(total: tuple[Array, Array], xs: tuple[Array, ...]) -> tuple[Any, Array]:
            c, q_ME, dout_ME, lse_M1, delta_M1 = xs
            # Keys before queries: no product of the large arrays needs a transposed copy.
            p_LM = jnp.exp(blocks.scale * _product(k_LE, q_ME.T) - lse_M1.T)
            # Of keys that are not seen it may be infinite.
            p_LM = jnp.where(blocks.is_seen(c, k_LE, length).T, p_LM, 0.0)
            ds_LM = p_LM * (_product(v_LE, dout_ME.T) - delta_M1.T)
            p_LM, ds_LM = p_LM.astype(v_LE.dtype), ds_LM.astype(k_LE.dtype)
            dk_LE = total[0] + _product(ds_LM, q_ME)
            dv_LE = total[1] + _product(p_LM, dout_ME)
            return (dk_LE, dv_LE), _product(k_EL, ds_LM).T

        zeros = jnp.zeros(k_LE.shape, jnp.float32)
        xs = (jnp.arange(blocks.C), *queries)
        (dk_LE, dv_LE), dq_CME = jax.lax.scan(block, (zeros, zeros), xs)
        return dq_CME, dk_LE, dv_LE

    dtype = q_XTHE.dtype
    delta_XTH1 = (dout_XTHE.astype(jnp.float32) * out_XTHE).sum(-1, keepdims=True)
    queries = (q_XTHE, dout_XTHE, lse_XTH[..., None], delta_XTH1)
    dq, dk, dv = blocks.over_heads(pull_back, *queries)
    dq = (blocks.scale * blocks.merge(dq)).astype(dtype)
    dk = (blocks.scale * blocks.merge_keys(dk)).astype(dtype)
    return dq, dk, blocks.merge_keys(dv).astype(dtype)


def _product(a: Array, b: Array) -> Array:
    """Multiply in fp32, which softmax is computed in; products of numbers in bf16 are exact there.

    XLA's CPU compiler may emit a product of bf16 into fp32 that its runtime lacks.
    """
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
