"""The objective on the papers' own figures: advantages, credit, ratios, KL, aggregation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.config import AlgorithmConfig, Expo
from minirl.train import losses
from minirl.train.advantages import (
    SpanCredit,
    estimate,
    groups_to_train,
    token_advantages,
    whiten,
)
from minirl.train.batching import Batch, token_weights
from minirl.types import TokenRow

DATA = Path(__file__).parents[1] / "data"
OBJECTIVE, CREDIT = (json.loads((DATA / f"{n}.json").read_text()) for n in ("objective", "credit"))
EXPO = CREDIT["expo"]


@pytest.mark.parametrize("case", OBJECTIVE["advantages"], ids=lambda case: case["id"])
def test_group_normalised(case):
    advantages = estimate(np.array([case["rewards"]]), estimator="group_normalised")
    # The epsilon beside the standard deviation takes a millionth away.
    np.testing.assert_allclose(advantages, [case["advantages"]], rtol=2e-6, atol=1e-6)


# Rewards and correctness of groups of two, by what the rules look at.
GROUPS = {
    "mixed": ((2.0, 0.5), (True, False)),
    "all right": ((2.75, 2.5), (True, True)),
    "all wrong, shaped apart": ((0.75, 0.25), (False, False)),
    "mixed, equal rewards": ((1.0, 1.0), (True, False)),
    "all wrong, equal rewards": ((0.0, 0.0), (False, False)),
}


@pytest.mark.parametrize(
    ("equal_groups", "correctness_filter", "kept"),
    [
        ("keep", "none", list(GROUPS)),
        ("drop", "none", ["mixed", "all right", "all wrong, shaped apart"]),
        # Shaping alone moves the rewards of the second and third group: the filter asks execution.
        ("keep", "mixed", ["mixed", "mixed, equal rewards"]),
        ("drop", "mixed", ["mixed"]),
    ],
)
def test_groups_to_train(equal_groups, correctness_filter, kept):
    rewards, correct = map(np.array, zip(*GROUPS.values(), strict=True))
    numbers = groups_to_train(
        rewards, correct, equal_groups=equal_groups, correctness_filter=correctness_filter
    )
    assert [list(GROUPS)[number] for number in numbers] == kept


def loss_of(logp_BT, old_logp_BT, advantage_BT, is_action_BT, weight_BT, algorithm):
    """Return loss and statistics where the sampler's log-probabilities are the old ones."""
    nothing: Any = None
    batch = Batch(
        *[nothing] * 4, is_action_BC=is_action_BT, sampler_logp_BC=old_logp_BT,
        advantage_BC=advantage_BT, weight_BC=weight_BT, old_logp_BC=old_logp_BT,
    )  # fmt: skip
    return losses.policy_loss(algorithm, logp_BT, logp_BT, batch, logp_BT)


@pytest.mark.parametrize("case", OBJECTIVE["clipped"], ids=lambda case: case["id"])
def test_clipped_objective(case):
    logp_BT, old_logp_BT = jnp.log(jnp.array([case["new"]])), jnp.log(jnp.array([case["old"]]))
    is_action_BT = jnp.ones((1, 4), bool)
    advantage_BT = jnp.full((1, 4), case["advantage"])
    settings = {"clip_low": case["clip"], "clip_high": case["clip"]}
    ratio_BT = losses.probability_ratio(logp_BT, old_logp_BT, is_action_BT, level=case["level"])
    terms_BT, is_clipped_BT = losses.clipped_surrogate(ratio_BT, advantage_BT, **settings)
    np.testing.assert_allclose(terms_BT[0], case["terms"], rtol=1e-6)
    for weight_BT in (is_action_BT / 4, jnp.array([[0.1, 0.2, 0.3, 0.4]])):
        loss, stats = loss_of(
            logp_BT, old_logp_BT, advantage_BT, is_action_BT, weight_BT,
            AlgorithmConfig(ratio_level=case["level"], correction="none", **settings),
        )  # fmt: skip
        np.testing.assert_allclose(-loss, np.sum(weight_BT[0] * np.array(case["terms"])), rtol=1e-6)
        # It is weighed as the loss is.
        clipped = np.sum(weight_BT * is_clipped_BT)
        np.testing.assert_allclose(stats["clip_fraction"], clipped, rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "divisor", "expected"),
    [
        ("sequence_mean", 1, OBJECTIVE["aggregation"]["sequence_mean"]),
        ("token_mean", 1, OBJECTIVE["aggregation"]["token_mean"]),
        # The sums 6.3 and -1, over 2 rows and the constant.
        ("constant", 1, 2.65),
        ("constant", 10, 0.265),
    ],
)
def test_aggregation(aggregation, divisor, expected):
    terms = OBJECTIVE["aggregation"]["terms"]
    lengths = [len(row) for row in terms]
    weights = token_weights(lengths, aggregation=aggregation, divisor=divisor)
    mean = sum(weight * sum(row) for weight, row in zip(weights, terms, strict=True))
    assert mean == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators(estimator):
    case = OBJECTIVE["kl"]
    policy_BT, reference_BT = jnp.log(jnp.array([case["policy"], case["reference"]]))[:, None]
    kl_BT = losses.kl_divergence(policy_BT, reference_BT, estimator=estimator)
    np.testing.assert_allclose(kl_BT[0], case[estimator], atol=1e-6)


@pytest.mark.parametrize(
    ("advantage", "clipped"), [(1.0, [0, 0, 0, 0, 0, 1, 1]), (-1.0, [1, 1, 0, 0, 0, 0, 0])]
)
def test_the_clipped_share_is_where_no_gradient_flows(advantage, clipped):
    ratio_BT = jnp.array([[0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0]])
    advantage_BT = jnp.full_like(ratio_BT, advantage)
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    gradient_BT = jax.grad(
        lambda ratio_BT: losses.clipped_surrogate(ratio_BT, advantage_BT, **bounds)[0].sum()
    )(ratio_BT)
    _, is_clipped_BT = losses.clipped_surrogate(ratio_BT, advantage_BT, **bounds)
    np.testing.assert_array_equal(is_clipped_BT[0], np.array(clipped, bool))
    np.testing.assert_array_equal(gradient_BT == 0, is_clipped_BT)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("none", [1, 1, 1, 1]),
        ("truncated", [0.25, 0.8, 1.6, 2]),
        ("masked", [0, 0.8, 1.6, 0]),
    ],
)
def test_weights_of_the_gap_to_the_sampler(kind, weights):
    rho = jnp.array([0.25, 0.8, 1.6, 4])
    found = losses.correction_weight(rho, kind=kind, low=0.5, high=2.0)
    np.testing.assert_allclose(found, weights, rtol=1e-6)


def test_cispo_clips_weights_and_no_gradient():
    # Ratios 1.2, 0.8 and 3, of which the last is cut to 1.5.
    old, new = jnp.array([0.5, 0.25, 0.1]), jnp.log(jnp.array([0.6, 0.2, 0.3]))
    advantage = jnp.array([2.0, -1.0, 2.0])

    def objective(logp):
        ratio = jnp.exp(logp - jnp.log(old))
        terms, is_clipped = losses.cispo(ratio, logp, advantage, clip_high=0.5)
        return terms.sum(), is_clipped

    (value, is_clipped), gradient = jax.value_and_grad(objective, has_aux=True)(new)
    np.testing.assert_allclose(gradient, [2.4, -0.8, 3.0], rtol=1e-6)
    expected = 2.4 * np.log(0.6) - 0.8 * np.log(0.2) + 3 * np.log(0.3)
    assert float(value) == pytest.approx(expected, rel=1e-6)
    assert is_clipped.tolist() == [False, False, True]


def row(is_action, logprobs=None):
    is_action = np.array(is_action, bool)
    zeros = np.zeros(len(is_action), np.float32)
    return TokenRow(np.arange(len(is_action)), is_action, zeros, 0.0, 1)


def fold(rows, rewards, algorithm, **numbers):
    found = token_advantages(rows, np.array(rewards), algorithm, **numbers)
    return [np.asarray(values).tolist() for values in found]


def expo_coefficients(form):
    """Return the coefficients of one row: a prompt of one id, then the three tokens."""
    spans = SpanCredit(np.array([0.0, *EXPO["rewards"]]), np.array([False, True, True, True]))
    policy, reference = (np.log([1.0, *EXPO[name]]) for name in ("policy", "reference"))
    kl = losses.kl_divergence(policy, reference, estimator="k1")
    (found,) = fold([row([0, 1, 1, 1])], [[9.0]], Expo(token_credit=form), spans=[spans], kl=[kl])
    return np.array(found)


@pytest.mark.parametrize("form", ["own", "return_to_go"])
def test_coefficients_of_expo(form):
    np.testing.assert_allclose(expo_coefficients(form), [0, *EXPO[form]], atol=1e-6)


def test_loss_of_expo():
    coefficients, logp = expo_coefficients("own")[1:], np.log(EXPO["policy"])
    loss = -(coefficients * logp).sum()
    np.testing.assert_allclose([loss, loss / 3], [EXPO["loss_sum"], EXPO["loss_mean"]], atol=1e-6)


def test_the_value_of_a_turn_is_the_advantage_of_its_tokens():
    # Two turns of two tokens, an observation between them: step-wise credit, no group.
    turns = SpanCredit(np.array([0, 1, 1, 0, 0, -0.5, -0.5]), np.array([0, 1, 1, 0, 0, 1, 1], bool))
    (found,) = fold([row([0, 1, 1, 0, 0, 1, 1])], [[0.5]], Expo(), spans=[turns])
    assert found == [0, 1, 1, 0, 0, -0.5, -0.5]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_nothing_is_left_of_equal_credit(count):
    mask = np.arange(4) < count
    (found,) = whiten([np.full(4, 2.5)], [mask])
    assert found.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_of_an_absurd_ratio_leaves_the_gradient_of_the_others(level):
    """exp(100) is infinite in fp32, and the update would be skipped."""
    logp = jnp.array([[-1.0, -1.0], [-0.1, -0.1]])
    old = jnp.array([[-1.0, -1.0], [-100.1, -100.1]])
    ones, algorithm = jnp.ones((2, 2)), AlgorithmConfig(ratio_level=level, correction="none")

    def loss(logp):
        arguments = (logp, old, jnp.array([[1.0, 1.0], [-1.0, -1.0]]), ones > 0, ones / 4)
        return loss_of(*arguments, algorithm)[0]

    value, gradient = jax.value_and_grad(loss)(logp)
    assert np.isfinite(value)
    # Of the first row the ratio is 1, and so its gradient is minus weight times advantage.
    np.testing.assert_allclose(gradient, [[-0.25, -0.25], [0.0, 0.0]], atol=1e-6)
    rho = losses.probability_ratio(logp, old, ones > 0, level=level)
    weights = losses.correction_weight(rho, kind="masked", low=0.5, high=2.0)
    np.testing.assert_allclose(weights, [[1.0, 1.0], [0.0, 0.0]])
    assert np.isfinite(losses.kl_divergence(old, logp, estimator="k3")).all()
