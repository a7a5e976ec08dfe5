"""How a second stage of training begins (PaVeRL-SQL, section III-C).

It starts from the best checkpoint of the first stage, at a rate that depends on whether the first
stage's accuracy rose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import permutation_test

from minirl.config import OptimizerConfig, SecondStage
from minirl.train.optimizer import learning_rate

# Orders that the test of a rise compares with; where there are fewer, all of them.
_PERMUTATIONS = 5000

# (updates done, greedy accuracy) of each evaluation
Curve = Sequence[tuple[int, float]]
Trend = Literal["rising", "plateau", "fluctuation"]


@dataclass(frozen=True, slots=True)
class Restart:
    """How the second stage begins.

    Attributes:
        step: The checkpoint that it starts from.
        accuracy: That checkpoint's.
        trend: What the first stage's curve shows.
        p_value: Of the test that the curve rose.
        tail_p_value: Of the same test on the curve's second half.
        learning_rate: The rate that the second cosine starts from.
    """

    step: int
    accuracy: float
    trend: Trend
    p_value: float
    tail_p_value: float
    learning_rate: float

    def numbers(self) -> dict[str, float]:
        """Return it as metrics."""
        return {
            "stage/restart_step": float(self.step),
            "stage/restart_accuracy": self.accuracy,
            "stage/rose": float(self.trend != "fluctuation"),
            "stage/plateau": float(self.trend == "plateau"),
            "stage/rise_p_value": self.p_value,
            "stage/tail_p_value": self.tail_p_value,
            "stage/start_learning_rate": self.learning_rate,
        }

    def __str__(self) -> str:
        verdict = {
            "rising": "the accuracy rose and still rises: the maximal rate",
            "plateau": "the accuracy rose to a plateau: the maximal rate",
            "fluctuation": "the accuracy shows no rise: half of the checkpoint's rate",
        }
        return (
            f"second stage from step {self.step} (accuracy {self.accuracy:.3f}); "
            f"{verdict[self.trend]}, {self.learning_rate:.2e} (p = {self.p_value:.4f})"
        )


def restart(
    curve: Curve,
    optimizer: OptimizerConfig,
    *,
    steps: int,
    saved: Collection[int],
    alpha: float = 0.05,
) -> Restart:
    """Decide how the second stage begins, from the first stage alone.

    It starts at the maximal rate if the accuracy rose, else at half of the rate that the best
    checkpoint's update had (PaVeRL-SQL, section III-C).

    Args:
        curve: Greedy accuracies of the first stage, at least one.
        optimizer: The first stage's.
        steps: Its length.
        saved: Steps that have a checkpoint, at least one of the curve.
        alpha: Level of the test for a rise.

    Note:
        The paper does not say what follows on an accuracy that still rises: the maximal rate too.
    """
    step, accuracy = best_checkpoint([point for point in curve if point[0] in saved])
    found, p_value, tail_p_value = trend([value for _, value in curve], alpha=alpha)
    rate = optimizer.learning_rate
    if found == "fluctuation":
        rate = float(learning_rate(optimizer, steps=steps)(step - 1)) / 2
    return Restart(step, accuracy, found, p_value, tail_p_value, rate)


def second_optimizer(
    optimizer: OptimizerConfig, stage: SecondStage, start: Restart
) -> OptimizerConfig:
    """Return the optimizer of the second stage: a cosine from the start rate, without warm-up."""
    return optimizer.model_copy(
        update={
            "learning_rate": start.learning_rate,
            "schedule": "cosine",
            "warmup_steps": 0,
            "lr_ramp": "continuous",
            "final_fraction": stage.final_fraction,
        }
    )


def best_checkpoint(curve: Curve) -> tuple[int, float]:
    """Return step and accuracy of the most accurate checkpoint, of equals the newest."""
    return max(curve, key=lambda point: (point[1], point[0]))


def trend(accuracies: Sequence[float], *, alpha: float = 0.05) -> tuple[Trend, float, float]:
    """Tell a curve that rose from one that only fluctuates.

    The curve rose where `rise_p_value` of all of it is at most alpha; it then still rises where the
    same holds for its second half alone, and is on a plateau otherwise.

    Args:
        accuracies: In the order of evaluation.
        alpha: Level of both tests.

    Returns:
        The verdict, and both p-values. Fewer than four accuracies cannot be told from
        fluctuation at the usual level: 3 can be ordered in 6 ways.
    """
    p_value = rise_p_value(accuracies)
    tail_p_value = rise_p_value(accuracies[len(accuracies) // 2 :])
    if p_value > alpha:
        return "fluctuation", p_value, tail_p_value
    return ("rising" if tail_p_value <= alpha else "plateau"), p_value, tail_p_value


def rise_p_value(accuracies: Sequence[float]) -> float:
    """Test a curve for a rise, of whatever shape, against an order by chance.

    Bartholomew's test for ordered alternatives (Biometrika 46, 1959): the share of the curve's
    variance that the best non-decreasing curve explains, compared with that of its permutations.
    A rise that ends early and is followed by a long plateau counts as one, which tests of a
    correlation with time (Mann-Kendall, a slope) miss.

    Args:
        accuracies: In the order of evaluation.

    Returns:
        The p-value, in (0, 1]: exact for up to 6 accuracies, else of permutations drawn with a
        fixed seed. 1.0 for a curve that is constant, or shorter than two.
    """
    values = np.asarray(accuracies, np.float64)
    if len(values) < 2 or np.ptp(values) == 0:
        return 1.0
    variance = np.square(values - values.mean()).sum()

    def explained(order: np.ndarray) -> float:
        levels = isotonic_regression(order).x
        # Sums in another order differ in their last digits.
        return round(float(np.square(levels - values.mean()).sum() / variance), 9)

    found = permutation_test(
        (values,),
        explained,
        permutation_type="pairings",
        n_resamples=_PERMUTATIONS,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)
