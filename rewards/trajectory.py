"""SQL-ASTRA's aggregated trajectory reward (ATR, paper 004, section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Literal, get_args

from rewards.config import AtrSettings

Shape = Literal["single", "flat", "rising", "falling", "rise_fall", "fall_rise", "oscillating"]
"""The course of an episode's scores (figure 2, right): one step, no change, one direction, one turn
up or down, several turns. The paper names rising, rise-then-fall and stagnation as examples."""
SHAPES: tuple[Shape, ...] = get_args(Shape)

_LEVEL = 1e-9
"""Scores that differ by less are the same."""


def aggregate(scores: Sequence[float], config: AtrSettings) -> float:
    """Sum up the scores of an episode's steps: rises earn, falls cost more, every turn costs.

    The equation is not in the paper's text; it is what all rows of its figure 2 agree with:
    clip(sum of transition(R_{t-1}, R_t) - turn_cost * (K - 1), -bound, bound), with R_0 = 0.

    Args:
        scores: One a step, each in [0, 1].
        config: The matrix and the other constants.

    Returns:
        In [-bound, bound]; 0.0 without any step.
    """
    if not scores:
        return 0.0
    before = (0.0, *scores[:-1])
    earned = sum(transition(*pair, config) for pair in zip(before, scores, strict=True))
    total = earned - config.turn_cost * (len(scores) - 1)
    return max(-config.bound, min(config.bound, total))


def shape_of(scores: Sequence[float]) -> Shape:
    """Name the course of the scores of an episode's steps, of which there is at least one."""
    if len(scores) == 1:
        return "single"
    changes = (after - before for before, after in pairwise(scores))
    rises = [rise for rise, _ in groupby(c > 0 for c in changes if abs(c) > _LEVEL)]
    if len(rises) > 2:
        return "oscillating"
    courses: dict[tuple[bool, ...], Shape] = {
        (): "flat",
        (True,): "rising",
        (False,): "falling",
        (True, False): "rise_fall",
        (False, True): "fall_rise",
    }
    return courses[tuple(rises)]


def transition(before: float, after: float, config: AtrSettings) -> float:
    """Reward one step (equation 2).

    The states `low` and `high` before and after it come from the direction of the change, or, with
    `state: threshold`, from which side of the threshold each score is on (section 2.3, 4.).

    Args:
        before: Score of the step before, 0 before the first.
        after: Score of the step.
        config: The matrix.
    """
    change = after - before
    if config.state == "threshold":
        was_high, is_high = before > config.threshold, after > config.threshold
    elif abs(change) <= _LEVEL:
        was_high = is_high = after > config.threshold
    else:
        was_high, is_high = change < 0, change > 0
    if was_high == is_high:
        return config.high_high if is_high else config.low_low
    return (config.low_high if is_high else config.high_low) * abs(change)
