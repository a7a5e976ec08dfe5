"""How sure one can be of a number: intervals, paired tests, pass@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
"""As in EXPO-SQL (paper 001, section 6.7)."""


@dataclass(frozen=True, slots=True)
class Paired:
    """What two runs on the same questions say of each other.

    Attributes:
        difference: Mean of the second run less that of the first.
        ci95: Its 95 % percentile bootstrap interval.
        p: Two-sided p-value of the bootstrap; never below 2 / (resamples + 1).
    """

    difference: float
    ci95: tuple[float, float]
    p: float


@dataclass(frozen=True, slots=True)
class McNemar:
    """Questions on which two runs differ.

    Attributes:
        only_first: Right in the first run alone.
        only_second: Right in the second run alone.
        p: Two-sided p-value of the exact test.
    """

    only_first: int
    only_second: int
    p: float


def bootstrap_means(values: Sequence[float], *, resamples: int, seed: int) -> np.ndarray:
    """Return the means of resamples of questions, drawn with replacement.

    Raises:
        ValueError: There is no question.
    """
    if not values:
        raise ValueError("no question to draw")
    # Questions with equal scores are alike: how often each score is drawn is all that counts. In
    # the order of first sight, so that opposite scores have opposite means.
    counts = Counter(values)
    shares = np.array(list(counts.values())) / len(values)
    drawn = np.random.default_rng(seed).multinomial(len(values), shares, size=resamples)
    return drawn @ np.array(list(counts), np.float64) / len(values)


def bootstrap_interval(
    values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a mean over questions.

    Raises:
        ValueError: There is no question.
    """
    return _interval(bootstrap_means(values, resamples=resamples, seed=seed))


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Paired:
    """Test the difference of two runs by resampling questions, both scores of each together.

    The test of EXPO-SQL (paper 001, section 6.7), which does not say how it counts: here the share
    of resampled differences on the other side of zero or on it, of the side that has fewer, times
    two. With `(count + 1) / (resamples + 1)` for a share no p-value is 0. The one-sided p-value of
    Koehn (2004) is half of it.

    Args:
        first: Scores by question.
        second: Scores of the same questions in the same order.
        resamples: Number of resamples.
        seed: Of the resamples.

    Raises:
        ValueError: There is no question, or the runs have different numbers of them.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    means = bootstrap_means(differences, resamples=resamples, seed=seed)
    fewest = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * (fewest + 1) / (resamples + 1))
    return Paired(math.fsum(differences) / len(differences), _interval(means), p)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Count the questions that only one of two runs gets right, and test the counts.

    The exact test: under the null hypothesis the smaller count is binomial with probability 1/2.

    Raises:
        ValueError: The runs have different numbers of questions.
    """
    pairs = list(zip(first, second, strict=True))
    only_first = sum(a and not b for a, b in pairs)
    only_second = sum(b and not a for a, b in pairs)
    n, k = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    # Whole numbers until the end: 2**n has no float from 1024 questions on.
    return McNemar(only_first, only_second, min(1.0, (2 * tail) / (1 << n)))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Estimate the chance that one of k samples is right, without bias (Chen et al. 2021, eq. 1).

    With k = samples this is OmniSQL's pass@k: any sample is right.

    Args:
        correct: Samples that are right.
        samples: All samples of the question.
        k: From 1 to `samples`.

    Raises:
        ValueError: There are fewer samples than k.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def _interval(means: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
