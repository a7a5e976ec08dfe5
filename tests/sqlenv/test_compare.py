from collections import Counter
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlenv.evaluators import equality
from sqlenv.evaluators.equality import like_gold, matches
from sqlenv.types import Denied, SqlError, Table, TimedOut, TooLarge
from tests.sqlenv.cases import read_cases, table

MODES: list[Any] = ["set", "bag", "bag_ordered", "test_suite"]


@pytest.mark.parametrize(
    ("predicted", "gold", "gold_sql", "expected"),
    read_cases("modes: set, bag, bag_ordered, test_suite"),
)
def test_modes(predicted: Any, gold: Any, gold_sql: str, expected: tuple[bool, ...]) -> None:
    found = [matches(table(predicted), table(gold), mode=mode, gold_sql=gold_sql) for mode in MODES]
    assert tuple(found) == expected


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_a_table_never_matches(mode: Any) -> None:
    for result in (SqlError("x"), TimedOut("wall"), TooLarge("rows"), Denied("PRAGMA")):
        assert not matches(result, result, mode=mode)
        assert not matches(table([(1,)]), result, mode=mode)
        assert not matches(result, table([(1,)]), mode=mode)


wide_rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.tuples(*[st.sampled_from([0, 1, None, "0"])] * width), min_size=1, max_size=5
    )
)


@given(wide_rows, wide_rows, st.randoms(use_true_random=False))
def test_suite_rule_tries_every_order_of_columns(left: Any, right: Any, random: Any) -> None:
    def by_hand(a: Any, b: Any) -> bool:
        width = len(a[0])
        if len(b) != len(a) or len(b[0]) != width:
            return False
        orders = permutations(range(width))
        return any(
            Counter(tuple(row[i] for i in order) for row in b) == Counter(a) for order in orders
        )

    assert matches(table(right), table(left), mode="test_suite") == by_hand(left, right)
    order = random.sample(range(len(left[0])), len(left[0]))
    moved = [tuple(row[i] for i in order) for row in random.sample(left, len(left))]
    assert matches(table(moved), table(left), mode="test_suite")


def test_the_search_for_an_order_of_columns_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of the same values in ever other rows: too many orders to try them all."""
    monkeypatch.setattr("sqlenv.evaluators.equality._SEARCHED_CELLS", 500_000)
    rng = Random(0)
    halves = [0, 1] * 30
    columns = [rng.sample(halves, 60) for _ in range(60)]
    others = [rng.sample(halves, 60) for _ in range(60)]
    names = tuple(map(str, range(60)))
    gold = Table(names, tuple(zip(*columns, strict=True)))
    assert not matches(Table(names, tuple(zip(*others, strict=True))), gold, mode="test_suite")
    moved = tuple(zip(*rng.sample(columns, 60), strict=True))
    assert matches(Table(names, moved), gold, mode="test_suite")
    ones = Table(names * 20, ((1,) * 1200,))
    assert matches(ones, replace(ones), mode="test_suite")


def test_far_more_numbers_than_the_golds_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply can have a million fractions, each of which would be looked up."""
    asked = Counter[float]()

    def nearest(value: float, ordered: Any) -> float:
        asked[value] += 1
        return ordered[0]

    monkeypatch.setattr(equality, "_nearest", nearest)
    gold = table([(number + 0.5,) for number in range(2_000)])
    for count, looked_up in ((29_000, 29_000), (31_000, 0)):
        asked.clear()
        predicted = table([(1 / number,) for number in range(3, count + 3)])
        found = like_gold(predicted, gold, "close")
        assert (found is predicted) == (looked_up == 0)
        assert asked.total() == looked_up
    # Many rows of few numbers are those of a query that forgets DISTINCT.
    again = like_gold(table([(0.1 + 0.2,)] * 100_000), table([(0.3,)]), "close")
    assert isinstance(again, Table)
    assert {*again.rows} == {(0.3,)}
