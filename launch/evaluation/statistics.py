"""How sure one can be of a number: intervals, paired tests, pass@k.

Wilson's interval stands here: SciPy's takes whole counts alone, and importing `scipy.stats` takes
longer than judging a file of predictions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 10_000
"""As in EXPO-SQL (section 6.7)."""

LEAST_DATABASES = 3
"""Of fewer there is no interval over databases."""

_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Paired:
    """Two runs on the same questions, the second less the first.

    Attributes:
        difference: Of the means, with its 95 % interval over questions.
        p: Two-sided: McNemar's exact test of rates, the bootstrap's of other scores.
        only_first, only_second: Questions that one run alone has right; None unless all scores are
            0 or 1.
        ci95_databases: The difference's 95 % interval over databases; None where there is none.
        means: Of the first and of the second run.
        questions: How many both have.
    """

    difference: float
    ci95: tuple[float, float]
    p: float
    only_first: int | None
    only_second: int | None
    ci95_databases: tuple[float, float] | None
    means: tuple[float, float]
    questions: int


def _bootstrap(values: Sequence[float], *, seed: int) -> np.ndarray:
    """Return the means of resamples of questions, drawn with replacement."""
    import numpy as np
    from scipy.stats import bootstrap

    rng = np.random.default_rng(seed)
    # Resamples are made so many at a time: they are large together.
    found = bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, batch=100, method="percentile", rng=rng
    )
    return found.bootstrap_distribution


def mean_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of a mean over independent questions.

    Of a rate (all values are 0 or 1) it is Wilson's score interval: 3 of 3 right are [0.44, 1]. Of
    other values it is the percentile bootstrap's; where all of them are one value in [0, 1] there
    is nothing to draw from, and it is Wilson's with that value for the rate.
    """
    kinds = set(values)
    if not kinds:
        raise ValueError("no question to draw")
    if kinds <= {0, 1} or (len(kinds) == 1 and 0 <= values[0] <= 1):
        return wilson(math.fsum(values) / len(values), len(values))
    if len(kinds) == 1:
        return values[0], values[0]
    return _percentiles(_bootstrap(values, seed=seed))


def database_interval(
    values: Sequence[float], databases: Sequence[str], *, seed: int = 0
) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over databases, given the database of each question.

    The percentile cluster bootstrap: databases are drawn with replacement, each with all of its
    questions, as many as there are (Field and Welsh, JRSS B 69, 2007). There is no interval of
    fewer than `LEAST_DATABASES`, nor where all have one mean, with nothing to draw from.

    Note:
        Of few databases it is too narrow: docs/evaluation.md.
    """
    parts = defaultdict[str, list[float]](list)
    for name, value in zip(databases, values, strict=True):
        parts[name].append(value)
    means = {math.fsum(each) / len(each) for each in parts.values()}
    if len(parts) < LEAST_DATABASES or len(means) == 1:
        return None
    import numpy as np

    sums, sizes = np.array([[math.fsum(each), len(each)] for each in parts.values()]).T
    chances = [1 / len(parts)] * len(parts)
    drawn = np.random.default_rng(seed).multinomial(len(parts), chances, size=RESAMPLES)
    return _percentiles((drawn @ sums) / (drawn @ sizes))


def wilson(rate: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a rate of so many questions (Wilson 1927)."""
    middle = rate + _Z**2 / (2 * count)
    half = _Z * math.sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    # At rates of 0 and 1 one side is exact.
    low = 0.0 if rate == 0 else (middle - half) / scale
    return low, 1.0 if rate == 1 else (middle + half) / scale


def paired_difference(
    first: Sequence[float], second: Sequence[float], databases: Sequence[str] = ()
) -> Paired:
    """Compare two runs on the same questions; given their databases, over these too.

    The interval is the percentile bootstrap's of the differences (where these are all alike,
    Wilson's carried over from [0, 1] to [-1, 1], and of runs that agree that of the share which
    differs). Rates (all scores are 0 or 1) have McNemar's
    exact p-value. Other scores have that of EXPO-SQL's paired bootstrap (section 6.7), which does
    not say how it counts: here twice the share of resampled differences on the side of zero that
    has fewer, a zero included, with `(count + 1) / (10,000 + 1)` for a share. It is never below
    2^(1 - m), the least that m differing questions can show.

    Raises:
        ValueError: There is no question, or the runs have different numbers of them.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    if not differences:
        raise ValueError("no question to compare")
    mean, count = math.fsum(differences) / len(differences), len(differences)
    counts: tuple[int | None, int | None] = (None, None)
    ci95, p = _bootstrapped(differences)
    if {*first, *second} <= {0, 1}:
        counts = (differences.count(-1), differences.count(1))
        p = _mcnemar(*counts)
    over = database_interval(differences, databases) if databases else None
    means = (math.fsum(first) / count, math.fsum(second) / count)
    return Paired(mean, ci95, p, *counts, over, means, count)


def _bootstrapped(differences: Sequence[float]) -> tuple[tuple[float, float], float]:
    """Return the interval and the p-value of the mean of differences."""
    if len({*differences}) == 1:  # nothing to draw from
        same, count = differences[0], len(differences)
        p = min(1.0, max(2 / (RESAMPLES + 1), 2.0 ** (1 - count)))
        if same == 0:
            _, most = wilson(0, count)  # of the questions differ
            return (-most, most), 1.0
        if abs(same) > 1:
            return (same, same), p
        low, high = wilson((1 + same) / 2, count)
        return (2 * low - 1, 2 * high - 1), p
    means = _bootstrap(differences, seed=0)
    fewest = min(int((means <= 0).sum()), int((means >= 0).sum()))
    differing = sum(difference != 0 for difference in differences)
    p = min(1.0, max(2 * (fewest + 1) / (RESAMPLES + 1), 2.0 ** (1 - differing)))
    return _percentiles(means), p


def _mcnemar(only_first: int, only_second: int) -> float:
    """Test exactly whether a question that one run alone has right is as likely to be either's."""
    from scipy.stats import binomtest

    count = only_first + only_second
    return float(binomtest(only_first, count, 0.5).pvalue) if count else 1.0


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Estimate the chance that one of k samples is right, without bias (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: There are fewer samples than k.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def _percentiles(means: np.ndarray) -> tuple[float, float]:
    import numpy as np

    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
