"""`trajectories.jsonl` of an evaluation: what `launch.report` shows of each question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from launch.evaluation.results import QuestionVerdict
from launch.evaluation.sources import RECORDED_SAMPLES, Sampled
from launch.reporting.record import RECORDS, RECORDS_VERSION, question, shown
from minirl.run.files import whole_file
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import run_many
from sqlenv.executor import Executor
from sqlenv.types import Example, Observation, Result, Table

_CHUNK = 32  # questions whose results are in memory together
_LIMITS = {"timeout_s": 10.0, "max_bytes": 4_000_000}
"""A result beyond these is named by how it ended, and not shown."""
_KEPT = ("id", "evidence", "gold_result", "prompt", "trajectories")
"""What `predictions.jsonl` does not say of a question."""

Row = tuple[Example, Sampled, QuestionVerdict, Sequence[bool]]
"""A question, its samples, the verdict, and which of the samples are right."""


def write_trajectories(
    folder: Path, rows: Sequence[Row], *, prompts: Sequence[Observation], limits: ExecutorConfig
) -> None:
    """Write down each question, its first samples and their results."""
    update = {name: min(value, getattr(limits, name)) for name, value in _LIMITS.items()}
    with (
        Executor(limits.model_copy(update=update)) as executor,
        whole_file(folder / RECORDS) as file,
    ):
        file.write(json.dumps({"step": 0, "version": RECORDS_VERSION}) + "\n")
        for at in range(0, len(rows), _CHUNK):
            part = rows[at : at + _CHUNK]
            asked = [(row[0], sql) for row in part for sql in _queries(row)]
            results = iter(run_many(executor.execute_many, asked))
            for number, row in enumerate(part, at):
                own = list(islice(results, len(_queries(row))))
                line = {"step": number + 1, **_line(row, own)}
                if prompts:
                    line["prompt"] = "\n".join(one.content for one in prompts[number])
                file.write(json.dumps(line) + "\n")


def _queries(row: Row) -> list[str]:
    """List what is run anew: the gold query and the first samples, unless they are recorded."""
    example, sampled, _, _ = row
    return [] if sampled.line else [example.gold_sql, *sampled.queries[:RECORDED_SAMPLES]]


def _line(row: Row, results: Sequence[Result]) -> Mapping[str, Any]:
    example, sampled, judged, right = row
    if sampled.line is not None:
        # The verdicts of the evaluation take the place of the environment's.
        for member, correct in zip(sampled.line["trajectories"], right, strict=False):
            for turn in member["turns"][-1:]:
                if turn.get("kind", "answer") == "answer":
                    turn["correct"] = correct
        return {key: sampled.line[key] for key in _KEPT if key in sampled.line}
    gold, *found = results
    turns = []
    replies = sampled.replies or [""] * len(found)
    ends = sampled.ends or ["stop"] * len(found)
    places = sampled.places or [-1] * len(found)
    columns = (sampled.queries, replies, ends, places, found, right)
    for sql, reply, end, place, result, correct in zip(*columns, strict=False):
        is_answer = sql == judged.sql
        tags = [tag for tag in judged.tags if tag != "none"] if is_answer and not correct else []
        is_too_large = is_answer and not isinstance(result, Table) and judged.status == "ok"
        seen = {"status": "ok"} if is_too_large else shown(result)
        said = {"reply": reply, "finish": end} if sampled.replies else {}
        said |= {"place": place} if place >= 0 else {}
        known = {"sql": sql, "kind": "answer", "correct": correct, "tags": tags}
        turns.append({**said, **known, "result": seen})
    asked = question(example, gold if example.gold_sql else None)
    asked["trajectories"] = [{"turns": [turn]} for turn in turns]
    return {key: asked[key] for key in _KEPT if key in asked}
