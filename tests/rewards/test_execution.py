"""0 and 1 for a right answer."""

from __future__ import annotations

from pathlib import Path

from rewards.compose import build_reward
from rewards.config import ExecutionConfig
from sqlenv.sql.answers import answer_of
from sqlenv.types import Attempt, AttemptKind, Episode, Example, SqlError

ASKED = Example("1", "?", "d", Path("d.sqlite"), "SELECT 1")


def attempt(*, correct: bool, kind: AttemptKind = "answer") -> Attempt:
    return Attempt(answer_of("SELECT 1", "any"), SqlError(""), correct, kind=kind)


def test_only_the_answer_is_paid():
    """The last attempt, and only one that answers: a call of a tool may give the right rows."""
    reward = build_reward(ExecutionConfig(), columns_of=lambda example: None)
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
