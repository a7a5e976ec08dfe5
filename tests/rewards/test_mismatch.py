"""Rates of structural mismatches, counted by hand."""

import pytest

from rewards.diagnosis import diagnose
from rewards.mismatch import CATEGORIES, mismatch_rates, mismatches
from sqlenv.envs.tags import TAG_SENTENCES


def test_rates():
    tags = [
        ("JOIN_MISSING", "FROM_OR_JOIN_TABLE_MISMATCH", "SELECT_ERROR"),
        ("DISTINCT_MISMATCH",),
        ("ORDER_BY_MISMATCH", "SUBQUERY_MISSING"),
        (),
    ]
    assert mismatch_rates(tags) == {
        "SELECT": 0.5,
        "JOIN": 0.25,
        "WHERE": 0.0,
        "GROUP": 0.0,
        "average": pytest.approx(0.75 / 4),
    }
    assert set(mismatch_rates([]).values()) == {0.0}


def test_categories_hold_known_tags():
    assert set().union(*CATEGORIES.values()) <= set(TAG_SENTENCES)


def test_from_a_prediction_to_its_categories():
    gold = "SELECT d.name, COUNT(*) FROM s JOIN d ON s.i = d.i GROUP BY d.name"
    found = mismatches(diagnose("SELECT name FROM s WHERE age > 20", gold).tags)
    assert found == {"SELECT": True, "JOIN": True, "WHERE": True, "GROUP": True}
