"""The one objective, of which the algorithms are settings.

Every function is per token. How tokens are averaged is a weight that `batching.token_weights`
computes over the whole batch, so that micro-batches add up. Arguments with these names are:

    logp_BT        natural-log probability of each token under the policy being trained
    old_logp_BT    the same under the policy that the ratio compares it with
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
    w over a sequence, which is a row (arXiv:2507.18071, Eq. 7); `sequence_token` is GSPO-token's
    (Eq. 14): the value of s with the gradient of the token's own log-probability.
    """
    log_ratio_BT = jnp.where(is_action_BT, logp_BT - old_logp_BT, 0.0)
    if level != "token":
        count_B1 = jnp.maximum(is_action_BT.sum(axis=1, keepdims=True), 1)
        mean_B1 = log_ratio_BT.sum(axis=1, keepdims=True) / count_B1
        row_BT = jnp.where(is_action_BT, mean_B1, 0.0)
        if level == "sequence_token":
            row_BT = jax.lax.stop_gradient(row_BT - log_ratio_BT) + log_ratio_BT
        log_ratio_BT = row_BT
    return _ratio(log_ratio_BT)


def _ratio(log_ratio: Any, xp: Any = jnp) -> Any:
    return xp.exp(xp.clip(log_ratio, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO))


def importance_correction(
    logp_BT: Float[Array, "B T"],
    sampler_logp_BT: Float[Array, "B T"],
    is_action_BT: Bool[Array, "B T"],
    *,
    kind: Correction,
    low: float,
    high: float,
) -> Float[Array, "B T"]:
    """Return a weight of each token that corrects for the gap between sampler and learner.

    With rho = p(learner) / p(sampler), both of the weights that sampled, `truncated` is
    min(rho, high) (Yao et al. 2025, TIS), and `masked` is rho between the bounds and 0 outside of
    them (Ling team 2025, IcePop). Weights have no gradient; 1 where nothing was sampled.
    """
    if kind == "none":
        return jnp.ones_like(logp_BT)
    gap_BT = jnp.where(is_action_BT, logp_BT - sampler_logp_BT, 0.0)
    rho_BT = _ratio(jax.lax.stop_gradient(gap_BT))
    if kind == "truncated":
        return jnp.minimum(rho_BT, high)
    return jnp.where((rho_BT >= low) & (rho_BT <= high), rho_BT, 0.0)


def clipped_surrogate(
    ratio_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return PPO's clipped objective of each token, to be maximised, and where it is clipped.

    arXiv:1707.06347, Eq. 7; with different bounds DAPO's (arXiv:2503.14476, Eq. 10). With
    `dual_clip`, a negative advantage counts at most that many times (arXiv:1912.09729, Eq. 5). No
    gradient flows through clipped tokens.
    """
    bounded_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    objective_BT = jnp.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
    is_bad_BT = advantage_BT < 0
    is_clipped_BT = (advantage_BT > 0) & (ratio_BT > 1 + clip_high)
    is_clipped_BT |= is_bad_BT & (ratio_BT < 1 - clip_low)
    if dual_clip is not None:
        least_BT = jnp.maximum(objective_BT, dual_clip * advantage_BT)
        objective_BT = jnp.where(is_bad_BT, least_BT, objective_BT)
        is_clipped_BT |= is_bad_BT & (ratio_BT > dual_clip)
    return objective_BT, is_clipped_BT


def kl_divergence(logp: Any, reference_logp: Any, *, estimator: KlEstimator) -> Any:
    """Estimate KL(policy || reference) of each sampled token (Schulman, 2020), in JAX or NumPy.

    k1 = log p - log r; k2 = k1^2 / 2; k3 = r/p - log(r/p) - 1. In a loss use k2 or k3: the expected
    gradient of k1 is zero on-policy.
    """
    xp = np if isinstance(logp, np.ndarray) else jnp
    k1 = logp - reference_logp
    return {"k1": k1, "k2": xp.square(k1) / 2, "k3": _ratio(-k1, xp) + k1 - 1}[estimator]


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
    dual_clip: float | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the policy-gradient loss to minimise, and the weighted share of clipped tokens.

    Both are 0 where nothing is an action.
    """
    ratio_BT = probability_ratio(logp_BT, old_logp_BT, is_action_BT, level=ratio_level)
    objective_BT, is_clipped_BT = clipped_surrogate(
        ratio_BT, advantage_BT, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    loss = -jnp.sum(objective_BT * weight_BT, where=is_action_BT)
    return loss, jnp.sum(weight_BT, where=is_action_BT & is_clipped_BT)


def objective(
    algorithm: AlgorithmConfig,
    logp_BT: Float[Array, "B T"],
    reference_logp_BT: Float[Array, "B T"],
    batch: Batch,
    entropy_BT: Float[Array, "B T"],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the whole loss of a micro-batch, and its statistics.

    With a correction, the ratio is that of the learner to itself at the weights that sampled: 1,
    and never clipped, in the only update of a step; with several mini-batches the learner's
    log-probabilities at those weights come in the batch. For episodes that older weights sampled
    neither is known: the settings refuse them.

    Returns:
        The scalar to minimise, and scalars by name: `logp_gap_max`; and sums over tokens of
        `weight` (each token's share in the mean) and of that times what `clip_fraction`, `kl` (of
        any numbers where no reference is), `entropy` and `correction_mean` are means of.
    """
    old_logp_BT, advantage_BT = batch.old_logp_BC, batch.advantage_BC
    is_action_BT = batch.is_action_BC
    stats = {"weight": jnp.sum(batch.weight_BC, where=is_action_BT)}
    if algorithm.correction != "none":
        start_logp_BT = batch.start_logp_BC
        old_logp_BT = jax.lax.stop_gradient(logp_BT) if start_logp_BT is None else start_logp_BT
        correction_BT = importance_correction(
            old_logp_BT,
            batch.old_logp_BC,
            is_action_BT,
            kind=algorithm.correction,
            low=algorithm.correction_low,
            high=algorithm.correction_high,
        )
        # The clipped term is homogeneous in the advantage, so that is where the weight goes.
        advantage_BT = advantage_BT * correction_BT
        stats["correction_mean"] = jnp.sum(correction_BT * batch.weight_BC)
    loss, stats["clip_fraction"] = policy_loss(
        logp_BT,
        old_logp_BT,
        advantage_BT,
        is_action_BT,
        batch.weight_BC,
        ratio_level=algorithm.ratio_level,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    gap_BT = jnp.abs(logp_BT - batch.old_logp_BC)
    stats["logp_gap_max"] = jnp.max(gap_BT, where=is_action_BT, initial=0.0)
    kl_BT = kl_divergence(logp_BT, reference_logp_BT, estimator=algorithm.kl_estimator)
    stats["kl"] = jnp.sum(kl_BT * batch.weight_BC, where=is_action_BT)
    stats["entropy"] = jnp.sum(entropy_BT * batch.weight_BC)
    if algorithm.kl_coef and algorithm.kl_in == "loss":
        loss += algorithm.kl_coef * stats["kl"]
    return loss, stats


def likelihood(
    logp_BT: Float[Array, "B T"], _reference: Any, batch: Batch, _entropy: Any
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean negative log-likelihood of a micro-batch's targets."""
    return -jnp.sum(logp_BT * batch.weight_BC, where=batch.is_action_BC), {}
