from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlenv.compare import is_ordered, matches
from sqlenv.types import Denied, SqlError, Table, TimedOut, TooLarge

MODES: list[Any] = ["set", "bag", "bag_ordered"]


def table(*rows: Any) -> Table:
    return Table(tuple("abc"[: len(rows[0])] if rows else "a"), rows)


@pytest.mark.parametrize(
    ("predicted", "gold", "gold_sql", "expected"),
    [
        # In the order of MODES.
        ([(1,), (2,)], [(1,), (2,)], "SELECT a", (True, True, True)),
        ([(2,), (1,)], [(1,), (2,)], "SELECT a", (True, True, True)),
        ([(2,), (1,)], [(1,), (2,)], "SELECT a ORDER BY a", (True, True, False)),
        ([(1,), (1,)], [(1,)], "SELECT a", (True, False, False)),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], "SELECT a", (True, False, False)),
        ([], [], "SELECT a ORDER BY a", (True, True, True)),
        ([(1,)], [], "SELECT a", (False, False, False)),
        ([(1.0,)], [(1,)], "SELECT a", (True, True, True)),
        ([("1",)], [(1,)], "SELECT a", (False, False, False)),
        ([(b"1",)], [("1",)], "SELECT a", (False, False, False)),
        ([(0.1 + 0.2,)], [(0.3,)], "SELECT a", (False, False, False)),
        ([(None,)], [(None,)], "SELECT a", (True, True, True)),
        ([(None,)], [("",)], "SELECT a", (False, False, False)),
        ([(1, 2)], [(2, 1)], "SELECT a, b", (False, False, False)),
        ([(1, 2)], [(1,)], "SELECT a", (False, False, False)),
    ],
)
def test_modes(predicted: Any, gold: Any, gold_sql: str, expected: tuple[bool, ...]) -> None:
    found = [
        matches(table(*predicted), table(*gold), mode=mode, gold_sql=gold_sql) for mode in MODES
    ]
    assert tuple(found) == expected


def test_two_empty_tables_match_whatever_their_columns() -> None:
    assert matches(Table(("a",), ()), Table(("a", "b"), ()), mode="set")


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_a_table_never_matches(mode: Any) -> None:
    for result in (SqlError("x"), TimedOut("wall"), TooLarge("rows"), Denied("PRAGMA")):
        assert not matches(result, result, mode=mode)
        assert not matches(table((1,)), result, mode=mode)
        assert not matches(result, table((1,)), mode=mode)


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n\tby a", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("WITH x AS (SELECT a FROM t ORDER BY a LIMIT 1) SELECT a FROM x", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t ORDER BY 1", True),
        ("SELECT a FROM t WHERE b = ')' ORDER BY a", True),
        ("SELECT 'ORDER BY' FROM t", False),
        ("SELECT 'it''s ORDER BY' FROM t", False),
        ('SELECT "ORDER BY" FROM t', False),
        ("SELECT [order by], `order by` FROM t", False),
        ("SELECT a FROM t -- ORDER BY a", False),
        ("SELECT a FROM t /* ORDER BY a */", False),
        ("SELECT a FROM t -- (\nORDER BY a", True),
        ("SELECT reorder, by FROM t", False),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("", False),
    ],
)
def test_order_by_of_the_whole_query(sql: str, ordered: bool) -> None:
    assert is_ordered(sql) is ordered


rows_strategy = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b"])), max_size=5)


@given(rows_strategy, rows_strategy, st.randoms(use_true_random=False))
def test_modes_grow_stricter_and_order_is_ignored(left: Any, right: Any, random: Any) -> None:
    a, b = table(*left), table(*right)
    found = [matches(a, b, mode=mode, gold_sql="SELECT 1 ORDER BY 1") for mode in MODES]
    assert found == sorted(found, reverse=True)
    shuffled = random.sample(left, len(left))
    assert matches(table(*shuffled), a, mode="bag")
