"""What a query may look at: the functions that a `Decoder` takes as `attend`.

Scores over several sets of keys (the shared prompt, the answer's own tokens) are normalised
together, so that attending to a prompt kept once a group equals attending to a copy in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from minirl.model import Attend


def softmax_together(scores: Sequence[Array]) -> list[Array]:
    """Normalise scores over the last axes of all the given arrays jointly, in fp32.

    Args:
        scores: Arrays equal in shape but for the last axis; -inf where masked.
    """
    scores = [part.astype(jnp.float32) for part in scores]
    peaks = [jnp.max(part, axis=-1, keepdims=True) for part in scores]
    peak = jax.lax.stop_gradient(jnp.stack(peaks).max(axis=0))
    weights = [jnp.exp(part - peak) for part in scores]
    total = sum(part.sum(axis=-1, keepdims=True) for part in weights)
    return [part / total for part in weights]


def _masked(scores: Array, mask: Bool[Array, "..."]) -> Array:
    return jnp.where(mask, scores, -jnp.inf)


def causal() -> Attend:
    """Attend to the same row up to the query; rows are padded on the right.

    The new cache of a layer is its keys and values, (k_BTKE, v_BTKE).
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        del cache
        B, T, H, E = q_BTHE.shape
        K = k_BTKE.shape[2]
        q = (q_BTHE * E**-0.5).reshape(B, T, K, H // K, E)
        scores = jnp.einsum("btkre,bske->bkrts", q, k_BTKE)
        (weights,) = softmax_together([_masked(scores, _triangle(T)[None, None, None])])
        out = jnp.einsum("bkrts,bske->btkre", weights.astype(v_BTKE.dtype), v_BTKE)
        return out.reshape(B, T, H, E), (k_BTKE, v_BTKE)

    return attend


def shared_prefix(prefix_lengths_N: Int[Array, "N"]) -> Attend:
    """Attend to a prefix kept once a group, then to the own row up to the query.

    Rows come as B = N x G, the rows of a group side by side. A layer's cache is its prefix,
    (k_NPKE, v_NPKE), padded on the right; it is returned unchanged.
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        k_NPKE, v_NPKE = cache
        B, T, H, E = q_BTHE.shape
        N, P, K, _ = k_NPKE.shape
        q = (q_BTHE * E**-0.5).reshape(N, B // N, T, K, H // K, E)
        own_shape = (N, B // N, T, K, E)
        k, v = k_BTKE.reshape(own_shape), v_BTKE.reshape(own_shape)
        prefix_mask = jnp.arange(P)[None, :] < prefix_lengths_N[:, None]
        prefix_scores = _masked(
            jnp.einsum("ngtkre,npke->nkgrtp", q, k_NPKE),
            prefix_mask[:, None, None, None, None, :],
        )
        own_scores = _masked(
            jnp.einsum("ngtkre,ngske->nkgrts", q, k), _triangle(T)[None, None, None, None]
        )
        to_prefix, to_own = softmax_together([prefix_scores, own_scores])
        out = jnp.einsum("nkgrtp,npke->ngtkre", to_prefix.astype(v.dtype), v_NPKE)
        out += jnp.einsum("nkgrts,ngske->ngtkre", to_own.astype(v.dtype), v)
        return out.reshape(B, T, H, E), cache

    return attend


def _triangle(T: int) -> Bool[Array, "T T"]:
    return jnp.tril(jnp.ones((T, T), bool))
