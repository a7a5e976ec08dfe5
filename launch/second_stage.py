"""How a second stage of training begins (PaVeRL-SQL, section III-C).

It starts from the best checkpoint of the first stage, at a rate that depends on whether the first
stage's accuracy rose.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import permutation_test

from launch.config import CourseConfig, SecondStage
from minirl.config import OptimizerConfig
from minirl.train.optimizer import learning_rate
from minirl.train.trainer import Trainer
from minirl.types import Progress

_log = logging.getLogger(__name__)

# Orders that the test of a rise compares with; where there are fewer, all of them.
_PERMUTATIONS = 5000

# (updates done, greedy accuracy) of each evaluation
Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Restart:
    """How the second stage begins: from which checkpoint, of which accuracy; whether the first
    stage's accuracy rose, by which p-value; and the rate that the second cosine starts from.
    """

    step: int
    accuracy: float
    rose: bool
    p_value: float
    learning_rate: float

    def __str__(self) -> str:
        verdict = "a rise: the maximal" if self.rose else "no rise: half of the checkpoint's"
        return (
            f"second stage from step {self.step} (accuracy {self.accuracy:.3f}); the accuracies "
            f"show {verdict} rate, {self.learning_rate:.2e} (p = {self.p_value:.4f})"
        )


def train(trainer: Trainer, config: CourseConfig, progress: Progress) -> Restart | None:
    """Train a course's second stage, if it has one, or what is left; return how it began."""
    first, stage = config.steps, config.second_stage
    if stage is None:
        return None
    # Resumed, it is decided again, by the same accuracies.
    start = restart(
        [point for point in trainer.curve if point[0] <= first],
        config.optimizer,
        steps=first,
        saved={*range(0, first, config.checkpoint_every), first},
        alpha=stage.alpha,
    )
    _log.info("%s", start)
    optimizer = second_optimizer(config.optimizer, stage, start)
    trainer.begin_stage(optimizer, first=first, steps=config.second_steps, start=start.step)
    trainer.run(progress)
    return start


def restart(
    curve: Curve,
    optimizer: OptimizerConfig,
    *,
    steps: int,
    saved: Collection[int],
    alpha: float = 0.05,
) -> Restart:
    """Decide how the second stage begins, from the first stage's evaluations and saved steps.

    It starts from the most accurate checkpoint, of equals the newest; at the maximal rate if the
    accuracy rose (`rise_p_value` at most alpha; fewer than four accuracies never show it at the
    usual level), else at half of the rate that the checkpoint's update had.

    Note:
        The paper tells a plateau from fluctuation, and not what follows on an accuracy that still
        rises: the maximal rate too.
    """
    points = [point for point in curve if point[0] in saved]
    step, accuracy = max(points, key=lambda point: (point[1], point[0]))
    p_value = rise_p_value([value for _, value in curve])
    rose, rate = p_value <= alpha, optimizer.learning_rate
    if not rose:
        rate = float(learning_rate(optimizer, steps=steps)(step - 1)) / 2
    return Restart(step, accuracy, rose, p_value, rate)


def second_optimizer(
    optimizer: OptimizerConfig, stage: SecondStage, start: Restart
) -> OptimizerConfig:
    """Return the optimizer of the second stage: a cosine from the start rate, without warm-up."""
    return optimizer.model_copy(
        update={
            "learning_rate": start.learning_rate,
            "schedule": "cosine",
            "warmup_steps": 0,
            "final_fraction": stage.final_fraction,
        }
    )


def rise_p_value(accuracies: Sequence[float]) -> float:
    """Test a curve for a rise, of whatever shape, against an order by chance.

    Bartholomew's test for ordered alternatives (Biometrika 46, 1959): the share of the curve's
    variance that the best non-decreasing curve explains, compared with that of its permutations.
    A rise that ends early and is followed by a long plateau counts as one, which tests of a
    correlation with time (Mann-Kendall, a slope) miss. The p-value is exact for up to 6 accuracies,
    and 1.0 for a curve that is constant, or shorter than two.
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
