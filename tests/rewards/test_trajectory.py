"""ATR: the rows of the paper's figure, its closed form, and its ablations."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.astra import BOUND, aggregate, shape_of, transition
from rewards.config import AtrConfig

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "atr.json").read_text())["cases"]
PAPER, FIG2 = AtrConfig(), AtrConfig(kind="fig2")
PRESETS = {"paper": PAPER, "fig2": FIG2, "threshold": AtrConfig(state="threshold")}
scores = st.lists(st.floats(0, 1), max_size=6)


def unclipped(steps, config):
    """Add up the rewards of steps; of equal scores at 0 a turn's cost is what is left."""
    cost = -aggregate([0, 0], config)
    return sum(transition(*pair, config) for pair in pairwise([0, *steps])) - cost * (
        len(steps) - 1
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["steps"]))
def test_vectors(case, preset):
    # On scores of 0 and 1 both rules of state agree (papers.md, A2).
    is_binary = set(case["steps"]) <= {0, 1}
    expected = case.get(preset, case["paper"] if is_binary else None)
    if expected is not None:
        assert aggregate(case["steps"], PRESETS[preset]) == pytest.approx(expected, abs=1e-9)
    if "unclipped" in case and preset == "paper":
        assert unclipped(case["steps"], PAPER) == pytest.approx(case["unclipped"], abs=1e-9)


@given(scores)
def test_closed_form(steps):
    """With nothing for staying: the last score, less half of every fall, less the turns."""
    falls = sum(max(a - b, 0) for a, b in pairwise(steps))
    turns = max(len(steps) - 1, 0)
    expected = (steps or [0])[-1] - 0.5 * falls - 0.0001 * turns
    assert aggregate(steps, PAPER) == pytest.approx(max(-BOUND, expected), abs=1e-7)


def test_states_by_threshold_let_a_detour_pay():
    """Falls on one side of the threshold are free and the way back is paid: a known flaw of it."""
    detour = [1, 0.75, 0.5, 1]
    assert aggregate(detour, PRESETS["threshold"]) == pytest.approx(1.1247)
    assert aggregate(detour, PRESETS["paper"]) == pytest.approx(0.7497)


@pytest.mark.parametrize(
    ("steps", "shape"),
    [
        ([1], "single"),
        ([0, 0], "flat"),
        ([0.2, 0.5, 1], "rising"),
        ([0, 0, 1, 1], "rising"),
        ([1, 1, 0.4], "falling"),
        ([0, 1, 0], "rise_fall"),
        ([0.8, 0.8, 0.2, 0.2, 1], "fall_rise"),
        ([0, 1, 0, 1], "oscillating"),
        ([0.3, 0.1 + 0.2], "flat"),  # rounding is no change
    ],
)
def test_shapes_of_figure_2(steps, shape):
    assert shape_of(steps) == shape


def test_a_circle_costs_nothing_but_turns_only_when_symmetric():
    circle = [1, 0, 1, 0, 1]
    assert aggregate(circle, AtrConfig(high_low=-1.0)) == pytest.approx(1 - 4 * 0.0001)
    assert aggregate(circle, PAPER) == pytest.approx(-4 * 0.0001)
