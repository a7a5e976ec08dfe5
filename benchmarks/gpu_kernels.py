"""Compare the attention kernels of an NVIDIA GPU with references in float32, and time them.

    python -m benchmarks.gpu_kernels

Prints one line of JSON a kernel and shape: the largest difference of each result beside the largest
value, and for one new token microseconds of the kernel and of products of matrices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch import cli
from minirl.model.cudnn import cudnn
from minirl.model.kernels import MASKED, Attended, KeySet, attend_to_keys, blockwise
from minirl.sample.gpu_attention import attend_to_first

# Rows, queries, query heads, key heads, size of a head, keys that are seen (None: causal).
_LEARNER = (
    (2, 512, 14, 2, 64, None),
    (4, 96, 28, 4, 128, None),
    (4, 384, 14, 2, 64, (160, 320, 1, 0)),
    (1, 100, 14, 2, 64, (160,)),
)
# Rows, queries, size of a head, room for keys.
_SAMPLER = ((128, 7, 64, 1024), (64, 7, 128, 2048), (128, 7, 64, 1120))
_RUNS = 200


def main() -> None:
    """Compare and print."""
    cli.use_accelerator("gpu")
    rng = np.random.default_rng(0)

    def drawn(*sizes: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=sizes), jnp.bfloat16)

    for X, T, H, K, E, seen in _LEARNER:
        L = T if seen is None else max(seen)
        q, k, v, dout = (drawn(X, *sizes) for sizes in ((T, H, E), (L, K, E), (L, K, E), (T, H, E)))
        length_X = None if seen is None else jnp.asarray(seen, jnp.int32)
        print(json.dumps({"cudnn": [X, T, H, K, E, seen]} | _learner(q, k, v, dout, length_X)))
    for Y, M, E, L in _SAMPLER:
        arrays = drawn(Y, M, E), drawn(Y, E, L), drawn(Y, L, E)
        count_Y = jnp.asarray(rng.integers(1, L + 1, Y), jnp.int32)
        print(json.dumps({"one token": [Y, M, E, L]} | _sampler(*arrays, count_Y)))


def _learner(q: Any, k: Any, v: Any, dout: Any, length_X: Any) -> dict[str, Any]:
    """Compare cuDNN's values, log-sum-exp and gradients."""
    exact, kernel = blockwise(2**26), cudnn()
    with jax.default_matmul_precision("highest"):
        wide = (array.astype(jnp.float32) for array in (q, k, v, dout))
        q32, k32, v32, dout32 = wide
        keys = KeySet(k32, v32, length_X)
        out, lse = jax.jit(exact.forward)(q32, keys)
        gradients = jax.jit(exact.backward)(q32, keys, out, lse, dout32)
    found, found_lse = jax.jit(kernel.forward)(q, KeySet(k, v, length_X))
    own = jax.jit(kernel.backward)(q, KeySet(k, v, length_X), found, found_lse, dout)
    # What sees no key has any value.
    sees_XTH = lse > MASKED / 2
    pairs = {
        "values": (
            jnp.where(sees_XTH[..., None], found, 0),
            jnp.where(sees_XTH[..., None], out, 0),
        ),
        "lse": (found_lse[sees_XTH], lse[sees_XTH]),
        **{f"d{name}": pair for name, *pair in zip("qkv", own, gradients, strict=True)},
    }
    return {name: _gap(*pair) for name, pair in pairs.items()}


def _sampler(q: Any, k: Any, v: Any, count_Y: Any) -> dict[str, Any]:
    """Compare the kernel of one new token, and time it beside products of matrices."""

    def products(q: Any, k: Any, v: Any, count_Y: Any) -> Attended:
        scores = jnp.einsum("yme,yel->yml", q, k, preferred_element_type=jnp.float32)
        is_seen_Y1L = jnp.arange(k.shape[-1])[None, None] < count_Y[:, None, None]
        return attend_to_keys(jnp.where(is_seen_Y1L, scores * q.shape[-1] ** -0.5, MASKED), v)

    with jax.default_matmul_precision("highest"):
        wide = (array.astype(jnp.float32) for array in (q, k, v))
        exact = jax.jit(products)(*wide, count_Y)
    kernel, arrays = jax.jit(attend_to_first), (q, k, v, count_Y)
    values, lse = kernel(*arrays)
    return {
        "values": _gap(values, exact[0]),
        "lse": _gap(lse, exact[1]),
        "us": [_microseconds(one, arrays) for one in (kernel, jax.jit(products))],
    }


def _gap(found: Any, exact: Any) -> list[float]:
    one, other = (np.asarray(array, np.float32) for array in (found, exact))
    return [float(f"{number:.3g}") for number in (np.abs(one - other).max(), np.abs(other).max())]


def _microseconds(call: Callable[..., Any], arrays: tuple[Any, ...]) -> float:
    jax.block_until_ready(call(*arrays))
    start = time.perf_counter()
    for _ in range(_RUNS):
        last = call(*arrays)
    jax.block_until_ready(last)
    return round((time.perf_counter() - start) / _RUNS * 1e6, 1)


if __name__ == "__main__":
    main()
