"""Intervals, paired tests and pass@k, by hand."""

from itertools import combinations, product
from math import comb

import numpy as np
import pytest

from launch.evaluation.results import (
    database_interval,
    mean_interval,
    paired_difference,
    pass_at_k,
    wilson,
)

Z = 1.959964
"""The 97.5 % point of the normal distribution."""


@pytest.mark.parametrize(("right", "count"), [(1, 3), (215, 500), (0, 1), (1, 1), (0, 3), (3, 3)])
def test_the_interval_of_a_rate_ends_where_its_test_refuses(right, count):
    """Few questions that are all right prove little: Wilson's limits solve this equation."""
    low, high = mean_interval([1.0] * right + [0.0] * (count - right))
    assert low <= right / count <= high != low
    for limit in (low, high):
        error = (right / count - limit) ** 2
        assert error == pytest.approx(Z**2 * limit * (1 - limit) / count)


def test_other_scores_have_the_bootstraps_interval():
    """Means of resamples are Binomial(8, 1/2) / 16: P(0) = 0.4 %, P(at most 1) = 3.5 %."""
    assert mean_interval([0.5, 0.0] * 4, seed=3) == (1 / 16, 7 / 16)
    gain = paired_difference([0.0] * 8, [0.5, 0.0] * 4)
    assert gain.ci95 == (1 / 16, 7 / 16)
    # Where all are alike there is nothing to draw from; what may be above 1 is no share.
    assert mean_interval([0.5] * 4) == wilson(0.5, 4)
    assert mean_interval([1.25] * 4) == (1.25, 1.25)
    alike = paired_difference([0.5] * 4, [0.75] * 4)
    assert alike.ci95 == pytest.approx([2 * limit - 1 for limit in wilson(0.625, 4)])


def test_a_difference_on_every_question_is_as_sure_as_their_number():
    found = paired_difference([0.0] * 20, [1.0] * 20)
    assert (found.difference, found.p) == (1, pytest.approx(2 / 2**20))
    assert found.ci95 == pytest.approx(((20 - Z**2) / (20 + Z**2), 1))
    graded = paired_difference([0.0] * 20, [0.5] * 20)
    assert graded.p == 2 / 10_001  # no resample is on the other side; never 0
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
    found = paired_difference([0.0] * 4, gains)
    assert found.p == pytest.approx(exact, abs=0.02)
    other = paired_difference(gains, [0.0] * 4)
    assert (other.difference, other.p) == (-found.difference, found.p)


def test_the_interval_over_databases_draws_whole_databases():
    """Right in 4 of 8 databases: Binomial(8, 1/2) / 8, as if each had one question."""
    for size in (1, 3):
        names = [name for name in "abcdefgh" for _ in range(size)]
        right = [float(name in "aceg") for name in names]
        assert database_interval(right, names, seed=3) == (1 / 8, 7 / 8)
        # Beside it the interval over questions narrows with their number.
        low, high = mean_interval(right)
        assert (high - low > 0.5) == (size == 1)
    # Databases of one to five questions, in all of the 5**5 ways to draw five.
    rights = ("1", "10", "00000", "1110", "001")
    means = [
        sum(one.count("1") for one in drawn) / sum(map(len, drawn))
        for drawn in product(rights, repeat=5)
    ]
    names = [one for one in rights for _ in one]
    found = database_interval([float(mark) for one in rights for mark in one], names)
    assert found == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.01)


def test_there_is_no_interval_over_databases_that_are_few_or_alike():
    assert database_interval([1.0, 0.0], ["a", "b"]) is None
    assert database_interval([1.0, 0.0] * 5, [name for name in "abcde" for _ in "ab"]) is None
    found = paired_difference([0.0, 0.0, 1.0], [0.0, 1.0, 1.0])
    assert found.ci95_databases is None  # nobody said of which they are


def test_a_paired_difference_has_both_intervals():
    """Each of 8 databases loses a question or wins one: Binomial(8, 1/2) / 8 - 1/2, of two."""
    names = [name for name in "abcdefgh" for _ in range(2)]
    second = [float(name in "aceg") for name in names]
    first = [0.0, 1.0] * 8
    found = paired_difference(first, second, names)
    assert (found.difference, found.questions, found.means) == (0, 16, (0.5, 0.5))
    assert (found.only_first, found.only_second) == (4, 4)
    assert found.ci95_databases == (-3 / 8, 3 / 8)
    assert found.ci95 == (-6 / 16, 6 / 16)


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
