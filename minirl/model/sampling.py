"""Draw a token from logits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sample(
    logits_SV: Float[Array, "S V"],
    keys_S: Array,
    temperature_S: Float[Array, "S"],
    top_p_S: Float[Array, "S"],
    *,
    any_top_p: bool,
) -> tuple[Int[Array, "S"], Float[Array, "S"], Float[Array, "S"]]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits_SV: Unscaled, fp32.
        keys_S: A random key a row; one key always draws the same token from the same logits.
        temperature_S: Divides the logits; 0 takes the most likely token, or one of several.
        top_p_S: Draw only from the most likely tokens that together reach this probability.
        any_top_p: False promises that every top_p is 1.

    Returns:
        The tokens; the natural-log probability of each under the whole softmax(logits /
        temperature), at temperature 1 where it is 0; and the probability that `top_p` cut off.
    """
    safe_S = jnp.where(temperature_S > 0, temperature_S, 1.0)
    scaled_SV = logits_SV / safe_S[:, None]
    peak_S = scaled_SV.max(axis=-1)
    weights_SV = jnp.exp(scaled_SV - peak_S[:, None])
    total_S = weights_SV.sum(axis=-1)
    drawable_SV, drawable_S = weights_SV, total_S
    if any_top_p:
        drawable_SV = jnp.where(_in_nucleus(weights_SV, top_p_S), weights_SV, 0.0)
        drawable_S = drawable_SV.sum(axis=-1)
    is_peak_SV = (scaled_SV == peak_S[:, None]).astype(weights_SV.dtype)
    ids_S = _draw(jnp.where(temperature_S[:, None] > 0, drawable_SV, is_peak_SV), keys_S)
    chosen_S = jnp.take_along_axis(scaled_SV, ids_S[:, None], axis=-1)[:, 0]
    return ids_S, chosen_S - peak_S - jnp.log(total_S), 1.0 - drawable_S / total_S


def likeliest(
    logits_SV: Float[Array, "S V"], temperature_S: Float[Array, "S"], *, count: int
) -> tuple[Int[Array, "S K"], Float[Array, "S K"]]:
    """Return the likeliest tokens and their log-probabilities, which are those of `sample`."""
    scaled_SV = logits_SV / jnp.where(temperature_S > 0, temperature_S, 1.0)[:, None]
    top_SK, ids_SK = jax.lax.top_k(scaled_SV, count)
    return ids_SK, top_SK - jax.nn.logsumexp(scaled_SV, axis=-1, keepdims=True)


def _in_nucleus(weights: Float[Array, "... V"], top_p: Float[Array, "..."]) -> Array:
    """Tell the smallest set of likeliest tokens that reaches top_p (arXiv:1904.09751); ties too.

    Weights are in proportion to probabilities.
    """
    descending = -jnp.sort(-weights, axis=-1)
    before = jnp.cumsum(descending, axis=-1) - descending
    enough = top_p * weights.sum(axis=-1)
    is_kept = before < enough[..., None]
    least = jnp.where(is_kept, descending, jnp.inf).min(axis=-1)
    # At top_p = 1, rounding could cut a token of the tail off.
    return (weights >= least[..., None]) | (top_p >= 1.0)[..., None]


def _draw(weights_SV: Array, keys_S: Array) -> Array:
    """Draw an index in proportion to the weights: first a block of the vocabulary, then inside it.

    Two uniform numbers a row take the place of one Gumbel number a token, and with two of them a
    token rarer than the 2**-23 of one fp32 number still has its exact share.
    """
    S, V = weights_SV.shape
    width = math.isqrt(V)
    blocks = -(-V // width)
    weights = jnp.pad(weights_SV, ((0, 0), (0, blocks * width - V))).reshape(S, blocks, width)
    uniform_S2 = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys_S)
    block_S = _invert(weights.sum(axis=-1), uniform_S2[:, 0])
    inside = jnp.take_along_axis(weights, block_S[:, None, None], axis=1)[:, 0]
    return block_S * width + _invert(inside, uniform_S2[:, 1])


def _invert(weights_SX: Array, uniform_S: Array) -> Array:
    """Return the first index whose cumulative weight exceeds the uniform share of the total."""
    cumulative_SX = jnp.cumsum(weights_SX, axis=-1)
    total_S1 = cumulative_SX[:, -1:]
    first_S = (cumulative_SX <= uniform_S[:, None] * total_S1).sum(axis=-1)
    # Rounding may put the share at the total itself; the last index of positive weight is the end.
    last_S = (cumulative_SX < total_S1).sum(axis=-1)
    return jnp.minimum(first_S, last_S)
