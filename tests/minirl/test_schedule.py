"""PaVeRL-SQL's learning rate, and how its second stage is decided."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.config import SecondStage
from launch.second_stage import restart, rise_p_value, second_optimizer
from minirl.config import OptimizerConfig
from minirl.train.optimizer import learning_rate

CASES = json.loads((Path(__file__).parents[1] / "data" / "schedule.json").read_text())
RAMP = CASES["ramp_cosine"]


def ramp():
    return OptimizerConfig(
        learning_rate=1e-5,
        schedule="ramp_cosine",
        final_fraction=RAMP["final_fraction"],
    )


def test_flat_ramp_cosine():
    rate = learning_rate(ramp(), steps=RAMP["steps"])
    counts = jnp.array([int(count) for count in RAMP["shares"]])
    shares = np.array(jax.jit(rate)(counts)) / 1e-5
    np.testing.assert_allclose(shares, list(RAMP["shares"].values()), atol=1e-6)
    # Beyond the end it stays low.
    assert float(rate(2000)) == pytest.approx(1e-7)


@pytest.mark.parametrize("case", CASES["p_values"], ids=lambda case: case["id"])
def test_p_value_of_a_rise(case):
    # Drawn from 5000 orders: within three standard errors of the exact share.
    error = 3 * (case["p"] * (1 - case["p"]) / 5000) ** 0.5 + 1 / 5000
    assert rise_p_value(case["values"]) == pytest.approx(case["p"], abs=error)
    assert rise_p_value(case["values"]) == rise_p_value(case["values"])


@pytest.mark.parametrize("case", CASES["trends"], ids=lambda case: case["id"])
def test_trend(case):
    assert (rise_p_value(case["accuracies"]) <= 0.05) == (case["trend"] != "fluctuation")


def curve_of(identifier):
    (case,) = (case for case in CASES["trends"] if case["id"] == identifier)
    return [(20 * n, accuracy) for n, accuracy in enumerate(case["accuracies"], start=1)]


def test_after_a_rise_the_rate_is_the_maximum():
    curve = curve_of("up, then level")
    start = restart(curve, ramp(), steps=200, saved={step for step, _ in curve})
    assert (start.step, start.accuracy, start.rose) == (200, 0.72, True)
    assert start.learning_rate == 1e-5


def test_after_fluctuation_the_rate_is_half_of_the_best_checkpoints():
    curve = curve_of("up and down")
    start = restart(curve, ramp(), steps=200, saved={step for step, _ in curve})
    assert (start.step, start.rose) == (120, False)
    # The update that made it: 119 of 200 steps, of which 20 of warm-up.
    share = 0.01 + 0.99 * (1 + np.cos(np.pi * (119 - 20) / 180)) / 2
    assert start.learning_rate == pytest.approx(1e-5 * share / 2, rel=1e-5)


@pytest.mark.parametrize(("saved", "step"), [({2, 4, 6}, 6), ({2, 4}, 4), ({2}, 2)])
def test_the_best_checkpoint_is_started_from_of_equals_the_newest(saved, step):
    curve = [(2, 0.5), (4, 0.75), (6, 0.75), (8, 0.9)]
    assert restart(curve, ramp(), steps=8, saved=saved).step == step


def test_the_second_cosine_starts_at_once():
    curve = curve_of("up, then level")
    start = restart(curve, ramp(), steps=200, saved={200})
    config = second_optimizer(ramp(), SecondStage(steps=100), start)
    rate = learning_rate(config, steps=100)
    # From the maximum to a tenth of it.
    np.testing.assert_allclose(
        [float(rate(count)) for count in (0, 50, 100)], [1e-5, 0.55e-5, 0.1e-5], rtol=1e-5
    )
