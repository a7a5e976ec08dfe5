"""How far each optimizer moves a weight: learning rates, clipping, decay, Muon's rotations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minirl.config import OptimizerConfig
from minirl.model.sharding import MATRICES, param_path
from minirl.train.optimizer import learning_rate, make_optimizer

RAMP = json.loads((Path(__file__).parents[1] / "data" / "schedule.json").read_text())["ramp_cosine"]


def moves_of(config, gradients, *, start=0.0):
    """Return how far an optimizer moves a single weight down at each of these gradients."""
    optimizer, rate = make_optimizer(config), learning_rate(config, steps=len(gradients))
    weight, moves = jnp.array(start), []
    state = optimizer.init(weight)
    for step, gradient in enumerate(gradients):
        updates: Any = optimizer.update(jnp.array(gradient), state, weight)
        moves.append(-float(rate(step) * updates[0]))
        state = updates[1]
    return moves


def test_warm_up_and_cosine():
    # Adam moves a weight by the learning rate when gradients stay the same.
    rising = OptimizerConfig(learning_rate=0.1, warmup_steps=4, weight_decay=0.0)
    constant = moves_of(rising, [1.0] * 6)
    # 1/4 of the rate, then even steps up to all of it.
    np.testing.assert_allclose(constant, [0.025, 0.04375, 0.0625, 0.08125, 0.1, 0.1], rtol=1e-4)
    cosine = moves_of(rising.model_copy(update={"schedule": "cosine"}), [1.0] * 9)
    np.testing.assert_allclose(cosine[:4], constant[:4], rtol=1e-4)
    # Down to a tenth over 5 steps: .1 (.1 + .9 (1 + cos(pi t / 5)) / 2).
    expected = [0.01 + 0.045 * (1 + math.cos(math.pi * t / 5)) for t in range(5)]
    np.testing.assert_allclose(cosine[4:], expected, rtol=1e-4)


def test_flat_ramp_cosine():
    """PaVeRL-SQL's learning rate."""
    config = OptimizerConfig(
        learning_rate=1e-5,
        schedule="ramp_cosine",
        final_fraction=RAMP["final_fraction"],
    )
    rate = learning_rate(config, steps=RAMP["steps"])
    counts = jnp.array([int(count) for count in RAMP["shares"]])
    shares = np.array(jax.jit(rate)(counts)) / 1e-5
    np.testing.assert_allclose(shares, list(RAMP["shares"].values()), atol=1e-6)
    # Beyond the end it stays low.
    assert float(rate(2000)) == pytest.approx(1e-7)


def test_gradients_are_clipped_to_the_norm():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.0, max_grad_norm=2.0)
    clipped = moves_of(config, [1.0, 100.0, -50.0])
    np.testing.assert_allclose(clipped, moves_of(config, [1.0, 2.0, -2.0]), rtol=1e-5)


def test_weights_decay_apart_from_the_gradient():
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.1)
    # The rate, and a tenth of the weight 2 times the rate.
    np.testing.assert_allclose(moves_of(config, [3.0], start=2.0), [0.5 + 0.1], rtol=1e-4)


def test_muon_turns_the_gradients_of_matrices_into_rotations(toy):
    config = OptimizerConfig(kind="muon", weight_decay=0.0, max_grad_norm=1e9)
    params = nnx.split(toy.model())[1]
    rng = np.random.default_rng(0)
    gradient = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    optimizer = make_optimizer(config)
    updates, _ = jax.jit(optimizer.update)(gradient, jax.jit(optimizer.init)(params), params)
    # The steps are .2 x rate, here 1, in root mean square.
    for path, update_leaf in jax.tree.leaves_with_path(updates):
        name = param_path(path).rpartition(".")[2]
        moved = np.asarray(update_leaf)
        if name in MATRICES:
            scale = 0.2 * max(moved.shape[1:]) ** 0.5
            values = np.linalg.svd(moved / scale)[1]
            # A random gradient has values near 0 and near 2.
            assert 0.3 < values.min() <= values.max() < 1.3, name
        else:  # Adam's first step has one size, whatever the gradient.
            np.testing.assert_allclose(np.abs(moved), np.abs(moved).max(), rtol=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_first_moment_takes_half_in_bfloat16(kind):
    params = {"layers": {"q": jnp.zeros((2, 16, 8))}, "embed": jnp.zeros((16, 8))}

    def sizes(moments):
        rule = make_optimizer(OptimizerConfig(kind=kind, moments=moments))
        leaves = jax.tree.leaves_with_path(jax.eval_shape(rule.init, params))
        names = [
            (jax.tree_util.keystr(path), leaf.size * leaf.dtype.itemsize) for path, leaf in leaves
        ]
        return [sum(size for name, size in names if f".{m}" in name) for m in ("mu", "nu")]

    whole, less = sizes("float32"), sizes("bfloat16")
    assert (2 * less[0], less[1]) == tuple(whole)
