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
    any_greedy: bool,
    any_top_p: bool,
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits_SV: Unscaled, fp32.
        keys_S: A random key a row; one key always draws the same token from the same logits.
        temperature_S: Divides the logits; 0 takes the most likely token.
        top_p_S: Draw only from the most likely tokens that together reach this probability.
        any_greedy: False promises that no temperature is 0.
        any_top_p: False promises that every top_p is 1.

    Returns:
        The tokens, and the natural-log probability of each under softmax(logits / temperature),
        at temperature 1 where it is 0.

    Note:
        `top_p` narrows what is drawn but not the log-probabilities: the learner computes its own
        over the whole vocabulary, and their ratio must be 1 before the first update.
    """
    safe_S = jnp.where(temperature_S > 0, temperature_S, 1.0)
    scaled_SV = logits_SV / safe_S[:, None]
    peak_S = scaled_SV.max(axis=-1)
    weights_SV = jnp.exp(scaled_SV - peak_S[:, None])
    normaliser_S = peak_S + jnp.log(weights_SV.sum(axis=-1))
    drawable_SV = _nucleus(weights_SV, top_p_S) if any_top_p else weights_SV
    ids_S = _draw(drawable_SV, keys_S)
    if any_greedy:
        ids_S = jnp.where(temperature_S > 0, ids_S, scaled_SV.argmax(axis=-1).astype(ids_S.dtype))
    chosen_S = jnp.take_along_axis(scaled_SV, ids_S[:, None], axis=-1)[:, 0]
    return ids_S, chosen_S - normaliser_S


def _nucleus(weights_SV: Array, top_p_S: Array) -> Array:
    """Zero all but the smallest set of likeliest tokens that reaches top_p; ties stay in."""
    sorted_SV = -jnp.sort(-weights_SV, axis=-1)
    before_SV = jnp.cumsum(sorted_SV, axis=-1) - sorted_SV
    enough_S = top_p_S * weights_SV.sum(axis=-1)
    kept_SV = before_SV < enough_S[:, None]
    least_S = jnp.where(kept_SV, sorted_SV, jnp.inf).min(axis=-1)
    # At top_p = 1, rounding could cut a token of the tail off.
    is_in_SV = (weights_SV >= least_S[:, None]) | (top_p_S >= 1.0)[:, None]
    return jnp.where(is_in_SV, weights_SV, 0.0)


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
