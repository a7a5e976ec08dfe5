"""The one objective, of which the algorithms are settings.

Every function is per token. How tokens are averaged is a weight that `batching.token_weights`
computes over the whole batch, so that micro-batches add up. Arguments with these names are:

    logp_BT        natural-log probability of each token under the policy being trained
    old_logp_BT    the same under the policy that the ratio compares it with: the learner's own
                   before the step's first update
    is_action_BT   True where the policy sampled the token
    weight_BT      share of each token in the batch's mean; 0 where nothing was sampled
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from minirl.config.algorithms import AlgorithmConfig, Correction, KlEstimator, RatioLevel
from minirl.train.batching import Batch

# Of log-ratios, either way, as in verl: beyond it a token has a finite value and no gradient, and
# the update of all others goes on.
_LARGEST_LOG_RATIO = 20.0


def probability_ratio(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    is_action_BT: Bool[Array, "B T"],
    *,
    level: RatioLevel,
) -> Float[Array, "B T"]:
    """Return the importance ratio of each token; 1 where nothing was sampled.

    `token` is GRPO's w (Progress-SQL, appendix E.6); `sequence` is GSPO's s, the geometric mean of
    w over a sequence, which is a row (arXiv:2507.18071, Eq. 7).
    """
    log_ratio_BT = jnp.where(is_action_BT, logp_BT - old_logp_BT, 0.0)
    if level == "sequence":
        total_B1 = log_ratio_BT.sum(axis=1, keepdims=True)
        mean_B1 = total_B1 / jnp.maximum(is_action_BT.sum(axis=1, keepdims=True), 1)
        log_ratio_BT = jnp.where(is_action_BT, mean_B1, 0.0)
    return _ratio(log_ratio_BT)


def _ratio(log_ratio: Any, xp: Any = jnp) -> Any:
    return xp.exp(xp.clip(log_ratio, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO))


def correction_weight(
    rho_BT: Float[Array, "..."],
    *,
    kind: Correction,
    low: float,
    high: float,
) -> Float[Array, "..."]:
    """Return a weight that corrects for sampling with another policy than the learner's.

    rho is p(learner) / p(sampler), of tokens or of sequences. `truncated` is min(rho, high) (Yao et
    al. 2025, TIS); `masked` is rho between the bounds and 0 outside of them (Ling team 2025,
    IcePop).
    """
    return {
        "none": jnp.ones_like(rho_BT),
        "truncated": jnp.minimum(rho_BT, high),
        "masked": jnp.where((rho_BT >= low) & (rho_BT <= high), rho_BT, 0.0),
    }[kind]


def clipped_surrogate(
    ratio_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return PPO's clipped objective of each token, to be maximised, and where it is clipped.

    arXiv:1707.06347, Eq. 7; with different bounds DAPO's (arXiv:2503.14476, Eq. 10). No
    gradient flows through clipped tokens.
    """
    bounded_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    objective_BT = jnp.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
    is_clipped_BT = (advantage_BT > 0) & (ratio_BT > 1 + clip_high)
    is_clipped_BT |= (advantage_BT < 0) & (ratio_BT < 1 - clip_low)
    return objective_BT, is_clipped_BT


def cispo(
    ratio_BT: Float[Array, "B T"],
    logp_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    clip_high: float,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return CISPO's objective of each token, to be maximised, and where its weight is clipped.

    A sg(min(r, 1 + clip_high)) log p (MiniMax-M1, arXiv:2506.13585, Eqs. 4 and 5, without the lower
    bound): all tokens keep their gradient.
    """
    weight_BT = jax.lax.stop_gradient(jnp.minimum(ratio_BT, 1 + clip_high))
    return weight_BT * advantage_BT * logp_BT, ratio_BT > 1 + clip_high


def kl_divergence(logp: Any, reference_logp: Any, *, estimator: KlEstimator) -> Any:
    """Estimate KL(policy || reference) of each sampled token (Schulman, 2020), in JAX or NumPy.

    k1 = log p - log r; k3 = r/p - log(r/p) - 1. In a loss use k3: the expected gradient of k1 is
    zero on-policy.
    """
    xp = np if isinstance(logp, np.ndarray) else jnp
    k1 = logp - reference_logp
    return k1 if estimator == "k1" else _ratio(-k1, xp) + k1 - 1


def policy_loss(
    algorithm: AlgorithmConfig,
    logp_BT: Float[Array, "B T"],
    reference_logp_BT: Float[Array, "B T"],
    batch: Batch,
    entropy_BT: Float[Array, "B T"],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the policy-gradient loss of a micro-batch with its KL, if any, and its statistics.

    In the only update of a step the old policy is the policy itself: the ratio is 1, whatever
    kernels say. What the sampler did otherwise, rounding or older weights, is the correction's.

    Returns:
        The scalar to minimise; and sums over tokens of `weight` (each token's share in the mean)
        and of that times what `clip_fraction`, `kl` (of any numbers where no reference is),
        `entropy`, `correction_mean` and `correction_beyond` are means of.
    """
    is_action_BT, weight_BT, old_logp_BT = batch.is_action_BC, batch.weight_BC, batch.old_logp_BC
    if old_logp_BT is None:
        old_logp_BT = jax.lax.stop_gradient(logp_BT)
    low, high = algorithm.correction_low, algorithm.correction_high
    rho_BT = probability_ratio(
        old_logp_BT, batch.sampler_logp_BC, is_action_BT, level=algorithm.correction_level
    )
    correction_BT = correction_weight(rho_BT, kind=algorithm.correction, low=low, high=high)
    # All surrogates are homogeneous in the advantage, so that is where the weight goes.
    advantage_BT = batch.advantage_BC * correction_BT
    ratio_BT = probability_ratio(logp_BT, old_logp_BT, is_action_BT, level=algorithm.ratio_level)
    clip_high = algorithm.clip_high
    if algorithm.surrogate == "cispo":
        objective_BT, is_clipped_BT = cispo(ratio_BT, logp_BT, advantage_BT, clip_high=clip_high)
    else:
        objective_BT, is_clipped_BT = clipped_surrogate(
            ratio_BT, advantage_BT, clip_low=algorithm.clip_low, clip_high=clip_high
        )
    loss = -jnp.sum(objective_BT * weight_BT, where=is_action_BT)
    means = {
        "kl": kl_divergence(logp_BT, reference_logp_BT, estimator=algorithm.kl_estimator),
        "entropy": entropy_BT,
        "clip_fraction": is_clipped_BT,
        "correction_mean": correction_BT,
        "correction_beyond": (rho_BT < low) | (rho_BT > high),
        "weight": jnp.ones_like(weight_BT),
    }
    stats = {
        name: jnp.sum(value_BT * weight_BT, where=is_action_BT) for name, value_BT in means.items()
    }
    if algorithm.kl_coef and algorithm.kl_in == "loss":
        loss += algorithm.kl_coef * stats["kl"]
    return loss, stats


def likelihood(
    logp_BT: Float[Array, "B T"], _reference: Any, batch: Batch, *_: Any
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean negative log-likelihood of a micro-batch's targets."""
    return -jnp.sum(logp_BT * batch.weight_BC, where=batch.is_action_BC), {}
