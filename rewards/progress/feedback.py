"""The diagnosis as the text of the next turn (Progress-SQL, appendix F)."""

from __future__ import annotations

from rewards.execution import columns_of
from rewards.progress.diagnosis import diagnose
from sqlenv.prompts import Undiagnosed, feedback_text
from sqlenv.types import Attempt, Example, SqlError, Wrapping


def feedback(
    example: Example, attempt: Attempt, *, form: Wrapping | None
) -> tuple[tuple[str, ...], str]:
    """Tell a policy the tags of its last query, and ask for another in a form (`Feedback`)."""
    found = diagnose(attempt.sql, example.gold_sql, columns_of(example))
    why: Undiagnosed = "close"
    is_error = isinstance(attempt.result, SqlError)  # also where sqlglot reads what SQLite does not
    if is_error or not (found.pred_parsed and found.gold_parsed):
        why = "fails" if is_error else "runs"  # also where a limit ended it
    text = feedback_text(example, found.tags, form=form, undiagnosed=why)
    return found.tags, text
