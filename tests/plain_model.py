"""A model's logits with nothing clever, and its weights by name: what tests compare with."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minirl.model import linear_attention
from minirl.model.sharding import param_path


def plain_attention(q_BTHE: Any, k_BTKE: Any, v_BTKE: Any, cache: Any) -> tuple[Any, Any]:
    """Attend causally, heads repeated and the mask an infinity."""
    repeats = q_BTHE.shape[2] // k_BTKE.shape[2]
    k_BTHE, v_BTHE = jnp.repeat(k_BTKE, repeats, axis=2), jnp.repeat(v_BTKE, repeats, axis=2)
    scores = jnp.einsum("bthe,bshe->bhts", q_BTHE, k_BTHE) / math.sqrt(q_BTHE.shape[-1])
    past = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
    return jnp.einsum("bhts,bshe->bthe", weights, v_BTHE), cache


def whole(inputs: Any, kernels: Any, cache: Any) -> tuple[Any, Any]:
    """Run linear attention over whole rows: so are its numbers those of transformers."""
    start = linear_attention.no_state(inputs, kernels)
    length_B = jnp.full(len(inputs.g_BTH), inputs.g_BTH.shape[1])
    return linear_attention.run(inputs, kernels, start, length_B)[0], cache


@nnx.jit
def logits(model: Any, ids_BT: Any) -> jax.Array:
    """Return the logits after every id of rows that are padded on the right, BTV."""
    positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    return model.logits(model(ids_BT, positions_BT, plain_attention, recur=whole)[0])


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the weights of a tree by their paths."""
    return {param_path(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def assert_same(tree: Any, other: Any) -> None:
    """Check that two trees hold the same numbers in the same types."""
    for (path, leaf), twin in zip(
        jax.tree.leaves_with_path(tree), jax.tree.leaves(other), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert leaf.dtype == twin.dtype, name
        np.testing.assert_array_equal(leaf, twin, err_msg=name)


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
