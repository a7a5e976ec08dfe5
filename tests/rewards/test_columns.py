"""Results compared column by column: the tables of the notes, and what holds of any results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.columns import (
    PaverlReward,
    binary_accuracy,
    csmr,
    evaluated_accuracy,
    fractional_accuracy,
    released_accuracy,
)
from rewards.config import PaverlConfig
from sqlenv.types import Answer, Attempt, Episode, Result, SqlError, Table, TimedOut
from tests.vectors import read

from .conftest import EXAMPLE, Golds

SHEET = read("columns")
CASES = [*SHEET["cases"], *SHEET["rules"]]

value = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from(["1", "1.0", " 2 ", "1e999", "none", "-10000000000", "9" * 5000]),
)


@st.composite
def tables(draw: Any, *, width: int | None = None) -> Table:
    width = width or draw(st.integers(1, 4))
    names = draw(st.lists(st.sampled_from("abc"), min_size=width, max_size=width))
    rows = draw(st.lists(st.tuples(*[value] * width), max_size=6))
    return Table(tuple(names), tuple(rows))


def table(rows: Any, names: Any = None) -> Result:
    if rows is None:
        return SqlError("no such column: x")
    names = names or [f"c{n}" for n in range(len(rows[0]) if rows else 2)]
    return Table(tuple(names), tuple(map(tuple, rows)))


def results_of(case: dict) -> tuple[Result, Result]:
    gold = table(case.get("gold", SHEET["gold"]), case.get("gold_names"))
    return table(case["pred"], case.get("names")), gold


def reward(pred: Result, gold: Result, *, sql: str = "SELECT a, b FROM t", **settings: Any):
    attempt = Attempt(Answer(sql, sql), pred, correct=False)
    return PaverlReward(PaverlConfig(**settings), Golds(gold))(Episode(EXAMPLE, (attempt,)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_vectors(case):
    pred, gold = results_of(case)
    assert fractional_accuracy(pred, gold) == pytest.approx(case["ex_f"])
    assert binary_accuracy(pred, gold) == case["ex_b"]
    score = reward(pred, gold)
    assert score.total == pytest.approx(case["reward"])
    assert score.total == sum(score.parts.values())
    binary = 10 if case["ex_b"] else 0.5 * isinstance(pred, Table)
    assert reward(pred, gold, payoff="binary").total == pytest.approx(binary)
    assert reward(pred, gold, ex_f="code").total == pytest.approx(case["code"], abs=1e-6)


def test_what_the_released_code_never_runs():
    pred, gold = results_of(CASES[0])
    assert reward(pred, gold, sql="SELECT a FROM t", ex_f="code").total == 0
    assert reward(pred, gold, sql="SELECT aa FROM t", ex_f="code").total == 10
    assert reward(pred, gold, sql="SELECT 1").total == 10


@pytest.mark.parametrize(("rows", "score"), [(5, 1), (35, 1), (36, 0), (4, 0.8), (0, 0)], ids=str)
def test_the_released_evaluator_allows_thirty_rows_more_or_fewer(rows, score):
    gold = table([[f"g{n}", n] for n in range(5)])
    pred = table([[f"g{n}", n] for n in range(rows)])
    assert evaluated_accuracy(pred, gold) == pytest.approx(score)
    # Its reward allows five.
    assert released_accuracy(pred, gold) == pytest.approx(0 if rows > 10 else score)


def test_the_rewards_numbers_are_settings():
    gold, one, none = table([[1, 2]]), table([[1]]), table([[3]])
    numbers: dict[str, Any] = {"all_columns": 2, "executed": 0.25}
    assert [reward(pred, gold, **numbers).total for pred in (gold, one, none)] == [2, 1, 0.25]
    wide = table([[1, 2, 3, 4, 5]])
    paid = [reward(wide, gold, payoff="binary", extra_columns=tau).total for tau in (3, 4)]
    assert paid == [0.5, 10]


def test_without_an_answer_or_a_gold_result_nothing_is_paid():
    pred, gold = results_of(CASES[0])
    paid = PaverlReward(PaverlConfig(), Golds(gold))
    assert paid(Episode(EXAMPLE)).total == 0
    call = Attempt(Answer("call", "SELECT a, b FROM t"), pred, correct=True, kind="call")
    assert paid(Episode(EXAMPLE, (call,))) == paid(Episode(EXAMPLE))
    for failed in (SqlError("x"), TimedOut("wall")):
        assert reward(pred, failed).total == 0.5
        assert csmr(pred, failed) == 0


@pytest.mark.parametrize("case", read("csmr")["cases"], ids=lambda case: case["id"])
def test_csmr(case):
    pred, gold = table(case["pred"]), table(case["gold"])
    assert csmr(pred, gold) == pytest.approx(case["csmr"], abs=1e-6)
    if 0 < case["csmr"] < 1:
        assert csmr(pred, gold, alpha=0.4) == pytest.approx(case["csmr"] / 2, abs=1e-6)


@given(tables(), tables())
def test_any_result_scores_within_range(pred, gold):
    assert 0 <= fractional_accuracy(pred, gold) <= 1
    assert binary_accuracy(pred, gold) <= fractional_accuracy(pred, gold)
    assert 0 <= released_accuracy(pred, gold) <= 1
    if set(pred.rows) == set(gold.rows):
        assert csmr(pred, gold) == 1
    else:
        assert 0 <= csmr(pred, gold) <= 0.8 + 1e-9
    for variant in ("paper", "code"):
        assert 0 <= reward(pred, gold, ex_f=variant).total <= 10


def test_metrics_have_both_measures_of_the_answer():
    gold = table([[1, 2]])
    for pred, ex_f, ex_b in (
        (gold, 1, 1),
        (table([[1]]), 0.5, 0),
        (table([[*range(9)]]), 1, 0),
        (None, 0, 0),
    ):
        attempts = (Attempt(Answer("", ""), pred, correct=False),) if pred else ()
        found = PaverlReward(PaverlConfig(), Golds(gold)).diagnostics(Episode(EXAMPLE, attempts))
        assert found == {"columns/ex_f": ex_f, "columns/ex_b": ex_b}
