"""The diagnosis as the text of the next turn (Progress-SQL, appendix F)."""

from __future__ import annotations

from rewards.config import TreeConfig
from rewards.execution import ColumnsOf
from rewards.progress.diagnosis import diagnose
from sqlenv.envs.diagnosed import Feedback
from sqlenv.prompts import FeedbackStyle, feedback_text
from sqlenv.types import Example


def build_feedback(columns_of: ColumnsOf, tree: TreeConfig, *, style: FeedbackStyle) -> Feedback:
    """Build what tells a policy the tags of its last query, in the wording of a prompt's style."""

    def feedback(example: Example, sql: str, error: str) -> tuple[tuple[str, ...], str]:
        found = diagnose(sql, example.gold_sql, columns_of(example), tree)
        text = feedback_text(
            example,
            found.tags,
            style=style,
            parsed=found.pred_parsed and found.gold_parsed,
            error=error,
        )
        return found.tags, text

    return feedback
