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


@nnx.jit
def logits(model: Any, ids_BT: Any) -> jax.Array:
    """Return the logits after every id of rows that are padded on the right, BTV."""
    positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    return model.logits(model(ids_BT, positions_BT, plain_attention)[0])


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the weights of a tree by their paths."""
    return {param_path(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def assert_same(tree: Any, other: Any) -> None:
    """Check that two trees hold the same numbers."""
    for leaf, twin in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, twin)
