"""Intervals, paired tests and pass@k, by hand."""

from __future__ import annotations

from itertools import combinations, product
from math import comb

import pytest

from launch.evaluation.statistics import (
    mean_interval,
    paired_difference,
    pass_at_k,
    tango,
    wilson,
)

Z = 1.959964
"""The 97.5 % point of the normal distribution."""


@pytest.mark.parametrize("count", [1, 3])
def test_few_questions_that_are_all_right_prove_little(count):
    # Wilson's limits of n of n solve (1 - p)^2 = z^2 p (1 - p) / n, hence p = n / (n + z^2).
    assert mean_interval([1.0] * count) == (pytest.approx(count / (count + Z**2)), 1)
    assert mean_interval([0.0] * count) == (0, pytest.approx(Z**2 / (count + Z**2)))


@pytest.mark.parametrize(("right", "count"), [(1, 3), (215, 500)])
def test_the_interval_of_a_rate_ends_where_its_test_refuses(right, count):
    for limit in mean_interval([1.0] * right + [0.0] * (count - right)):
        errors = abs(right / count - limit) / (limit * (1 - limit) / count) ** 0.5
        assert errors == pytest.approx(Z)


def test_other_scores_have_the_bootstraps_interval():
    """Means of resamples are Binomial(8, 1/2) / 16: P(0) = 0.4 %, P(at most 1) = 3.5 %."""
    assert mean_interval([0.5, 0.0] * 4, resamples=4000, seed=3) == (1 / 16, 7 / 16)
    gain = paired_difference([0.0] * 8, [0.5, 0.0] * 4, resamples=4000, seed=3)
    assert gain.ci95 == (1 / 16, 7 / 16)
    # Where all are alike there is nothing to draw from; what may be above 1 (R-VES) is no share.
    assert mean_interval([0.5] * 4) == wilson(0.5, 4)
    assert mean_interval([1.25] * 4) == (1.25, 1.25)
    alike = paired_difference([0.5] * 4, [0.75] * 4)
    assert alike.ci95 == pytest.approx([2 * limit - 1 for limit in wilson(0.625, 4)])


@pytest.mark.parametrize(("first", "second", "count"), [(1, 8, 10), (13, 118, 500), (0, 1, 4)])
def test_the_interval_of_a_gain_ends_where_its_test_refuses(first, second, count):
    """The chances of the counts are fitted by a search here, under each limit as the difference."""
    for limit in tango(first, second, count):

        def likelihood(chance, limit=limit):
            both = 1 - limit - 2 * chance
            return chance**first * (chance + limit) ** second * both ** (count - first - second)

        lowest, most = max(0.0, -limit), (1 - limit) / 2
        grid = [lowest + (most - lowest) * step / 200_000 for step in range(200_001)]
        chance = max(grid, key=likelihood)
        variance = count * (2 * chance + limit - limit**2)
        errors = abs(second - first - count * limit) / variance**0.5
        assert errors == pytest.approx(Z, abs=1e-3)


def test_a_difference_on_every_question_is_as_sure_as_their_number():
    found = paired_difference([0.0] * 20, [1.0] * 20)
    assert (found.difference, found.p) == (1, pytest.approx(2 / 2**20))
    assert found.ci95 == pytest.approx(((20 - Z**2) / (20 + Z**2), 1))
    graded = paired_difference([0.0] * 20, [0.5] * 20, resamples=999)
    assert graded.p == 2 / 1000  # no resample is on the other side; never 0
    assert (
        paired_difference([0.0] * 3, [0.5] * 3).p == paired_difference([0] * 3, [1] * 3).p == 0.25
    )
    none = paired_difference([1.0, 0.0] * 10, [1.0, 0.0] * 10)
    assert (none.difference, none.p) == (0, 1)
    assert none.ci95 == pytest.approx((-(Z**2) / (20 + Z**2), Z**2 / (20 + Z**2)))


def test_p_of_few_graded_questions_by_all_resamples():
    """Three gains and one loss: counted in all 4**4 resamples."""
    gains = [0.5, 0.5, 0.5, -0.5]
    exact = 2 * sum(sum(drawn) <= 0 for drawn in product(gains, repeat=4)) / 4**4
    found = paired_difference([0.0] * 4, gains, resamples=20_000, seed=5)
    assert found.p == pytest.approx(exact, abs=0.02)
    other = paired_difference(gains, [0.0] * 4, resamples=20_000, seed=5)
    assert (other.difference, other.p) == (-found.difference, found.p)


def test_intervals_of_no_question_are_refused():
    for call in (
        lambda: mean_interval([]),
        lambda: paired_difference([], []),
        lambda: paired_difference([1.0], [1.0, 0.0]),
        lambda: pass_at_k(1, 5, 0),
        lambda: pass_at_k(1, 5, 6),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()


def test_rates_are_tested_by_the_questions_on_which_runs_differ():
    first = [1] * 9 + [0] * 8 + [1] * 2
    second = [0] + [1] * 8 + [1] * 7 + [0] + [1] * 2
    found = paired_difference(first, second)
    # 1 against 7: twice the chance of at most one head in 8 tosses, 2 * (1 + 8) / 256.
    assert (found.only_first, found.only_second, found.p) == (1, 7, pytest.approx(18 / 256))
    assert paired_difference([1, 0], [0, 1]).p == 1
    assert paired_difference([1] * 3000, [0] * 3000).p < 1e-300


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_drawings_with_a_right_one(correct, k):
    right = [True] * correct + [False] * (5 - correct)
    share = sum(any(drawn) for drawn in combinations(right, k)) / comb(5, k)
    assert pass_at_k(correct, 5, k) == pytest.approx(share)
