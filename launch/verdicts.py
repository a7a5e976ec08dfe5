"""Verdicts on predictions: what one is, the file of them, accuracy and its parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from minirl.run.files import keep_lines
from sqlenv.types import Example

PREDICTIONS = "predictions.jsonl"
"""The file of verdicts on predictions in a folder of results."""

# Spider's, BIRD's and SynSQL's words for difficulty.
_LEVELS = (
    *("easy", "medium", "hard", "extra"),
    *("simple", "moderate", "challenging", "complex", "highly complex"),
)


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
        return cls(
            example.id,
            example.db_id,
            example.difficulty,
            example.question,
            example.gold_sql,
            sql,
            correct,
            tuple(samples) if len(samples) > 1 else (),
            tuple(turns),
        )

    @property
    def answer_turns(self) -> int:
        """Return the replies of the episode that answers; 0 where the model has no tool."""
        return turns_of(self.sql, self.samples, self.turns)


def turns_of(sql: str, samples: Sequence[str], turns: Sequence[int]) -> int:
    """Return the replies of the first episode that answers with a query, else of the first one.

    Args:
        sql: The query.
        samples: The query of each episode, where there are several.
        turns: The replies of each episode; none where the model has no tool.
    """
    if not turns:
        return 0
    return turns[samples.index(sql)] if sql in samples else turns[0]


def read_verdicts(path: Path) -> list[Verdict]:
    """Read the whole lines of a file of verdicts; a last line cut short is taken away.

    Raises:
        UserError: It holds something else.
    """
    return keep_lines(path, Verdict, advice="bring back the file of predictions, or move it away")


def accuracy(verdicts: Sequence[Verdict]) -> float:
    """Return the share of correct verdicts; 0 for none."""
    return sum(verdict.correct for verdict in verdicts) / max(len(verdicts), 1)


def breakdown(verdicts: Sequence[Verdict]) -> Mapping[str, Mapping[str, tuple[int, float]]]:
    """Return (questions, accuracy) overall, by difficulty, by database and by turns.

    Turns are the replies of an answer's episode (paper 004, table 3 and figure 5); there is no such
    part where the model has no tool.
    """

    def by(key: Callable[[Verdict], str]) -> dict[str, tuple[int, float]]:
        parts: defaultdict[str, list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            parts[key(verdict)].append(verdict)
        return {name: (len(part), accuracy(part)) for name, part in sorted(parts.items(), key=rank)}

    return {
        "overall": by(lambda _: "all"),
        "difficulty": by(lambda verdict: verdict.difficulty or "unknown"),
        "database": by(lambda verdict: verdict.db_id),
        **(
            {"turns": by(lambda verdict: str(verdict.answer_turns))}
            if any(verdict.turns for verdict in verdicts)
            else {}
        ),
    }


def rank(part: tuple[str, Any]) -> tuple[int, str]:
    """Order levels of difficulty from easy to hard, all other names by the alphabet."""
    name = part[0]
    return (_LEVELS.index(name.lower()) if name.lower() in _LEVELS else len(_LEVELS), name)


def accuracy_table(verdicts: Sequence[Verdict], interval: Sequence[float]) -> RichTable:
    """Lay a breakdown out for the terminal, with the interval of the whole."""
    table = RichTable("", "questions", "share", "execution accuracy")
    for column in table.columns[1:]:
        column.justify = "right"
    for heading, parts in breakdown(verdicts).items():
        table.add_section()
        for name, (count, right) in parts.items():
            part = f"{100 * count / len(verdicts):.1f} %"
            table.add_row(f"{heading}: {name}", f"{count:,}", part, f"{100 * right:.1f} %")
        if heading == "overall":
            low, high = interval
            table.add_row("95 % interval", "", "", f"{100 * low:.1f} to {100 * high:.1f} %")
    return table
