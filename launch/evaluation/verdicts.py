"""Answers on disk: predictions with their verdicts, and the forms that official evaluators read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.evaluation.outcomes import NO_REPLIES, Outcomes
from launch.texts import write_text
from minirl.run.files import keep_lines
from sqlenv.sql.lexer import one_line
from sqlenv.types import Example

PREDICTIONS = "predictions.jsonl"
"""The file of verdicts on predictions in a folder of results."""
BIRD_MARK = "\t----- bird -----\t"
"""Stands between query and database in BIRD's file."""
_NO_QUERY = "SELECT"
"""Stands for a missing query: a blank line would shift every later line against its gold query."""
_SEPARATORS = re.compile(r"[\t\n\r]+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One question's prediction and whether its result matches the gold result.

    Attributes:
        samples: All queries that were sampled, where there are several.
        turns: Turns of each sampled episode, where the model may call a tool: its calls, or 1.
        outcomes: What became of the replies.
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
    outcomes: Outcomes = NO_REPLIES

    @classmethod
    def of(
        cls,
        example: Example,
        sql: str,
        *,
        correct: bool,
        samples: Sequence[str] = (),
        turns: Sequence[int] = (),
        outcomes: Outcomes = NO_REPLIES,
    ) -> Verdict:
        """Make the verdict on a prediction for a question."""
        e = example
        known = (e.id, e.db_id, e.difficulty, e.question, e.gold_sql)
        several = tuple(samples) if len(samples) > 1 else ()
        return cls(*known, sql, correct, several, tuple(turns), outcomes)


def read_verdicts(path: Path) -> list[Verdict]:
    """Read the whole lines of a file of verdicts; a last line cut short is taken away."""
    return keep_lines(path, Verdict, advice="bring back the file of predictions, or move it away")


def accuracy(verdicts: Sequence[Verdict]) -> float:
    """Return the share of correct verdicts; 0 for none."""
    return sum(verdict.correct for verdict in verdicts) / max(len(verdicts), 1)


def as_line(sql: str) -> str:
    """Write a query as Spider's file of predictions has it: on one line, without tabs."""
    if sql.strip() and not _SEPARATORS.search(sql):
        return sql
    # The evaluators split at line ends and tabs, also of those in quotes.
    return _SEPARATORS.sub(" ", one_line(sql)) or _NO_QUERY


def write_official(verdicts: Sequence[Verdict], folder: Path) -> None:
    """Write predictions in each official program's form.

    `predictions.sql` is Spider's (test-suite-sql-eval: one query a line), `predictions_bird.json`
    BIRD's (DAMO-ConvAI and mini_dev: query and database by number), `predictions_omnisql.json`
    OmniSQL's (evaluate_bird.py, evaluate_spider.py: a list of queries a question, all samples where
    there are several). Questions of Spider 2 also have `predictions_spider2/`, the folder of
    Spider2's evaluate.py (a file a question).
    """
    lines = [as_line(verdict.sql) for verdict in verdicts]
    pairs = enumerate(zip(lines, verdicts, strict=True))
    bird = {str(number): f"{line}{BIRD_MARK}{verdict.db_id}" for number, (line, verdict) in pairs}
    omnisql = [
        {"db_id": v.db_id, "question": v.question, "pred_sqls": list(v.samples or [v.sql])}
        for v in verdicts
    ]
    write_text(folder / "predictions.sql", "\n".join(lines) + "\n")
    for name, value in (("bird", bird), ("omnisql", omnisql)):
        text = json.dumps(value, indent=1, ensure_ascii=False)
        write_text(folder / f"predictions_{name}.json", text + "\n")
    for verdict in verdicts:
        layout, _, name = verdict.id.partition("/")
        if layout == "spider2":
            write_text(folder / "predictions_spider2" / f"{name}.sql", verdict.sql + "\n")
