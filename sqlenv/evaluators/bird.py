"""BIRD's scores that are more than right or wrong: soft F1 and the reward of R-VES.

Source: bird-bench/mini_dev, evaluation/evaluation_f1.py and evaluation_ves.py, at 4d970a9a97b1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlenv.types import Row, Table

_BINS = ((2.0, 1.25), (1.0, 1.0), (0.5, 0.75), (0.25, 0.5), (0.0, 0.25))
"""The least ratio of times, and the reward from there on."""


def soft_f1(predicted: Table, gold: Table) -> float:
    """Score the cells that two results share, row by row.

    Duplicate rows go first; then the first row stands beside the first, and so on. A row pair
    counts, as shares of the gold row's width, predicted cells that the gold row has, that it has
    not, and gold cells that the predicted row has not; a row without partner counts 1. Two empty
    results score 1.
    """
    found, wanted = list(dict.fromkeys(predicted.rows)), list(dict.fromkeys(gold.rows))
    if not found and not wanted:
        return 1.0
    shares = [_shares(*pair) for pair in zip(found, wanted, strict=False)]
    both = sum(share[0] for share in shares)
    extra = sum(share[1] for share in shares) + max(0, len(found) - len(wanted))
    missing = sum(share[2] for share in shares) + max(0, len(wanted) - len(found))
    precision = both / (both + extra) if both + extra else 0.0
    recall = both / (both + missing) if both + missing else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _shares(found: Row, wanted: Row) -> tuple[float, float, float]:
    both = sum(value in wanted for value in found)
    missing = sum(value not in found for value in wanted)
    return both / len(wanted), (len(found) - both) / len(wanted), missing / len(wanted)


def ves_reward(ratios: Sequence[float]) -> float:
    """Reward the speed of a query that is right, by its ratios: time of the gold over its own.

    By their mean within three standard deviations: 1.25 from 2, 1 from 1, 0.75 from 1/2, 0.5 from
    1/4, else 0.25. 0 where no ratio lies strictly within: all equal.
    """
    middle = _mean(ratios)
    deviation = math.sqrt(_mean([(ratio - middle) ** 2 for ratio in ratios]))
    kept = [ratio for ratio in ratios if abs(ratio - middle) < 3 * deviation]
    if not kept or not (ratio := _mean(kept)):
        return 0.0
    return next(reward for least, reward in _BINS if ratio >= least)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
