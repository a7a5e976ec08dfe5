"""Rates of structural mismatches, counted by hand."""

import pytest

from rewards.progress.diagnosis import (
    UNPARSED,
    diagnose,
    labels_of,
    mismatch_rates,
)


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


def test_a_prediction_that_does_not_parse_differs_everywhere():
    # A worse model must not look better: of three predictions one agrees, two are no query.
    gold = "SELECT a FROM t"
    labels = [labels_of(diagnose(sql, gold)) for sql in (gold, "SELECT FROM", "")]
    assert labels == [(), (UNPARSED,), (UNPARSED,)]
    rates = mismatch_rates([found for found in labels if found is not None])
    assert list(rates.values()) == [pytest.approx(2 / 3)] * 5
