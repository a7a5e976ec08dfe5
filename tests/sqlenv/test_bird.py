"""BIRD's soft F1 and the reward of R-VES, on figures measured with the official programs."""

import pytest

from sqlenv.evaluators.bird import soft_f1, ves_reward
from sqlenv.types import Table
from tests.sqlenv.cases import read_cases


def table(*rows):
    return Table(tuple("abc"[: len(rows[0])]) if rows else ("a",), rows)


@pytest.mark.parametrize(("predicted", "gold", "score"), read_cases("BIRD's soft F1"))
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
