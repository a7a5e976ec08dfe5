"""The objectives of the papers, written out plainly: loops over rows and tokens in NumPy.

They share nothing with the package but its settings.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minirl.config.algorithms import AlgorithmConfig

LONGEST = 14
N, G = 3, 4


@dataclass(frozen=True)
class Row:
    """Numbers of the sampled tokens of one row, in order: log-probabilities of the learner, of the
    learner before the step, of the sampler and of the reference; credit.
    """

    new: np.ndarray
    old: np.ndarray
    sampler: np.ndarray
    ref: np.ndarray
    credit: np.ndarray
    is_covered: np.ndarray
    reward: float
    length: int


def k1(row):
    return row.sampler - row.ref


# Credit: an advantage of each token of each row.


def by_group(rows, rule):
    """Give all tokens of a row what a rule says of (rewards of its group, its place)."""
    rewards = [row.reward for row in rows]
    return [
        [rule(rewards[b - b % G : b - b % G + G], b % G)] * len(row.new)
        for b, row in enumerate(rows)
    ]


def normalised(rows, *, kl=lambda row: 0.0):
    credit = by_group(rows, lambda r, g: (r[g] - np.mean(r)) / (np.std(r, ddof=1) + 1e-6))
    return [np.array(own) - kl(row) for own, row in zip(credit, rows, strict=True)]


def centred(rows):
    return by_group(rows, lambda r, g: r[g] - np.mean(r))


def whitened_return(rows):
    """arXiv:2501.03262: the return less the KL from the token on, whitened over the batch."""
    credit = [[row.reward - 0.1 * sum(k1(row)[t:]) for t in range(len(row.new))] for row in rows]
    flat = [value for row in credit for value in row]
    return [(np.array(row) - np.mean(flat)) / (np.std(flat, ddof=1) + 1e-6) for row in credit]


def on_clauses(rows):
    """EXPO-SQL, Eq. 4: r_c - beta k1 on each token of a clause."""
    return [np.where(row.is_covered, row.credit - 0.01 * k1(row), 0.0) for row in rows]


def from_here_on(rows):
    return [np.cumsum(credit[::-1])[::-1] for credit in on_clauses(rows)]


# Loss: less a mean of a term of each token.


def surrogate(ratio, advantage, *, low=0.2, high=0.2):
    """Return PPO's term of one token, by cases."""
    if advantage >= 0:
        return min(ratio, 1 + high) * advantage
    return max(ratio, 1 - low) * advantage


def plain(
    rows, start, *, credit=normalised, mean=lambda terms, row: np.mean(terms) / (N * G),
    correct=lambda rho: min(rho, 2.0), level="token", is_cispo=False, kl=lambda x: 0.0, high=0.2,
):  # fmt: skip
    """Return the loss; a mean weighs the terms of a row within the batch."""
    total = 0.0
    for row, at, advantages in zip(rows, start, credit(rows), strict=True):
        ratios, rhos = row.new - row.old, row.old - row.sampler
        if level == "sequence":  # arXiv:2507.18071, Eqs. 5 to 7
            ratios, rhos = (np.full(len(x), np.mean(x)) for x in (ratios, rhos))
        terms = []
        for t, advantage in enumerate(advantages):
            term = surrogate(np.exp(ratios[t]), advantage, high=high)
            if is_cispo:  # arXiv:2506.13585, Eq. 4: no gradient flows through the clipped ratio
                term = min(np.exp(at.new[t] - row.old[t]), 1 + high) * advantage * row.new[t]
            terms.append(correct(np.exp(rhos[t])) * term - kl(row.new[t] - row.ref[t]))
        total += mean(np.array(terms), row)
    return -total


def over_tokens(rows, start, **options):
    """arXiv:2503.14476, Eq. 8."""
    count = sum(len(row.new) for row in rows)
    return plain(rows, start, mean=lambda terms, _: terms.sum() / count, **options)


def summed(rows, start, **options):
    return plain(rows, start, mean=lambda terms, _: terms.sum() / (N * G), **options)


K1 = AlgorithmConfig().model_copy(update={"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "credit"})
CASES: dict[str, Any] = {
    # arXiv:2402.03300, Eq. 3: a mean over rows of means over tokens, less the KL.
    "grpo": (AlgorithmConfig(), plain),
    "grpo, k1 in the credit": (
        K1, partial(plain, credit=partial(normalised, kl=lambda row: 0.1 * k1(row)))
    ),
    "grpo, k3 in the loss": (
        AlgorithmConfig(kl_coef=0.1), partial(plain, kl=lambda x: 0.1 * (np.exp(-x) + x - 1))
    ),
    "grpo, by the response": (
        AlgorithmConfig(aggregation="response_mean"),
        partial(plain, mean=lambda terms, row: terms.sum() / row.length / (N * G)),
    ),
    "grpo, no correction": (
        AlgorithmConfig(correction="none"), partial(plain, correct=lambda rho: 1.0)
    ),
    "grpo, truncated correction": (
        AlgorithmConfig(correction_high=1.1), partial(plain, correct=lambda rho: min(rho, 1.1))
    ),
    "grpo, masked correction": (
        AlgorithmConfig(correction="masked", correction_low=0.8, correction_high=1.3),
        partial(plain, correct=lambda rho: rho if 0.8 <= rho <= 1.3 else 0.0),
    ),
    "cispo": (
        AlgorithmConfig(kind="cispo", clip_high=0.1),
        partial(over_tokens, is_cispo=True, high=0.1),
    ),
    # arXiv:2503.20783: no std, no length; the constant is the longest response.
    "dr_grpo": (
        AlgorithmConfig(kind="dr_grpo"),
        partial(plain, credit=centred, mean=lambda terms, _: terms.sum() / LONGEST / (N * G)),
    ),
    "dapo": (AlgorithmConfig(kind="dapo"), partial(over_tokens, high=0.28)),
    "gspo": (AlgorithmConfig(kind="gspo"), partial(plain, level="sequence")),
    "reinforce_pp": (
        AlgorithmConfig(kind="reinforce_pp", kl_coef=0.1),
        partial(over_tokens, credit=whitened_return),
    ),
    "expo": (
        AlgorithmConfig(kind="expo"),
        partial(summed, credit=on_clauses),
    ),
    "expo, of all clauses to come": (
        AlgorithmConfig(kind="expo", token_credit="return_to_go"),
        partial(summed, credit=from_here_on),
    ),
}  # fmt: skip
