"""What stands above an advantage becomes one number a token; the papers' own figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minirl.config import Expo
from minirl.train import losses
from minirl.train.advantages import (
    SpanCredit,
    estimate,
    overlong_penalty,
    token_advantages,
    whiten,
)
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


def test_a_penalty_reaches_direct_credit_with_and_without_spans():
    spans = SpanCredit(np.array([0.0, 0.5, 0.5]), np.array([False, True, False]))
    found = fold(
        [row([0, 1, 1])] * 2, [[2.0], [2.0]], Expo(), penalty_NG=-0.25, spans=[spans, None]
    )
    assert found == [[0, 0.25, 0], [0, 1.75, 1.75]]


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
