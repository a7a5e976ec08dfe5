"""SQL-ASTRA: ATR by figure 2 and its closed form; which steps of an episode count; ablations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exchange import CreditSpan
from rewards.astra import BOUND, AstraReward, aggregate, shape_of, transition
from rewards.config import AstraConfig, AtrConfig
from sqlenv.types import Answer, Attempt, Episode, Result, SqlError, Table
from tests.vectors import read

from .conftest import EXAMPLE, Golds

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


def score(*attempts: Attempt, **changes: Any):
    return AstraReward(AstraConfig(**changes), Golds(GOLD))(Episode(EXAMPLE, attempts))


def test_the_rewards_of_an_episode():
    attempts = (step(0.2), step(1.0), step(0.4, "answer"))
    assert steps(*attempts) == pytest.approx([0.2, 1, 0.4])
    paper, fig2 = score(*attempts), score(*attempts, atr={"kind": "fig2"})
    assert paper.parts == {"atr": paper.total}
    assert paper.total == pytest.approx(1 - 1.5 * 0.6 - 0.0002)
    assert fig2.total == pytest.approx(1 - 1.5 * 0.6 - 0.2)
    assert score(*attempts, aggregate="last").total == pytest.approx(0.4)
    symmetric = score(*attempts, atr={"kind": "paper", "high_low": -1})
    assert symmetric.total == pytest.approx(0.4 - 0.0002)
    assert not paper.correct
    assert score(step(0.0), step(1.0, "answer")).correct


@pytest.mark.parametrize(
    ("final_step", "repeated", "another"),
    [("dedup", [1], [0.4, 1]), ("always", [1, 1], [0.4, 1]), ("never", [1], [0.4])],
)
def test_final_step(final_step, repeated, another):
    again = step(1.0, "answer", sql="SELECT a,\n b -- again\nFROM t ;")
    once = step(1.0, sql="SELECT a, b FROM t")
    assert steps(once, again, final_step=final_step) == pytest.approx(repeated)
    assert steps(step(0.4), again, final_step=final_step) == pytest.approx(another)


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
    found = score(*attempts, aggregate="steps")
    assert [(s.turn, s.start, s.end) for s in found.spans] == [(0, 0, 9), (1, 0, 8), (2, 0, 8)]
    assert [s.value for s in found.spans] == pytest.approx([0.2, 1, 1])
    assert found.total == found.parts["steps"] == pytest.approx(2.2 / 3)
    assert score(*attempts).spans == ()
    first, second = score(BAD_CALL, step(1.0), aggregate="steps").spans
    assert first.value == 0
    assert second == CreditSpan(1, 0, len("SELECT 1.0"), 1.0)


# ATR

PAPER, FIG2 = AtrConfig(), AtrConfig(kind="fig2")
PRESETS = {"paper": PAPER, "fig2": FIG2}


def unclipped(steps, config):
    """Add up the rewards of steps; of equal scores at 0 a turn's cost is what is left."""
    earned = sum(transition(*pair, config) for pair in pairwise([0, *steps]))
    return earned + aggregate([0, 0], config) * (len(steps) - 1)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", read("atr")["cases"], ids=lambda case: str(case["steps"]))
def test_vectors(case, preset):
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
