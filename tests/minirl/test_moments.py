"""Moments in bfloat16 stay near those in float32; rounding is right on average."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from minirl.config import OptimizerConfig
from minirl.train.optimizer import in_bfloat16, make_optimizer, round_at_random


def test_rounding_goes_to_a_neighbour_and_is_right_on_average():
    # Between 1 and its neighbour in bfloat16, 1 + 1/128: a quarter of the way.
    x = jnp.full(40_000, 1 + 0.25 / 128, jnp.float32)
    rounded = np.asarray(round_at_random(x, jax.random.key(0)), np.float32)
    assert set(rounded.tolist()) == {1.0, 1 + 1 / 128}
    # The share that goes up has a standard error of 0.002.
    assert (rounded > 1).mean() == pytest.approx(0.25, abs=0.01)
    negative = np.asarray(round_at_random(-x, jax.random.key(0)), np.float32)
    np.testing.assert_array_equal(negative, -rounded)


def moments_after(rule, gradients, params):
    state = rule.init(params)
    step = jax.jit(rule.update)
    for gradient in gradients:
        updates, state = step(gradient, state, params)
        params = optax.apply_updates(params, updates)
    inner = getattr(state, "inner", state)
    adam = next(part for part in inner if hasattr(part, "nu"))
    return params, adam


def test_20_steps_stay_near_those_in_float32():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 32)), jnp.float32)}
    scales = 10.0 ** rng.uniform(-6, 0, (64, 32))
    gradients = [
        {"w": jnp.asarray(scales * rng.normal(size=(64, 32)), jnp.float32)} for _ in range(20)
    ]
    rule = optax.adamw(1e-3)
    exact, adam = moments_after(rule, gradients, params)
    near, rounded = moments_after(in_bfloat16(rule), gradients, params)
    assert rounded.mu["w"].dtype == rounded.nu["w"].dtype == jnp.bfloat16
    # Twenty roundings of at most 1/128 each, most of them of what a later step has replaced.
    nu = np.asarray(rounded.nu["w"], np.float32)
    np.testing.assert_allclose(nu, adam.nu["w"], rtol=0.1)
    assert (nu / np.asarray(adam.nu["w"])).mean() == pytest.approx(1, abs=2e-3)
    size = np.abs(adam.mu["w"]).mean()
    assert np.abs(np.asarray(rounded.mu["w"], np.float32) - adam.mu["w"]).mean() < 0.01 * size
    moved, apart = np.abs(exact["w"] - params["w"]), np.abs(near["w"] - exact["w"])
    assert apart.mean() < 0.02 * moved.mean()


def test_a_second_moment_falls_after_a_large_gradient():
    # To the nearest it would stay: a thousandth is less than half of bfloat16's 1/128.
    params = {"w": jnp.zeros(512)}
    gradients = [{"w": jnp.ones(512)}] + [{"w": jnp.zeros(512)}] * 300
    _, adam = moments_after(optax.adamw(1e-3), gradients, params)
    _, rounded = moments_after(in_bfloat16(optax.adamw(1e-3)), gradients, params)
    found = np.asarray(rounded.nu["w"], np.float32).mean()
    assert found == pytest.approx(float(adam.nu["w"].mean()), rel=0.02)
    assert found < 0.8 * 1e-3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_setting_halves_the_state(kind):
    params = {"layers": {"q": jnp.zeros((2, 16, 8))}, "embed": jnp.zeros((16, 8))}

    def size(moments):
        rule = make_optimizer(OptimizerConfig(kind=kind, moments=moments), steps=2)
        state = jax.eval_shape(rule.init, params)
        return sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim > 1
        )

    assert size("bfloat16") * 2 == size("float32")
