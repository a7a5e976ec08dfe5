"""0 and 1 for a right answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rewards.compose import build_reward
from rewards.config import AstraConfig, ExecutionConfig, PaverlConfig
from sqlenv.sql.answers import answer_of
from sqlenv.types import Attempt, AttemptKind, Episode, Example, SqlError, Table

from .conftest import EXAMPLE, Golds

ASKED = Example("1", "?", "d", Path("d.sqlite"), "SELECT 1")


def attempt(*, correct: bool, kind: AttemptKind = "answer") -> Attempt:
    return Attempt(answer_of("SELECT 1", "any"), SqlError(""), correct, kind=kind)


def test_only_the_answer_is_paid():
    """The last attempt, and only one that answers: a call of a tool may give the right rows."""
    nothing = Golds(SqlError(""))
    reward = build_reward(ExecutionConfig(), nothing)
    right, wrong, call = (
        attempt(correct=True),
        attempt(correct=False),
        attempt(correct=True, kind="call"),
    )
    paid = {(right,): 1, (wrong, right): 1, (right, wrong): 0, (call,): 0, (call, right): 1, (): 0}
    for attempts, total in paid.items():
        score = reward(Episode(ASKED, attempts))
        assert (score.total, score.correct, score.parts) == (
            total,
            bool(total),
            {"execution": total},
        )


@pytest.mark.parametrize("own", [{"alternatives": ("SELECT 2",)}, {"grading_method": "subset"}])
def test_right_by_another_gold_or_its_own_rule_is_paid_in_full(own):
    """Rewards of columns too, though the first gold's result has none of the answer's."""
    right = Attempt(answer_of("SELECT 2", "any"), Table(("a",), ((2,),)), correct=True)
    gold = Golds(Table(("a",), ((1,),)))
    for config, total in ((PaverlConfig(), 10), (AstraConfig(), 1)):
        reward = build_reward(config, gold)
        assert reward(Episode(replace(EXAMPLE, **own), (right,))).total == pytest.approx(total)
