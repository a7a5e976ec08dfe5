"""The objective per token: papers.md section 1, and what masks and bounds do."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.train import losses
from minirl.train.batching import token_weights

CASES = json.loads((Path(__file__).parents[1] / "data" / "objective.json").read_text())


def loss_of(case, *, weight_BT=None, is_action_BT=None):
    """Return loss and clip fraction of the one row of a case, and of more rows where they pad."""
    logp_BT, old_logp_BT = jnp.log(jnp.array([case["new"]])), jnp.log(jnp.array([case["old"]]))
    is_action_BT = jnp.ones_like(logp_BT, bool) if is_action_BT is None else is_action_BT
    return losses.policy_loss(
        logp_BT,
        old_logp_BT,
        jnp.full_like(logp_BT, case["advantage"]),
        is_action_BT,
        is_action_BT / 4 if weight_BT is None else weight_BT,
        ratio_level=case["level"],
        clip_low=case["clip"],
        clip_high=case["clip"],
    )


@pytest.mark.parametrize("case", CASES["clipped"], ids=lambda case: case["id"])
def test_clipped_objective(case):
    logp_BT, old_logp_BT = jnp.log(jnp.array([case["new"]])), jnp.log(jnp.array([case["old"]]))
    ratio_BT = losses.probability_ratio(
        logp_BT, old_logp_BT, jnp.ones((1, 4), bool), level=case["level"]
    )
    bounds = {"clip_low": case["clip"], "clip_high": case["clip"]}
    terms_BT, _ = losses.clipped_surrogate(ratio_BT, jnp.full((1, 4), case["advantage"]), **bounds)
    np.testing.assert_allclose(terms_BT[0], case["terms"], rtol=1e-6)
    np.testing.assert_allclose(-loss_of(case)[0], case["mean"], rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "divisor", "expected"),
    [
        ("sequence_mean", 1, CASES["aggregation"]["sequence_mean"]),
        ("token_mean", 1, CASES["aggregation"]["token_mean"]),
        # The sums 6.3 and -1, over 2 rows and the constant.
        ("constant", 1, 2.65),
        ("constant", 10, 0.265),
    ],
)
def test_aggregation(aggregation, divisor, expected):
    terms = CASES["aggregation"]["terms"]
    lengths = [len(row) for row in terms]
    weights = token_weights(lengths, aggregation=aggregation, divisor=divisor)
    mean = sum(weight * sum(row) for weight, row in zip(weights, terms, strict=True))
    assert mean == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator):
    case = CASES["kl"]
    policy_BT, reference_BT = jnp.log(jnp.array([case["policy"], case["reference"]]))[:, None]
    kl_BT = losses.kl_divergence(policy_BT, reference_BT, estimator=estimator)
    np.testing.assert_allclose(kl_BT[0], case[estimator], atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_where_nothing_was_sampled_numbers_are_ignored(level):
    case = {**CASES["clipped"][0], "level": level}
    padded = {name: [*case[name], 1e-30, 0.9] for name in ("old", "new")}
    padded["old"][4] = 0.5
    is_action_BT = jnp.array([[True] * 4 + [False] * 2])
    found = loss_of(case | padded, is_action_BT=is_action_BT)
    np.testing.assert_allclose(found, loss_of(case), rtol=1e-6)
    nothing_BT = jnp.zeros((1, 4), bool)
    assert [float(x) for x in loss_of(case, is_action_BT=nothing_BT)] == [0.0, 0.0]


def test_the_clipped_share_is_where_no_gradient_flows():
    ratio_BT = jnp.array([[0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0]])
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    for advantage, clipped in ((1.0, [0, 0, 0, 0, 0, 1, 1]), (-1.0, [1, 1, 0, 0, 0, 0, 0])):
        advantage_BT = jnp.full_like(ratio_BT, advantage)
        gradient_BT = jax.grad(
            lambda r, a=advantage_BT: losses.clipped_surrogate(r, a, **bounds)[0].sum()
        )(ratio_BT)
        _, is_clipped_BT = losses.clipped_surrogate(ratio_BT, advantage_BT, **bounds)
        np.testing.assert_array_equal(is_clipped_BT[0], np.array(clipped, bool))
        np.testing.assert_array_equal(gradient_BT == 0, is_clipped_BT)


def test_clip_fraction_is_weighted_as_the_loss_is():
    # Of the weights .1, .2, .3, .4 only the third token is beyond 1.2.
    weight_BT = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    loss, clip_fraction = loss_of(CASES["clipped"][0], weight_BT=weight_BT)
    np.testing.assert_allclose(clip_fraction, 0.3, rtol=1e-6)
    np.testing.assert_allclose(loss, -(0.18 + 0.24 + 0.54 + 0.6), rtol=1e-6)
