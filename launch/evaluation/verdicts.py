"""Verdicts on predictions: what one is, the file of them, and their accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minirl.run.files import keep_lines
from sqlenv.types import Example

PREDICTIONS = "predictions.jsonl"
"""The file of verdicts on predictions in a folder of results."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One question's prediction and whether its result matches the gold result.

    Attributes:
        samples: All queries that were sampled, where there are several.
        turns: Replies of each sampled episode, where the model may call a tool.
    """

    id: str
    db_id: str
    difficulty: str
    question: str
    gold: str
    sql: str
    correct: bool
    samples: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        example: Example,
        sql: str,
        *,
        correct: bool,
        samples: Sequence[str] = (),
        turns: Sequence[int] = (),
    ) -> Verdict:
        """Make the verdict on a prediction for a question."""
        e = example
        known = (e.id, e.db_id, e.difficulty, e.question, e.gold_sql)
        return cls(*known, sql, correct, tuple(samples) if len(samples) > 1 else (), tuple(turns))


def read_verdicts(path: Path) -> list[Verdict]:
    """Read the whole lines of a file of verdicts; a last line cut short is taken away."""
    return keep_lines(path, Verdict, advice="bring back the file of predictions, or move it away")


def accuracy(verdicts: Sequence[Verdict]) -> float:
    """Return the share of correct verdicts; 0 for none."""
    return sum(verdict.correct for verdict in verdicts) / max(len(verdicts), 1)
