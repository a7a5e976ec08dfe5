"""An episode as `trajectories.jsonl` holds it: the question, and every reply with what it gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewards.astra import AstraReward
from rewards.compose import Reward
from rewards.expo.reward import ExpoReward
from rewards.progress.reward import ProgressiveReward
from sqlenv.envs.diagnosed import describe_failure
from sqlenv.types import Attempt, Episode, Example, Result, Table, Value, status_of
from sqlenv.witness.refutation import Refutation

RECORDS = "trajectories.jsonl"
RECORDS_VERSION = 2
"""Of the lines' form, which the first line names; version 1 had no first line and no groups."""
ROWS, WITNESS_ROWS = 20, 50
_COLUMNS = 100
_CELL_CHARS = 200
_TABLE_CHARS = 10_000
_LARGEST = 2**53  # from here on JavaScript rounds whole numbers
_PLACES = 6


def episode_record(
    episode: Episode,
    gold: Result,
    tagger: ProgressiveReward,
    reward: Reward,
    refutation: Callable[[Example, Attempt], Refutation | None],
) -> dict[str, Any]:
    """Write a final episode down: `example`, which all episodes of a question share, and `turns`.

    `tagger` names in what a wrong query differs from the gold query; `reward` is what
    the episode is scored by; `refutation` shows a witness against what looks right.
    """
    parts = _parts(reward, episode)
    turns = [
        {
            "reply": attempt.text,
            "sql": attempt.sql,
            **({"place": attempt.answer.place} if attempt.answer.place >= 0 else {}),
            "kind": attempt.kind,
            "correct": attempt.correct,
            "tags": list(_tags(episode.example, attempt, tagger)),
            "parts": {name: round(value, _PLACES) for name, value in part.items()},
            "result": shown(attempt.result),
            **(_witness(found) if (found := refutation(episode.example, attempt)) else {}),
        }
        for attempt, part in zip(episode.attempts, parts, strict=True)
    ]
    return {"example": question(episode.example, gold), "turns": turns}


def question(example: Example, gold: Result | None) -> dict[str, Any]:
    """Write a question down, with what its gold query gives, if it has one."""
    return {
        "id": example.id,
        "db_id": example.db_id,
        "difficulty": example.difficulty,
        "question": example.question,
        **({"evidence": example.evidence} if example.evidence else {}),
        "gold": example.gold_sql,
        **({"gold_result": shown(gold)} if gold is not None else {}),
    }


def _witness(refutation: Refutation) -> dict[str, Any]:
    tables = {name: shown(table, WITNESS_ROWS) for name, table in refutation.tables.items()}
    results = {"gold_result": shown(refutation.gold), "result": shown(refutation.predicted)}
    return {"witness": {"number": refutation.number, "tables": tables, **results}}


def shown(result: Result, most_rows: int = ROWS) -> dict[str, Any]:
    """Write a result with its status: the message, or the first rows, bounded in size."""
    status = status_of(result)
    if not isinstance(result, Table):
        return {"status": status, "message": describe_failure(result)}
    rows: list[list[Any]] = []
    taken = 0
    for row in result.rows[:most_rows]:
        cells = [_cell(value) for value in row[:_COLUMNS]]
        taken += sum(len(str(cell)) for cell in cells)
        if rows and taken > _TABLE_CHARS:
            break
        rows.append(cells)
    return {
        "status": status,
        "columns": [_cut(name) for name in result.columns[:_COLUMNS]],
        "rows": rows,
        "count": len(result.rows),
        "width": result.width,
    }


def _cell(value: Value) -> Any:
    """Write a value for JSON; what it has no form for is an object with one key."""
    if isinstance(value, bytes):
        return {"blob": _cut(value[:_CELL_CHARS].hex())}
    if isinstance(value, str):
        return _cut(value)
    is_large = isinstance(value, int) and abs(value) >= _LARGEST
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return {"number": str(value)} if is_large or is_odd else value


def _cut(text: str) -> str:
    return text if len(text) <= _CELL_CHARS else f"{text[:_CELL_CHARS]}… ({len(text):,} characters)"


def _tags(example: Example, attempt: Attempt, tagger: ProgressiveReward) -> Sequence[str]:
    if attempt.correct or not attempt.sql or not example.gold_sql:
        return ()
    return attempt.tags or tagger.align(example, attempt.sql).diagnosis.tags


def _parts(reward: Reward, episode: Episode) -> Sequence[Mapping[str, float]]:
    """Name what each reply of an episode earned, as far as its reward tells replies apart."""
    example, attempts = episode.example, episode.attempts
    if isinstance(reward, ProgressiveReward):
        found = (reward.align(example, attempt.sql) for attempt in attempts)
        return [
            {"alignment F": one.value, "structure": one.diagnosis.struct, "words": one.lexical}
            for one in found
        ]
    if isinstance(reward, ExpoReward):
        verdicts = (reward.judge(example, attempt) for attempt in attempts)
        return [{f"clauses, {one.case}": reward.mean_reward(one)} for one in verdicts]
    if isinstance(reward, AstraReward):
        scores = reward.steps(episode)
        # A final query that repeats the last call is no step of its own.
        return [{"step score": scores[n]} if n < len(scores) else {} for n in range(len(attempts))]
    return [{} for _ in attempts]
