"""Answers in the forms that official evaluators read (`--official`)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from launch.evaluation.results import QuestionVerdict
from launch.texts import write_text
from sqlenv.sql.lexer import one_line

BIRD_MARK = "\t----- bird -----\t"
"""Stands between query and database in BIRD's file."""
_NO_QUERY = "SELECT"
"""Stands for a missing query: a blank line would shift every later line against its gold query."""
_SEPARATORS = re.compile(r"[\t\n\r]+")


def as_line(sql: str) -> str:
    """Write a query as Spider's file of predictions has it: on one line, without tabs."""
    if sql.strip() and not _SEPARATORS.search(sql):
        return sql
    # The evaluators split at line ends and tabs, also of those in quotes.
    return _SEPARATORS.sub(" ", one_line(sql)) or _NO_QUERY


def write_official(verdicts: Sequence[QuestionVerdict], folder: Path) -> None:
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
