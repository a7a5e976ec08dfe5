"""`trajectories.jsonl` of an evaluation: what `launch.report` shows of each question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from launch.evaluation.results import QuestionVerdict
from launch.evaluation.sources import RECORDED_SAMPLES, Sampled
from launch.reporting.record import RECORDS, RECORDS_VERSION, question, shown
from minirl.run.files import whole_file
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import transpile
from sqlenv.executor import Executor
from sqlenv.types import Example, Observation, Result, SqlError, Table

_CHUNK = 32  # questions whose results are in memory together
_LIMITS = {"timeout_s": 10.0, "max_bytes": 4_000_000}
"""A result beyond these is named by how it ended, and not shown."""

_Row = tuple[Example, Sampled, QuestionVerdict, Sequence[bool]]


def write_trajectories(
    folder: Path, rows: Sequence[_Row], *, prompts: Sequence[Observation], limits: ExecutorConfig
) -> None:
    """Write down each question, its first samples and their results.

    Rows are example, samples, verdict, and which of the samples are right.
    """
    update = {name: min(value, getattr(limits, name)) for name, value in _LIMITS.items()}
    with (
        Executor(limits.model_copy(update=update)) as executor,
        whole_file(folder / RECORDS) as file,
    ):
        file.write(json.dumps({"step": 0, "version": RECORDS_VERSION}) + "\n")
        for at in range(0, len(rows), _CHUNK):
            part = rows[at : at + _CHUNK]
            results = _run(part, executor)
            for number, row in enumerate(part, at):
                own = list(islice(results, len(_queries(row))))
                line = {"step": number + 1, **_line(row, own)}
                if prompts:
                    line["prompt"] = "\n".join(one.content for one in prompts[number])
                file.write(json.dumps(line) + "\n")


def _queries(row: _Row) -> list[str]:
    """List what is run anew: the gold query and the first samples, unless they are recorded."""
    example, sampled, _, _ = row
    return [] if sampled.line else [example.gold_sql, *sampled.queries[:RECORDED_SAMPLES]]


def _run(rows: Sequence[_Row], executor: Executor) -> Iterator[Result]:
    """Run queries as the questions' dialects say; one without SQL is an error."""
    asked = [(row[0], sql) for row in rows for sql in _queries(row)]
    texts = [transpile(sql, e.dialect) if sql else SqlError("no SQL") for e, sql in asked]
    pairs = [
        (example.database, text)
        for (example, _), text in zip(asked, texts, strict=True)
        if isinstance(text, str)
    ]
    found = iter(executor.execute_many(pairs))
    return (next(found) if isinstance(text, str) else text for text in texts)


def _line(row: _Row, results: Sequence[Result]) -> Mapping[str, Any]:
    example, sampled, judged, right = row
    if sampled.line is not None:
        # The verdicts of the evaluation take the place of the environment's.
        for member, correct in zip(sampled.line["trajectories"], right, strict=False):
            for turn in member["turns"][-1:]:
                if turn.get("kind", "answer") == "answer":
                    turn["correct"] = correct
        return sampled.line
    gold, *found = results
    replies = sampled.replies or [""] * len(found)
    answers = zip(sampled.queries, replies, found, right, strict=False)
    return {
        **question(example, gold if example.gold_sql else None),
        "trajectories": [
            {"turns": [_turn(judged, sql, reply, result, correct=correct)]}
            for sql, reply, result, correct in answers
        ],
    }


def _turn(
    judged: QuestionVerdict, sql: str, reply: str, result: Result, *, correct: bool
) -> dict[str, Any]:
    is_answer = sql == judged.sql
    is_too_large = is_answer and not isinstance(result, Table) and judged.predicted == "ok"
    return {
        **({"reply": reply} if reply else {}),
        "sql": sql,
        "kind": "answer",
        "correct": correct,
        "tags": [tag for tag in judged.tags if tag != "none"] if is_answer and not correct else [],
        "result": {"status": "ok"} if is_too_large else shown(result),
    }
