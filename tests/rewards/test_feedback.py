"""What the next turn is told of a diagnosis."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewards.config import TreeConfig
from rewards.progress.feedback import build_feedback
from sqlenv.prompts import FeedbackStyle
from sqlenv.types import Example

BROKEN = "SELECT name FROM singer WHERE"


def told(sql: str, gold: str, style: FeedbackStyle = "progress") -> tuple[tuple[str, ...], str]:
    feedback = build_feedback(lambda _: None, TreeConfig(), style=style)
    return feedback(Example("1", "?", "shop", Path("shop.sqlite"), gold), sql, "")


@pytest.mark.parametrize("style", ["progress", "demo"])
def test_without_both_trees_the_feedback_is_generic(style):
    # Appendix F: one fallback where the prediction or the gold query fails to parse. Nothing was
    # compared, so nothing is said to look close.
    good = "SELECT name FROM singer"
    of_gold, of_prediction = told(good, BROKEN, style), told(BROKEN, good, style)
    assert of_gold == of_prediction
    assert of_gold[0] == ()
    assert of_gold != told(good, f"{good} WHERE age > 1 AND age > 2 AND age > 3", style)
    assert "looks close" not in of_gold[1]
    # The structures agree and the values do not: that text is another.
    assert told(f"{good} WHERE age = 1", f"{good} WHERE age = 2", style) != of_gold
