"""What a query may look at: the functions that a `Decoder` takes as `attend`.

Scores over several sets of keys (the shared prompt, the answer's own tokens) are normalised
together, so that attending to a prompt kept once a group equals attending to a copy in every row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from minirl.model import Attend


def causal() -> Attend:
    """Attend to the same row up to the query; rows are padded on the right.

    The new cache of a layer is its keys and values, (k_BTKE, v_BTKE).
    """

    def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, cache: Any) -> tuple[Array, Any]:
        del cache
        B, T, H, E = q_BTHE.shape
        K = k_BTKE.shape[2]
        q = (q_BTHE * E**-0.5).reshape(B, T, K, H // K, E).transpose(0, 2, 3, 1, 4)
        scores = jnp.einsum("bkrte,bske->bkrts", q, k_BTKE).astype(jnp.float32)
        weights = jax.nn.softmax(scores + _bias(_triangle(T))[None, None, None])
        out = jnp.einsum("bkrts,bske->bkrte", weights.astype(v_BTKE.dtype), v_BTKE)
        return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, E), (k_BTKE, v_BTKE)

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
        G, R = B // N, H // K
        # Heads go outside, so that each product is one matrix product a group and head (M = R x T).
        q = (q_BTHE * E**-0.5).reshape(N, G, T, K, R, E).transpose(0, 3, 1, 4, 2, 5)
        q_NKGME = q.reshape(N, K, G, R * T, E)
        k_NKGTE = k_BTKE.reshape(N, G, T, K, E).transpose(0, 3, 1, 2, 4)
        v_NKGTE = v_BTKE.reshape(N, G, T, K, E).transpose(0, 3, 1, 2, 4)
        to_prefix = jnp.einsum("nkgme,npke->nkgmp", q_NKGME, k_NPKE).astype(jnp.float32)
        to_prefix += _bias(jnp.arange(P)[None] < prefix_lengths_N[:, None])[:, None, None, None]
        to_own = jnp.einsum("nkgme,nkgte->nkgmt", q_NKGME, k_NKGTE).astype(jnp.float32)
        to_own += jnp.tile(_bias(_triangle(T)), (R, 1))[None, None, None]
        peak = jnp.maximum(to_prefix.max(-1, keepdims=True), to_own.max(-1, keepdims=True))
        peak = jax.lax.stop_gradient(peak)
        to_prefix, to_own = jnp.exp(to_prefix - peak), jnp.exp(to_own - peak)
        total = to_prefix.sum(-1, keepdims=True) + to_own.sum(-1, keepdims=True)
        out = jnp.einsum("nkgmp,npke->nkgme", to_prefix.astype(v_NPKE.dtype), v_NPKE)
        out += jnp.einsum("nkgmt,nkgte->nkgme", to_own.astype(v_NKGTE.dtype), v_NKGTE)
        out = (out / total).astype(q_BTHE.dtype).reshape(N, K, G, R, T, E)
        return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, T, H, E), cache

    return attend


def _bias(mask: Bool[Array, "..."]) -> Array:
    """Turn a mask into what is added to scores; finite, so that a row may be masked whole."""
    return jnp.where(mask, 0.0, -1e30)


def _triangle(T: int) -> Bool[Array, "T T"]:
    return jnp.tril(jnp.ones((T, T), bool))
