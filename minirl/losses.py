"""The one objective, of which the algorithms are settings.

Every function is per token; how tokens are averaged is a weight that `batching.token_weights`
computes over the whole batch, so that a sum over micro-batches is the same number.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

RatioLevel = Literal["token", "sequence"]
KlEstimator = Literal["k1", "k2", "k3"]


def probability_ratio(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    is_action_BT: Bool[Array, "B T"],
    *,
    level: RatioLevel,
) -> Float[Array, "B T"]:
    """Return the importance ratio of each token.

    Args:
        logp_BT: Natural-log probability of each token under the policy being trained.
        old_logp_BT: The same under the policy that sampled it.
        is_action_BT: True where the policy sampled the token.
        level: `token` is GRPO's w (Progress-SQL, appendix E.6); `sequence` is GSPO's s, the
            geometric mean of w over a row's sampled tokens (arXiv:2507.18071, Eq. 7), repeated.

    Returns:
        Ratios, BT; 1 where nothing was sampled.
    """
    log_ratio_BT = jnp.where(is_action_BT, logp_BT - old_logp_BT, 0.0)
    if level == "sequence":
        count_B1 = jnp.maximum(is_action_BT.sum(axis=1, keepdims=True), 1)
        mean_B1 = log_ratio_BT.sum(axis=1, keepdims=True) / count_B1
        log_ratio_BT = jnp.where(is_action_BT, mean_B1, 0.0)
    return jnp.exp(log_ratio_BT)


def clipped_surrogate(
    ratio_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """Return PPO's clipped objective of each token, to be maximised (arXiv:1707.06347, Eq. 7).

    Args:
        ratio_BT: Importance ratios.
        advantage_BT: Advantages, dimensionless.
        clip_low: Largest allowed fall of the ratio below 1.
        clip_high: Largest allowed rise above 1.
    """
    clipped_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    return jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)


def kl_divergence(
    logp_BT: Float[Array, "B T"],
    reference_logp_BT: Float[Array, "B T"],
    *,
    estimator: KlEstimator,
) -> Float[Array, "B T"]:
    """Estimate KL(policy || reference) of each sampled token (Schulman, 2020).

    k1 = log p - log r; k2 = k1^2 / 2; k3 = r/p - log(r/p) - 1. In a loss use k2 or k3: the expected
    gradient of k1 is zero on-policy.
    """
    k1_BT = logp_BT - reference_logp_BT
    table = {
        "k1": k1_BT,
        "k2": jnp.square(k1_BT) / 2,
        "k3": jnp.exp(-k1_BT) + k1_BT - 1,
    }
    return table[estimator]


def is_clipped(
    ratio_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Bool[Array, "B T"]:
    """Tell where the clipped side is the smaller one, that is where no gradient flows."""
    above_BT = (advantage_BT > 0) & (ratio_BT > 1 + clip_high)
    below_BT = (advantage_BT < 0) & (ratio_BT < 1 - clip_low)
    return above_BT | below_BT


def policy_loss(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    is_action_BT: Bool[Array, "B T"],
    weight_BT: Float[Array, "B T"],
    *,
    ratio_level: RatioLevel,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the policy-gradient loss and the weighted share of clipped tokens.

    Args:
        logp_BT: Natural-log probability of each token under the policy being trained.
        old_logp_BT: The same under the policy that sampled it.
        advantage_BT: Advantage of each token.
        is_action_BT: True where the policy sampled the token; False on prompts, observations,
            padding.
        weight_BT: The share of each token in the batch's mean; 0 where nothing was sampled.
        ratio_level: Importance ratio of a token, or of its whole sequence.
        clip_low: See `clipped_surrogate`.
        clip_high: See `clipped_surrogate`.

    Returns:
        Two scalars: the loss to minimise, and the clip fraction; both 0 where nothing is an action.
    """
    ratio_BT = probability_ratio(logp_BT, old_logp_BT, is_action_BT, level=ratio_level)
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    objective_BT = clipped_surrogate(ratio_BT, advantage_BT, **bounds)
    clipped_BT = is_clipped(jax.lax.stop_gradient(ratio_BT), advantage_BT, **bounds)
    loss = -jnp.sum(objective_BT * weight_BT, where=is_action_BT)
    return loss, jnp.sum(weight_BT, where=is_action_BT & clipped_BT)
