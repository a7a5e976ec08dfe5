"""Intervals, paired tests and pass@k, by hand."""

from __future__ import annotations

from itertools import combinations, product
from math import comb

import pytest

from launch.statistics import (
    McNemar,
    bootstrap_interval,
    mcnemar,
    paired_bootstrap,
    pass_at_k,
)


def test_a_difference_on_every_question_is_sure():
    found = paired_bootstrap([0.0] * 20, [1.0] * 20, resamples=999)
    assert (found.difference, found.ci95) == (1, (1, 1))
    assert found.p == 2 / 1000  # no resample is on the other side; never 0


def test_runs_that_do_not_differ_are_not_told_apart():
    found = paired_bootstrap([1.0, 0.0] * 10, [1.0, 0.0] * 10, resamples=99)
    assert (found.difference, found.ci95, found.p) == (0, (0, 0), 1)


def test_p_of_few_questions_by_all_resamples():
    """Three gains and one loss: counted in all 4**4 resamples."""
    gains = [1.0, 1.0, 1.0, -1.0]
    means = [sum(drawn) for drawn in product(gains, repeat=4)]
    exact = 2 * sum(mean <= 0 for mean in means) / len(means)
    assert exact == 2 * 67 / 256
    found = paired_bootstrap([0.0] * 4, gains, resamples=20_000, seed=5)
    assert found.p == pytest.approx(exact, abs=0.02)
    assert found.difference == 0.5


def test_order_of_runs_turns_the_sign_alone():
    first, second = [1.0, 0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0, 1.0]
    one = paired_bootstrap(first, second, resamples=500, seed=1)
    other = paired_bootstrap(second, first, resamples=500, seed=1)
    assert (one.difference, one.p) == (-other.difference, other.p)
    assert one.ci95 == pytest.approx((-other.ci95[1], -other.ci95[0]))
    assert one == paired_bootstrap(first, second, resamples=500, seed=1)


def test_intervals_of_no_question_are_refused():
    for call in (
        lambda: bootstrap_interval([]),
        lambda: paired_bootstrap([], []),
        lambda: paired_bootstrap([1.0], [1.0, 0.0]),
        lambda: mcnemar([True], []),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()


def test_mcnemar_counts_and_tests_the_questions_on_which_runs_differ():
    first = [True] * 9 + [False] * 8 + [True] * 2
    second = [False] + [True] * 8 + [True] * 7 + [False] + [True] * 2
    # 1 against 7: twice the chance of at most one head in 8 tosses, 2 * (1 + 8) / 256.
    assert mcnemar(first, second) == McNemar(1, 7, 18 / 256)
    assert mcnemar([True] * 3, [True] * 3) == McNemar(0, 0, 1)
    assert mcnemar([True, False], [False, True]) == McNemar(1, 1, 1)
    large = mcnemar([True] * 3000, [False] * 3000)
    assert (large.only_first, large.only_second) == (3000, 0)
    assert large.p < 1e-300


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_drawings_with_a_right_one(correct, k):
    right = [True] * correct + [False] * (5 - correct)
    share = sum(any(drawn) for drawn in combinations(right, k)) / comb(5, k)
    assert pass_at_k(correct, 5, k) == pytest.approx(share)


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_needs_as_many_samples(k):
    with pytest.raises(ValueError, match="of 5 samples"):
        pass_at_k(1, 5, k)
