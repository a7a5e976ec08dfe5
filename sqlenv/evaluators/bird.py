"""BIRD's soft F1.

Source: bird-bench/mini_dev, evaluation/evaluation_f1.py, at 4d970a9a97b1.
"""

from __future__ import annotations

from sqlenv.types import Row, Table


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
