"""BIRD's soft F1 and the reward of R-VES, on figures measured with the official programs."""

import pytest

from sqlenv.evaluators.bird import soft_f1, ves_reward
from sqlenv.types import Table


def table(*rows):
    return Table(tuple("abc"[: len(rows[0])]) if rows else ("a",), rows)


@pytest.mark.parametrize(
    ("predicted", "gold", "score"),
    [
        ([(1, 2), (3, 4)], [(1, 2), (3, 4)], 1),
        ([(3, 4), (1, 2)], [(1, 2), (3, 4)], 0),
        ([(2, 1), (4, 3)], [(1, 2), (3, 4)], 1),
        ([(1, 2)], [(1, 2), (3, 4)], 2 / 3),
        ([(1, 2, 9), (3, 4, 9)], [(1, 2), (3, 4)], 0.8),
        ([(1,), (3,)], [(1, 2), (3, 4)], 2 / 3),
        ([], [], 1),
        ([], [(1, 2)], 0),
        ([(1, 2)], [], 0),
        # Duplicates go before rows are paired.
        ([(1, 2), (1, 2), (3, 4)], [(1, 2), (3, 4), (3, 4)], 1),
        ([(1.0, None)], [(1, None)], 1),
    ],
)
def test_soft_f1(predicted, gold, score):
    assert soft_f1(table(*predicted), table(*gold)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("middle", "reward"),
    [(4, 1.25), (1.5, 1), (0.7, 0.75), (0.3, 0.5), (0.1, 0.25)],
)
def test_bins_of_r_ves(middle, reward):
    assert ves_reward([middle * factor for factor in (0.99, 1, 1.01)]) == reward


def test_outliers_do_not_count_and_equal_ratios_leave_none():
    ratios = [0.9, 0.91] * 20
    assert ves_reward([*ratios, 1000.0]) == 0.75
    assert ves_reward([1.5] * 4) == 0
