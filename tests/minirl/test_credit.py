"""What stands above an advantage becomes one number a token; the papers' own figures."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.config import Expo, Grpo, ReinforcePlusPlus, Rloo
from minirl.train import losses
from minirl.train.advantages import (
    SpanCredit,
    estimate,
    overlong_penalty,
    token_advantages,
    whiten,
)
from minirl.train.batching import Batch
from minirl.types import TokenRow

CASES = json.loads((Path(__file__).parents[1] / "data" / "credit.json").read_text())
EXPO = CASES["expo"]


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


def test_corrections_of_later_mini_batches_are_those_of_the_weights_that_sampled():
    # The sampler, the learner as it sampled, the learner now; the second token is past the clip.
    sampler, start, now = np.log([[0.5, 0.4, 0.2], [0.4, 0.4, 0.4], [0.42, 0.6, 0.36]])
    advantage = np.array([1.0, 1.0, -1.0])
    correction, ratio = np.exp(start - sampler), np.exp(now - start)
    terms = np.minimum(ratio, np.clip(ratio, 0.8, 1.2)) * np.minimum(correction, 1.5)
    # Of a negative advantage the larger side counts.
    terms[2] = -max(ratio[2], np.clip(ratio[2], 0.8, 1.2)) * min(correction[2], 1.5)
    ones_BT = jnp.ones((1, 3), bool)
    fields = (ones_BT, jnp.array([sampler]), jnp.array([advantage]), ones_BT / 3)
    batch = Batch(*[None] * 4, *fields, jnp.array([start]))  # ty: ignore[invalid-argument-type]
    algorithm = Grpo(correction="truncated", correction_high=1.5)

    def loss(logp_BT):
        found, stats = losses.objective(algorithm, logp_BT, logp_BT, batch, logp_BT)
        return found, stats

    (found, stats), slope_BT = jax.value_and_grad(loss, has_aux=True)(jnp.array([now]))
    assert float(found) == pytest.approx(-terms.mean(), rel=1e-5)
    assert float(stats["clip_fraction"]) == pytest.approx(1 / 3)
    assert float(stats["correction_mean"]) == pytest.approx(np.minimum(correction, 1.5).mean())
    # The correction has no gradient, and what is clipped neither.
    np.testing.assert_allclose(slope_BT, [[-terms[0] / 3, 0, -terms[2] / 3]], rtol=1e-5)


@pytest.mark.parametrize("case", CASES["leave_one_out"])
def test_leave_one_out(case):
    advantages = estimate(np.array([case["rewards"]]), estimator="leave_one_out")
    np.testing.assert_allclose(advantages, [case["advantages"]], atol=1e-6)


@pytest.mark.parametrize("case", CASES["overlong"], ids=lambda case: case["id"])
def test_overlong_penalty(case):
    found = overlong_penalty(
        np.array(case["lengths"]), longest=case["longest"], cache=case["cache"]
    )
    np.testing.assert_allclose(found, case["penalties"])


def test_direct_credit_without_spans_is_the_total():
    # One row of the batch has spans, the other has none.
    spans = SpanCredit(np.array([0.0, 0.5, 7.0, 7.0]), np.array([False, True, True, False]))
    found = fold([row([0, 1, 0, 1])] * 2, [[2.0], [-1.5]], Expo(), spans=[spans, None])
    assert found == [[0, 0.5, 0, 0], [0, -1.5, 0, -1.5]]


def test_the_value_of_a_turn_is_the_advantage_of_its_tokens():
    # Two turns of two tokens, an observation between them: step-wise credit, no group.
    turns = SpanCredit(np.array([0, 1, 1, 0, 0, -0.5, -0.5]), np.array([0, 1, 1, 0, 0, 1, 1], bool))
    (found,) = fold([row([0, 1, 1, 0, 0, 1, 1])], [[0.5]], Expo(), spans=[turns])
    assert found == [0, 1, 1, 0, 0, -0.5, -0.5]


def test_returns_sum_what_is_still_to_come():
    algorithm = ReinforcePlusPlus(kl_coef=0.5, whiten=False)
    kl = np.array([9.0, 1.0, 9.0, 2.0, 4.0])
    (found,) = fold([row([0, 1, 0, 1, 1])], [[3.0]], algorithm, kl=[kl])
    # 3 less half of 1 + 2 + 4, of 2 + 4, of 4; nothing where the policy did not sample.
    assert found == [0, -0.5, 0, 0, 1.0]


def test_a_penalty_reaches_direct_credit_with_and_without_spans():
    spans = SpanCredit(np.array([0.0, 0.5, 0.5]), np.array([False, True, False]))
    found = fold(
        [row([0, 1, 1])] * 2, [[2.0], [2.0]], Expo(), penalty_NG=-0.25, spans=[spans, None]
    )
    assert found == [[0, 0.25, 0], [0, 1.75, 1.75]]


def test_a_kl_in_the_reward_is_that_of_the_whole_row():
    kl = [np.array([9.0, 1.0, 2.0]), np.array([9.0, 0.0, 0.0])]
    found = fold([row([0, 1, 1])] * 2, np.array([[1.0, 0.0]]), Rloo(kl_coef=0.1), kl=kl)
    # Rewards .7 and 0, each against the other.
    np.testing.assert_allclose(found, [[0, 0.7, 0.7], [0, -0.7, -0.7]])


def test_whitened_credit_has_mean_0_and_deviation_1():
    rng = np.random.default_rng(0)
    credit = [rng.normal(3, 2, 9), rng.normal(-1, 5, 4)]
    masks = [rng.random(9) < 0.7, np.ones(4, bool)]
    found = whiten(credit, masks, ddof=1)
    flat = np.concatenate([values[mask] for values, mask in zip(found, masks, strict=True)])
    assert flat.mean() == pytest.approx(0, abs=1e-9)
    assert flat.std(ddof=1) == pytest.approx(1, abs=1e-5)
    assert all((values[~mask] == 0).all() for values, mask in zip(found, masks, strict=True))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_nothing_is_left_of_equal_credit(count):
    mask = np.arange(4) < count
    (found,) = whiten([np.full(4, 2.5)], [mask], ddof=1)
    assert found.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("none", [1, 1, 1, 1]), ("truncated", [0.25, 0.8, 2, 1]), ("masked", [0, 0.8, 0, 1])],
)
def test_importance_correction(kind, weights):
    rho = jnp.log(jnp.array([[0.25, 0.8, 4.0, 9.0]]))
    is_action = jnp.array([[True, True, True, False]])
    found = losses.importance_correction(
        rho, jnp.zeros_like(rho), is_action, kind=kind, low=0.5, high=2.0
    )
    np.testing.assert_allclose(found[0], weights, rtol=1e-6)
