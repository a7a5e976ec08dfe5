"""PaVeRL-SQL and SQL-ASTRA: results compared column by column, episodes by their steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.exchange import CreditSpan
from rewards.astra import BOUND, AstraReward, aggregate, shape_of, transition
from rewards.columns import (
    PaverlReward,
    binary_accuracy,
    csmr,
    evaluated_accuracy,
    fractional_accuracy,
    released_accuracy,
)
from rewards.config import AstraConfig, AtrConfig, PaverlConfig
from sqlenv.types import Answer, Attempt, Episode, Result, SqlError, Table, TimedOut
from tests.vectors import read, table

from .conftest import EXAMPLE, Golds

SHEET = read("columns")
CASES = [*SHEET["cases"], *SHEET["rules"]]

VALUE = st.one_of(
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
    rows = draw(st.lists(st.tuples(*[VALUE] * width), max_size=6))
    return Table(tuple(names), tuple(rows))


def result(rows: Any, names: Any = None) -> Result:
    if rows is None:
        return SqlError("no such column: x")
    return table(rows, names or (None if rows else ("c0", "c1")))


def results_of(case: dict) -> tuple[Result, Result]:
    gold = result(case.get("gold", SHEET["gold"]), case.get("gold_names"))
    return result(case["pred"], case.get("names")), gold


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


def test_the_reward_is_ten_times_the_share_of_gold_columns_or_half_a_point():
    gold, one, none = table([[1, 2]]), table([[1]]), table([[3]])
    assert [reward(pred, gold).total for pred in (gold, one, none)] == [10, 5, 0.5]


def test_the_number_of_extra_columns_is_a_setting():
    gold = table([[1, 2]])
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
    pred, gold = result(case["pred"]), result(case["gold"])
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


# SQL-ASTRA: ATR by figure 2 and its closed form; which steps of an episode count; ablations.

GOLD = Table(("a", "b"), (("a1", "b1"), ("a2", "b2")))
RESULTS: dict[float, Result] = {
    1.0: GOLD,
    0.8: Table(("a", "b"), (("a1", "b2"), ("a2", "b1"))),
    0.4: Table(("a",), (("a1",), ("a2",))),
    0.2: Table(("a", "b"), (("a1", "x"), ("a2", "y"))),
    0.0: SqlError("no such column: c"),
}
BAD_CALL = Attempt(Answer("<tool_call>"), SqlError("x"), correct=False, kind="bad_call")


def step(score: float, kind: Any = "call", sql: str = "") -> Attempt:
    text = sql or f"SELECT {score}"
    return Attempt(Answer(text, text), RESULTS[score], correct=score == 1, kind=kind)


def steps(*attempts: Attempt, **changes: Any) -> list[float]:
    return AstraReward(AstraConfig(**changes), Golds(GOLD)).steps(Episode(EXAMPLE, attempts))


def score_of(*attempts: Attempt, **changes: Any):
    return AstraReward(AstraConfig(**changes), Golds(GOLD))(Episode(EXAMPLE, attempts))


def test_the_rewards_of_an_episode():
    attempts = (step(0.2), step(1.0), step(0.4, "answer"))
    assert steps(*attempts) == pytest.approx([0.2, 1, 0.4])
    paper, fig2 = score_of(*attempts), score_of(*attempts, atr={"kind": "fig2"})
    assert paper.parts == {"atr": paper.total}
    assert paper.total == pytest.approx(1 - 1.5 * 0.6 - 0.0002)
    assert fig2.total == pytest.approx(1 - 1.5 * 0.6 - 0.2)
    assert score_of(*attempts, aggregate="last").total == pytest.approx(0.4)
    symmetric = score_of(*attempts, atr={"kind": "paper", "high_low": -1})
    assert symmetric.total == pytest.approx(0.4 - 0.0002)
    assert not paper.correct
    assert score_of(step(0.0), step(1.0, "answer")).correct


def test_final_step():
    again = step(1.0, "answer", sql="SELECT a,\n b -- again\nFROM t ;")
    once = step(1.0, sql="SELECT a, b FROM t")
    assert steps(once, again) == [1]
    assert steps(step(0.4), again) == pytest.approx([0.4, 1])


def test_a_call_that_cannot_be_read_is_a_step_of_score_0():
    assert steps(BAD_CALL, step(1.0, "answer")) == [0, 1]


def test_binary_scores_and_matches():
    attempts = (step(0.8), step(1.0), step(0.2, "answer"))
    assert steps(*attempts, step_score="binary") == [0, 1, 0]
    assert steps(BAD_CALL, step(1.0, "answer"), step_score="binary") == [0, 1]
    doubled = Attempt(Answer("q", "q"), Table(("a", "b"), GOLD.rows * 2), correct=False)
    assert steps(doubled) == [1]
    assert steps(step(0.8, "answer"), alpha=0.6) == pytest.approx([0.6])


def test_step_wise_credit_covers_each_reply_with_its_own_score():
    attempts = (
        step(0.2, sql="SELECT 11"),
        step(1.0, sql="SELECT 1"),
        step(1.0, "answer", "SELECT 1"),
    )
    found = score_of(*attempts, aggregate="steps")
    assert [(s.turn, s.start, s.end) for s in found.spans] == [(0, 0, 9), (1, 0, 8), (2, 0, 8)]
    assert [s.value for s in found.spans] == pytest.approx([0.2, 1, 1])
    assert found.total == found.parts["steps"] == pytest.approx(2.2 / 3)
    assert score_of(*attempts).spans == ()
    first, second = score_of(BAD_CALL, step(1.0), aggregate="steps").spans
    assert first.value == 0
    assert second == CreditSpan(1, 0, len("SELECT 1.0"), 1.0)


# ATR.

PAPER, FIG2 = AtrConfig(), AtrConfig(kind="fig2")
PRESETS = {"paper": PAPER, "fig2": FIG2}


def unclipped(steps, config):
    """Add up the rewards of steps; of equal scores at 0 a turn's cost is what is left."""
    earned = sum(transition(*pair, config) for pair in pairwise([0, *steps]))
    return earned + aggregate([0, 0], config) * (len(steps) - 1)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", read("atr")["cases"], ids=lambda case: str(case["steps"]))
def test_aggregates(case, preset):
    if (expected := case.get(preset)) is not None:
        assert aggregate(case["steps"], PRESETS[preset]) == pytest.approx(expected, abs=1e-9)
    if "unclipped" in case and preset == "paper":
        assert unclipped(case["steps"], PAPER) == pytest.approx(case["unclipped"], abs=1e-9)


@given(st.lists(st.floats(0, 1), max_size=6))
def test_closed_form(steps):
    """With nothing for staying: the last score, less half of every fall, less the turns."""
    falls = sum(max(a - b, 0) for a, b in pairwise(steps))
    turns = max(len(steps) - 1, 0)
    expected = (steps or [0])[-1] - 0.5 * falls - 0.0001 * turns
    assert aggregate(steps, PAPER) == pytest.approx(max(-BOUND, expected), abs=1e-7)


@pytest.mark.parametrize(
    ("steps", "shape"),
    read("atr")["shapes"],
)
def test_shapes_of_figure_2(steps, shape):
    assert shape_of(steps) == shape


def test_a_circle_costs_nothing_but_turns_only_when_symmetric():
    circle = [1, 0, 1, 0, 1]
    assert aggregate(circle, AtrConfig(high_low=-1.0)) == pytest.approx(1 - 4 * 0.0001)
    assert aggregate(circle, PAPER) == pytest.approx(-4 * 0.0001)
