"""Tests of claims: paired differences over questions and seeds, corrected for their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
MINIMUM_GAIN = 0.01
"""The least gain that counts (docs/claims.md)."""
LEVEL = 0.05

Verdicts = Mapping[int, Sequence[bool]]
"""Whether each question as it was generated was right, by seed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says: one arm is better than another."""

    source: str
    better: str
    worse: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference of accuracy, its 95 % interval, and the two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, slots=True)
class TestResult:
    """A claim, what the runs say of it, and the p-value corrected for all claims."""

    claim: Claim
    difference: Difference
    corrected: float
    verdict: str


def test_claims(claims: Sequence[Claim], right: Mapping[str, Verdicts]) -> list[TestResult]:
    """Test every claim whose two sides have seeds in common; `right` by the name of a side."""
    differences: list[tuple[Claim, Difference]] = []
    for claim in claims:
        better, worse = right.get(claim.better, {}), right.get(claim.worse, {})
        seeds = sorted(better.keys() & worse.keys())
        if seeds:
            one, other = (
                np.array([side[seed] for seed in seeds], float) for side in (better, worse)
            )
            differences.append((claim, crossed_bootstrap(one - other)))
    corrected = holm([difference.p for _, difference in differences])
    return [
        TestResult(claim, difference, p, verdict(difference, p))
        for (claim, difference), p in zip(differences, corrected, strict=True)
    ]


def crossed_bootstrap(differences: np.ndarray, *, seed: int = 0) -> Difference:
    """Resample seeds and questions, both with replacement, of differences [seeds, questions].

    Of verdicts in place of differences, the interval is that of an accuracy.

    A resample has the same questions for each of its seeds, as the runs have. The p-value is twice
    the share of resampled means on the side of zero that has fewer, a zero included.
    """
    rng = np.random.default_rng(seed)
    seeds, questions = differences.shape
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    by_question = rng.multinomial(questions, np.full(questions, 1 / questions), RESAMPLES)
    means = ((by_seed @ differences) * (by_question / questions)).sum(axis=1)
    fewest = min(int((means <= 0).sum()), int((means >= 0).sum()))
    low, high = np.percentile(means, [2.5, 97.5])
    p = min(1.0, 2 * (fewest + 1) / (RESAMPLES + 1))
    return Difference(float(differences.mean()), float(low), float(high), p)


def holm(values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979)."""
    corrected, highest = [0.0] * len(values), 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, values[number] * (len(values) - rank)))
        corrected[number] = highest
    return corrected


def verdict(difference: Difference, corrected: float) -> str:
    """Classify a difference as confirmed, refuted or undecided, as docs/claims.md has it."""
    if corrected < LEVEL and difference.mean > 0:
        return "confirmed"
    if difference.high < MINIMUM_GAIN:
        return "refuted"
    return "undecided"
