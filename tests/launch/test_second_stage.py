"""How PaVeRL-SQL's second stage is decided, and that it begins so."""

from typing import Any

import jax
import numpy as np
import pytest

from launch.config import CourseConfig, SecondStage
from launch.job import restart, rise_p_value, train_second_stage
from minirl.config import OptimizerConfig
from minirl.train.optimizer import learning_rate
from tests.minirl import toy
from tests.minirl.toy import copied
from tests.plain_model import assert_same
from tests.vectors import read

CASES = read("schedule")


def ramp():
    last = CASES["ramp_cosine"]["final_fraction"]
    return OptimizerConfig(learning_rate=1e-5, schedule="ramp_cosine", final_fraction=last)


def course(steps: int, *, every: int) -> CourseConfig:
    return CourseConfig(steps=steps, checkpoint_every=every, optimizer=ramp())


@pytest.mark.parametrize("case", CASES["p_values"], ids=lambda case: case["id"])
def test_p_value_of_a_rise(case):
    # Drawn from 5000 orders: within three standard errors of the exact share.
    error = 3 * (case["p"] * (1 - case["p"]) / 5000) ** 0.5 + 1 / 5000
    found = rise_p_value(case["values"])
    assert found == rise_p_value(case["values"]) == pytest.approx(case["p"], abs=error)


@pytest.mark.parametrize("case", CASES["trends"], ids=lambda case: case["id"])
def test_trend(case):
    assert (rise_p_value(case["accuracies"]) <= 0.05) == (case["trend"] != "fluctuation")


def curve_of(identifier):
    (case,) = (case for case in CASES["trends"] if case["id"] == identifier)
    return [(20 * n, accuracy) for n, accuracy in enumerate(case["accuracies"], start=1)]


def test_the_rate_is_the_maximum_after_a_rise_else_half_of_the_best_checkpoints():
    start = restart(curve_of("up, then level"), course(200, every=20), SecondStage())
    assert (start.step, start.accuracy, start.rose) == (200, 0.72, True)
    # The cosine starts at once, from the maximum to a tenth of it.
    rate = learning_rate(start.optimizer, steps=100)
    np.testing.assert_allclose(
        [float(rate(count)) for count in (0, 50, 100)], [1e-5, 0.55e-5, 0.1e-5], rtol=1e-5
    )
    start = restart(curve_of("up and down"), course(200, every=20), SecondStage())
    assert (start.step, start.rose) == (120, False)
    # The update that made it: 119 of 200 steps, of which 20 of warm-up.
    share = 0.01 + 0.99 * (1 + np.cos(np.pi * (119 - 20) / 180)) / 2
    assert start.optimizer.learning_rate == pytest.approx(1e-5 * share / 2, rel=1e-5)


@pytest.mark.parametrize(("every", "step"), [(2, 6), (3, 6), (4, 4), (7, 7)])
def test_the_best_checkpoint_is_started_from_of_equals_the_newest(every, step):
    """Step 5 has none, and what follows the last step is the second stage's."""
    curve = [(2, 0.5), (4, 0.75), (5, 0.8), (6, 0.75), (7, 0.25), (8, 0.9)]
    assert restart(curve, course(7, every=every), SecondStage()).step == step


@pytest.mark.parametrize("average", [None, 0.5])
def test_the_second_stage_starts_from_the_best_weights(tmp_path, monkeypatch, average):
    """The first stage fluctuates; its best checkpoint is the second of three. What is measured is
    the average, if one is kept, and what is sampled with are the weights.
    """
    weights, sampled, counts = {}, {}, []
    accuracy = {1: 0.25, 2: 0.75, 3: 0.5, 4: 0.5, 5: 0.75}
    changes: dict[str, Any] = {"steps": 3, "eval_every": 1, "checkpoint_every": 1}
    changes["average"] = average

    def validate(params, version):
        weights[version] = copied(params)
        return accuracy[version]

    trainer = toy.trainer(tmp_path, validate=validate, **changes)
    settings = {**dict(toy.TRAIN), **changes}
    course = CourseConfig(**settings, second_stage=SecondStage(steps=2))
    set_weights, init = trainer._sampler.set_weights, trainer._learner.init

    def spy(params, *, version):
        sampled[version] = copied(params)
        set_weights(params, version=version)

    def init_alone(params, **options):
        # No two optimizer states, nor two copies of the weights, are there at once.
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trainer._state))
        return init(params, **options)

    def counted(*_):
        leaves = jax.tree.leaves(trainer._state.opt_state.inner_state)
        counts.append({int(leaf) for leaf in leaves if leaf.ndim == 0})

    monkeypatch.setattr(trainer._sampler, "set_weights", spy)
    monkeypatch.setattr(trainer._learner, "init", init_alone)
    trainer.run(counted)
    start = train_second_stage(trainer, course, counted)
    # Adam's state is fresh.
    assert counts == [{1}, {2}, {3}, {1}, {2}]
    if average is None:
        assert_same(sampled[2], weights[2])
    # After the first stage's third update come the weights of its second.
    assert_same(sampled[3], weights[2])
    assert start is not None
    assert (start.step, start.rose) == (2, False)
    # The rate is constant here, and half of it remains.
    assert start.optimizer.learning_rate == toy.SMOOTH.learning_rate / 2
    # The best of both stages, of equals the newest.
    assert trainer.use_best() == 5
    assert_same(trainer.params, weights[5])
