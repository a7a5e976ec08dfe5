"""`trajectories.jsonl` of an evaluation: what `launch.report` shows of each question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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

_CHUNK = 32
"""Questions whose results are in memory together."""
_LIMITS = {"timeout_s": 10.0, "max_bytes": 4_000_000}
"""A result beyond these is named by how it ended, and not shown."""


def write_trajectories(
    folder: Path,
    examples: Sequence[Example],
    sampled: Sequence[Sampled],
    judged: Sequence[QuestionVerdict],
    right: Sequence[Sequence[bool]],
    *,
    prompts: Sequence[Observation],
    limits: ExecutorConfig,
) -> None:
    """Write down each question, its first samples and their results; `right` is by sample."""
    update = {name: min(value, getattr(limits, name)) for name, value in _LIMITS.items()}
    with (
        Executor(limits.model_copy(update=update)) as executor,
        whole_file(folder / RECORDS) as file,
    ):
        file.write(json.dumps({"step": 0, "version": RECORDS_VERSION}) + "\n")
        rows = list(zip(examples, sampled, judged, right, strict=True))
        for at in range(0, len(rows), _CHUNK):
            part = rows[at : at + _CHUNK]
            for number, line in enumerate(_lines(part, executor), at):
                prompt = {"prompt": _text(prompts[number])} if prompts else {}
                told = {"step": number + 1, **prompt, **line}
                file.write(json.dumps(told) + "\n")


_Row = tuple[Example, Sampled, QuestionVerdict, Sequence[bool]]


def _lines(rows: Sequence[_Row], executor: Executor) -> Iterator[Mapping[str, Any]]:
    asked = [
        (example, sql)
        for example, sampled, _, _ in rows
        if sampled.line is None
        for sql in (example.gold_sql, *sampled.queries[:RECORDED_SAMPLES])
    ]
    results = _run(asked, executor)
    for example, sampled, judged, right in rows:
        if sampled.line is not None:
            yield _with_verdicts(sampled.line, right)
            continue
        gold = next(results)
        told = question(example, gold if example.gold_sql else None)
        queries = sampled.queries[:RECORDED_SAMPLES]
        replies = sampled.replies or [""] * len(queries)
        yield {
            **told,
            "trajectories": [
                {"turns": [_turn(sql, reply, next(results), judged, correct=correct)]}
                for sql, reply, correct in zip(queries, replies, right, strict=False)
            ],
        }


def _run(asked: Sequence[tuple[Example, str]], executor: Executor) -> Iterator[Result]:
    """Run queries as the questions' dialects say; one without SQL is an error."""
    texts = [
        transpile(sql, example.dialect) if sql else SqlError("no SQL") for example, sql in asked
    ]
    pairs = [
        (example.database, text)
        for (example, _), text in zip(asked, texts, strict=True)
        if isinstance(text, str)
    ]
    found = iter(executor.execute_many(pairs))
    return (next(found) if isinstance(text, str) else text for text in texts)


def _turn(
    sql: str, reply: str, result: Result, judged: QuestionVerdict, *, correct: bool
) -> dict[str, Any]:
    is_answer = sql == judged.sql
    told = shown(result)
    if is_answer and not isinstance(result, Table) and judged.predicted == "ok":
        told = {"status": "ok"}  # too large to show
    tags = [tag for tag in judged.tags if tag != "none"] if is_answer and not correct else []
    return {
        **({"reply": reply} if reply else {}),
        "sql": sql,
        "kind": "answer",
        "correct": correct,
        "tags": tags,
        "result": told,
    }


def _with_verdicts(line: Mapping[str, Any], right: Sequence[bool]) -> Mapping[str, Any]:
    """Put the verdicts of the evaluation in the place of the environment's."""
    for member, correct in zip(line["trajectories"], right, strict=False):
        for turn in member["turns"][-1:]:
            if turn.get("kind", "answer") == "answer":
                turn["correct"] = correct
    return line


def _text(prompt: Observation) -> str:
    return "\n".join(message.content for message in prompt)
