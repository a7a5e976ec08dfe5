"""The objectives of the papers, written out plainly: loops over rows and tokens in NumPy.

They share nothing with the package but its settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minirl.config import (
    Cispo,
    Dapo,
    DrGrpo,
    Expo,
    Grpo,
    Gspo,
    ReinforcePlusPlus,
)
from minirl.config.algorithms import KlEstimator, KlPlace

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


def kl_settings(estimator, place):
    """Return settings with a KL, of which some contradict each other: k1 has no use in a loss."""
    return Grpo().model_copy(update={"kl_coef": 0.1, "kl_estimator": estimator, "kl_in": place})


def k1(row):
    return row.sampler - row.ref


def by_group(rows, rewards, rule):
    """Return an advantage a row from a rule on (rewards of its group, its place)."""
    return [rule(rewards[b - b % G : b - b % G + G], b % G) for b in range(len(rows))]


def normalised(rewards, g):
    return (rewards[g] - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)


def surrogate(ratio, advantage, *, low=0.2, high=0.2):
    """Return PPO's term of one token, by cases."""
    if advantage >= 0:
        return min(ratio, 1 + high) * advantage
    return max(ratio, 1 - low) * advantage


def truncated(rho):
    """Return the default correction of a ratio of learner and sampler."""
    return min(rho, 2.0)


def token_terms(row, advantage, *, correct=truncated, **bounds):
    pairs = zip(np.exp(row.new - row.old), np.exp(row.old - row.sampler), advantage, strict=True)
    return [correct(rho) * surrogate(ratio, own, **bounds) for ratio, rho, own in pairs]


def sequence_weight(row):
    return truncated(np.exp(np.mean(row.old - row.sampler)))


def all_tokens(row, advantage):
    return [advantage] * len(row.new)


def plain_grpo(rows, start, *, kl=None, by_response=False):
    """arXiv:2402.03300, Eq. 3: a mean over rows of means over tokens, less the KL."""
    total = 0.0
    advantages = by_group(rows, [row.reward for row in rows], normalised)
    for row, advantage in zip(rows, advantages, strict=True):
        terms = np.array(token_terms(row, all_tokens(row, advantage)))
        if kl is not None:
            terms = terms - kl(row.new - row.ref)
        total += terms.sum() / (row.length if by_response else len(terms)) / len(rows)
    return -total


def by_token(rows, credit, *, over_tokens=False, **bounds):
    """Return the loss of an advantage of each token: summed, a mean over rows, or over tokens."""
    pairs = zip(rows, credit, strict=True)
    terms = [term for row, own in pairs for term in token_terms(row, own, **bounds)]
    return -sum(terms) / (len(terms) if over_tokens else len(rows))


def plain_dr_grpo(rows, start):
    """arXiv:2503.20783: no std, no length; the constant is the longest response."""
    advantages = by_group(rows, [row.reward for row in rows], lambda r, g: r[g] - np.mean(r))
    return by_token(rows, map(all_tokens, rows, advantages)) / LONGEST


def plain_dapo(rows, start):
    """arXiv:2503.14476, Eqs. 8 and 10."""
    advantages = by_group(rows, [row.reward for row in rows], normalised)
    return by_token(rows, map(all_tokens, rows, advantages), over_tokens=True, high=0.28)


def plain_gspo(rows, start):
    """arXiv:2507.18071, Eqs. 5 to 7."""
    total = 0.0
    advantages = by_group(rows, [row.reward for row in rows], normalised)
    for row, advantage in zip(rows, advantages, strict=True):
        term = surrogate(np.exp(np.mean(row.new - row.old)), advantage)
        total += sequence_weight(row) * term / len(rows)
    return -total


def plain_cispo(rows, start):
    """arXiv:2506.13585, Eq. 4: no gradient flows through the clipped ratio (here 1.1 at most)."""
    terms = []
    advantages = by_group(rows, [row.reward for row in rows], normalised)
    for row, at, advantage in zip(rows, start, advantages, strict=True):
        for t, new in enumerate(row.new):
            ratio = min(np.exp(at.new[t] - row.old[t]), 1.1)
            terms.append(truncated(np.exp(row.old[t] - row.sampler[t])) * ratio * advantage * new)
    return -np.mean(terms)


def on_clauses(row, *, beta):
    """EXPO-SQL, Eq. 4: r_c - beta k1 on each token of a clause."""
    return np.where(row.is_covered, row.credit - beta * k1(row), 0.0)


def whitened(credit):
    flat = [value for row in credit for value in row]
    return [(np.array(row) - np.mean(flat)) / (np.std(flat, ddof=1) + 1e-6) for row in credit]


def plain_reinforce_pp(rows, start):
    """arXiv:2501.03262: the return less the KL from the token on, whitened over the batch."""
    credit = [[row.reward - 0.1 * sum(k1(row)[t:]) for t in range(len(row.new))] for row in rows]
    return by_token(rows, whitened(credit), over_tokens=True)


def plain_expo(rows, start):
    return by_token(rows, [on_clauses(row, beta=0.01) for row in rows])


def by_token_rule(rule):
    """Return GRPO with a rule on p of the learner / p of the sampler of each token."""

    def plain(rows, start):
        total = 0.0
        advantages = by_group(rows, [row.reward for row in rows], normalised)
        for row, advantage in zip(rows, advantages, strict=True):
            total += np.mean(token_terms(row, all_tokens(row, advantage), correct=rule)) / len(rows)
        return -total

    return plain


KL: dict[KlEstimator, Any] = {
    "k1": lambda x: x,
    "k3": lambda x: np.exp(-x) + x - 1,
}


def plain_kl_in_credit(rows, start, kl):
    """GRPO's advantages, with the KL of each token taken from its credit."""
    advantages = by_group(rows, [row.reward for row in rows], normalised)
    pairs = zip(rows, advantages, strict=True)
    means = [np.mean(token_terms(row, one - 0.1 * kl(k1(row)))) for row, one in pairs]
    return -np.mean(means)


def plain_kl_in_loss(rows, start, kl):
    return plain_grpo(rows, start, kl=lambda x: 0.1 * kl(x))


PLACES: dict[KlPlace, Any] = {
    "loss": plain_kl_in_loss,
    "credit": plain_kl_in_credit,
}


def kl_cases():
    """Yield every estimator, and every place."""
    pairs: tuple[tuple[KlEstimator, KlPlace], ...] = (("k1", "credit"), ("k3", "loss"))
    for estimator, place in pairs:
        case = kl_settings(estimator, place), partial(PLACES[place], kl=KL[estimator])
        yield f"grpo, {estimator} in the {place}", case


CASES = {
    "grpo": (Grpo(), plain_grpo),
    **dict(kl_cases()),
    "grpo, by the response": (
        Grpo(aggregation="response_mean"),
        lambda rows, start: plain_grpo(rows, start, by_response=True),
    ),
    "grpo, no correction": (Grpo(correction="none"), by_token_rule(lambda rho: 1.0)),
    "grpo, truncated correction": (
        Grpo(correction_high=1.1),
        by_token_rule(lambda rho: min(rho, 1.1)),
    ),
    "grpo, masked correction": (
        Grpo(correction="masked", correction_low=0.8, correction_high=1.3),
        by_token_rule(lambda rho: rho if 0.8 <= rho <= 1.3 else 0.0),
    ),
    "cispo": (Cispo(clip_high=0.1), plain_cispo),
    "dr_grpo": (DrGrpo(), plain_dr_grpo),
    "dapo": (Dapo(), plain_dapo),
    "gspo": (Gspo(), plain_gspo),
    "reinforce_pp": (ReinforcePlusPlus(kl_coef=0.1), plain_reinforce_pp),
    "expo": (Expo(), plain_expo),
}
