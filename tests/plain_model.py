"""A model's logits with nothing clever, and its weights by name: what tests compare with."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minirl.model.sharding import param_path


def plain_attention(q_BTHE: Any, k_BTKE: Any, v_BTKE: Any, cache: Any) -> tuple[Any, Any]:
    """Attend causally, heads repeated and the mask an infinity."""
    repeats = q_BTHE.shape[2] // k_BTKE.shape[2]
    k_BTHE, v_BTHE = jnp.repeat(k_BTKE, repeats, axis=2), jnp.repeat(v_BTKE, repeats, axis=2)
    scores = jnp.einsum("bthe,bshe->bhts", q_BTHE, k_BTHE) / math.sqrt(q_BTHE.shape[-1])
    past = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
    return jnp.einsum("bhts,bshe->bthe", weights, v_BTHE), cache


def plain_recurrence(inputs: Any, kernels: Any, cache: Any) -> tuple[Any, Any]:
    """Run Gated DeltaNet token by token, as its equations stand."""
    *values, g_BTH, beta_BTH = inputs

    def convolved(x_BTKE: Any, kernel_KEW: Any) -> Any:
        taps = kernel_KEW.shape[-1]
        before = jnp.pad(x_BTKE, ((0, 0), (taps - 1, 0), (0, 0), (0, 0)))
        parts = [
            before[:, w : w + x_BTKE.shape[1]] * kernel_KEW[None, None, :, :, w]
            for w in range(taps)
        ]
        return jax.nn.silu(sum(parts))

    q, k, v = (convolved(x, kernel) for x, kernel in zip(values, kernels, strict=True))
    q, k = (x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (
        jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q / math.sqrt(q.shape[-1]), k)
    )

    def token(memory: Any, xs: Any) -> tuple[Any, Any]:
        q, k, v, g, beta = xs
        memory = memory * jnp.exp(g)[:, :, None, None]
        error = v - jnp.einsum("bheu,bhe->bhu", memory, k)
        memory = memory + jnp.einsum("bhe,bhu,bh->bheu", k, error, beta)
        return memory, jnp.einsum("bheu,bhe->bhu", memory, q)

    by_time = (x.swapaxes(0, 1) for x in (q, k, v, g_BTH, beta_BTH))
    nothing = jnp.zeros((*v.shape[::2], k.shape[-1], v.shape[-1]))
    return jax.lax.scan(token, nothing, tuple(by_time))[1].swapaxes(0, 1), cache


@nnx.jit
def logits(model: Any, ids_BT: Any) -> jax.Array:
    """Return the logits after every id of rows that are padded on the right, BTV."""
    positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    return model.logits(model(ids_BT, positions_BT, plain_attention, recur=plain_recurrence)[0])


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the weights of a tree by their paths."""
    return {param_path(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def assert_same(tree: Any, other: Any) -> None:
    """Check that two trees hold the same numbers in the same types."""
    for leaf, twin in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert leaf.dtype == twin.dtype
        np.testing.assert_array_equal(leaf, twin)


def assert_close(tree: Any, other: Any, *, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Check that two trees hold the same finite numbers, but for how two programs round."""
    for leaf, twin in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        leaf, twin = (np.asarray(one, np.float32) for one in (leaf, twin))
        assert np.isfinite(leaf).all()
        np.testing.assert_allclose(leaf, twin, rtol=rtol, atol=atol)


def assert_near(tree: Any, other: Any, *, rtol: float, least: float = 1e-5) -> None:
    """Check the same with a tolerance relative to each leaf's largest number, or to the least."""
    for (path, leaf), twin in zip(
        jax.tree.leaves_with_path(tree), jax.tree.leaves(other), strict=True
    ):
        assert np.isfinite(leaf).all()
        atol = rtol * max(np.abs(np.asarray(twin)).max(), least)
        np.testing.assert_allclose(
            leaf, twin, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path)
        )
