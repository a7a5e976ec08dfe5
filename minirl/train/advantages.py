"""Advantages: one number per trajectory, from the rewards of its group.

What differs from token to token (credit spans, a KL in the credit, whitening over the batch) is
folded in by `minirl.train.credit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

# Those of a group; direct credit has none.
Estimator = Literal["group_normalised", "group_centred", "leave_one_out"]


def group_normalised(rewards_NG: np.ndarray, *, ddof: int = 1, epsilon: float = 1e-6) -> np.ndarray:
    """Standardise rewards within their group: (R - mean) / (std + epsilon).

    GRPO (arXiv:2402.03300, section 4.1.2; Progress-SQL, appendix E.6).

    Args:
        rewards_NG: Rewards, one row a group.
        ddof: 1 divides the variance by G - 1, 0 by G.
        epsilon: Added to the standard deviation.

    Returns:
        Advantages, NG; all 0 in a group of equal rewards; the reward itself in a group of one.
    """
    if rewards_NG.shape[1] == 1:  # verl's convention: mean 0, std 1
        return rewards_NG / (1.0 + epsilon)
    centred_NG = group_centred(rewards_NG)
    return centred_NG / (rewards_NG.std(axis=1, ddof=ddof, keepdims=True) + epsilon)


def group_centred(rewards_NG: np.ndarray) -> np.ndarray:
    """Subtract the group's mean (Dr.GRPO, arXiv:2503.20783, section 3.2)."""
    return rewards_NG - rewards_NG.mean(axis=1, keepdims=True)


def leave_one_out(rewards_NG: np.ndarray) -> np.ndarray:
    """Subtract the mean of the group's other rewards (RLOO, arXiv:2402.14740, section 2.2)."""
    others = rewards_NG.shape[1] - 1
    return group_centred(rewards_NG) * (others + 1) / others


def estimate(rewards_NG: np.ndarray, *, estimator: Estimator, ddof: int = 1) -> np.ndarray:
    """Turn the rewards of a batch of groups, NG, into advantages, NG."""
    table: dict[Estimator, Callable[[np.ndarray], np.ndarray]] = {
        "group_normalised": lambda rewards: group_normalised(rewards, ddof=ddof),
        "group_centred": group_centred,
        "leave_one_out": leave_one_out,
    }
    return table[estimator](np.asarray(rewards_NG, np.float64))


def groups_to_train(
    rewards_NG: np.ndarray,
    correct_NG: np.ndarray,
    *,
    equal_groups: Literal["keep", "drop"],
    correctness_filter: Literal["none", "mixed"],
) -> Sequence[int]:
    """Choose the groups that take part in the update.

    Args:
        rewards_NG: Rewards, one row a group.
        correct_NG: Execution match of each trajectory.
        equal_groups: `keep` leaves groups of equal rewards in (they count in every mean and pull
            nowhere); `drop` leaves them out.
        correctness_filter: `mixed` keeps the groups in which some trajectories are correct and some
            are not. Correctness, not the shaped reward: a group that is all wrong but for shaping
            would else be pushed by shaping alone.

    Returns:
        Row numbers in order; empty when no group is left.
    """
    keep_N = np.ones(len(rewards_NG), bool)
    if equal_groups == "drop":
        keep_N &= np.ptp(rewards_NG, axis=1) > 0
    if correctness_filter == "mixed":
        keep_N &= correct_NG.any(axis=1) & ~correct_NG.all(axis=1)
    return np.flatnonzero(keep_N).tolist()
