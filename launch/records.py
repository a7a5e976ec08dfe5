"""The lines of `trajectories.jsonl`: what was asked, and every reply with what it gave and earned.

Training writes the groups of sampled steps, an evaluation all its questions, and the page reads
both; docs/reports.md describes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minirl.run.files import whole_file
from rewards.execution import columns_of
from rewards.progress.diagnosis import diagnose
from sqlenv.evaluators.comparators import CaseVerdict
from sqlenv.types import (
    Attempt,
    Episode,
    Example,
    Observation,
    Result,
    RunQuery,
    Table,
    Value,
    describe_failure,
)
from sqlenv.witness.refutation import rows_on

# Evaluating an endpoint or a file needs no JAX.
if TYPE_CHECKING:
    from launch.evaluation.answers import Sampled
    from launch.evaluation.results import QuestionVerdict, Report
    from minirl.run.metrics import JsonLines
    from minirl.train.advantages import Detokenize
    from minirl.types import TokenRow, Trajectory

RECORDS = "trajectories.jsonl"
RECORDS_VERSION = 2
"""Of the lines' form, which the first line names; version 1 had no first line and no groups."""
ROWS, WITNESS_ROWS = 20, 50
_COLUMNS = 100
_CELL_CHARS = 200
_TABLE_CHARS = 10_000
_LARGEST = 2**53  # from here on JavaScript rounds whole numbers
_PLACES = 6


def episode_record(episode: Episode, gold: Result, execute: RunQuery) -> dict[str, Any]:
    """Write a final episode down: `example`, which all episodes of a question share, and `turns`,
    with the tags of wrong queries; `execute` reads a witness against what looks right.
    """
    turns = [
        {
            "reply": attempt.text,
            "sql": attempt.sql,
            **({"place": attempt.answer.place} if attempt.answer.place >= 0 else {}),
            "kind": attempt.kind,
            "correct": attempt.correct,
            "tags": list(_tags(episode.example, attempt)),
            "result": shown(attempt.result),
            **({"witness": _witness(episode.example, attempt, execute)} if attempt.refuted else {}),
        }
        for attempt in episode.attempts
    ]
    return {"example": question(episode.example, shown(gold)), "turns": turns}


def question(example: Example, gold: Mapping[str, Any] | None) -> dict[str, Any]:
    """Write a question down, with what its gold query gives, if that is known (`shown`)."""
    return {
        **facts_of(example),
        **({"evidence": example.evidence} if example.evidence else {}),
        **({"gold_result": gold} if gold else {}),
    }


def facts_of(one: Example | QuestionVerdict) -> dict[str, Any]:
    """Take out of a record what says which question it is of."""
    names = ("id", "db_id", "difficulty", "question", "gold_sql")
    return {name: getattr(one, name) for name in names}


def _witness(example: Example, attempt: Attempt, execute: RunQuery) -> dict[str, Any]:
    against = attempt.refuted
    assert against is not None
    tables, gold = rows_on(against.database, example, attempt.sql, execute)
    return {
        "number": against.number,
        "tables": {name: shown(table, WITNESS_ROWS) for name, table in tables.items()},
        "gold_result": shown(gold),
        "result": shown(against.result),
    }


def shown(result: Result, most_rows: int = ROWS) -> dict[str, Any]:
    """Write a result with its status: the message, or the first rows, bounded in size."""
    status = result.status
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


def _tags(example: Example, attempt: Attempt) -> Sequence[str]:
    """Name in what a wrong query differs from the gold query."""
    if attempt.correct or not attempt.sql or not example.gold_sql:
        return ()
    return attempt.tags or diagnose(attempt.sql, example.gold_sql, columns_of(example)).tags


STEP_BYTES = 1_900_000
"""Most bytes of a sampled step, but for its first group: 51 of them stay under 100 MB."""


class StepRecorder:
    """Writes the groups of a training run's sampled steps into its folder."""

    def __init__(self, folder: Path, decode: Detokenize) -> None:
        self._path, self._decode = folder / RECORDS, decode
        self._lines: JsonLines | None = None

    def write(
        self,
        step: int,
        groups: Sequence[Sequence[Trajectory]],
        rows: Sequence[Sequence[TokenRow] | None],
    ) -> None:
        """Write down a step: its groups, whose episodes have records, and the rows of each of
        them that took part in the update.
        """
        if self._lines is None:
            from minirl.run.metrics import JsonLines

            self._lines = JsonLines(self._path, resume_step=step - 1)
            if not self._path.exists() or not self._path.stat().st_size:  # as a full disk leaves it
                self._lines.write(0, {"version": RECORDS_VERSION})
        lines = (
            group_line(group, self._decode, own) for group, own in zip(groups, rows, strict=True)
        )
        for number, line in enumerate(within_limit(lines)):
            self._lines.write(step, {"group": number, **line})


def within_limit(lines: Iterable[Mapping[str, Any]], limit: int = STEP_BYTES) -> Iterator[Any]:
    """Give the first lines that together take so many bytes, and one in any case."""
    taken = 0
    for number, line in enumerate(lines):
        taken += len(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace"))
        if number and taken > limit:
            return
        yield line


def group_line(
    group: Sequence[Trajectory], decode: Detokenize, rows: Sequence[TokenRow] | None = None
) -> dict[str, Any]:
    """Write down the trajectories of one example, whose episodes have a record and a score; there
    are no rows where the group took no part in an update.
    """
    members = []
    for number, trajectory in enumerate(group):
        record, score = trajectory.episode.record, trajectory.episode.score
        versions = trajectory.versions
        spans = [[one.turn, one.start, one.end, round(one.value, _PLACES)] for one in score.spans]
        member = {
            "reward": round(score.total, _PLACES),
            "parts": {name: round(value, _PLACES) for name, value in score.parts.items()},
            "correct": score.correct,
            **({"spans": spans} if spans else {}),
            "advantage": _mean_advantage(rows[number]) if rows else None,
            "ended": trajectory.ended,
            "versions": [min(versions, default=0), max(versions, default=0)],
            "turns": [],
        }
        for turn, said in zip(trajectory.turns, record["turns"], strict=True):
            # The first observation stands once for the group.
            observed = {"observation": decode(turn.observation_ids)} if member["turns"] else {}
            own = {"reply": turn.reply.text, "finish": turn.reply.finish, **said}
            member["turns"].append({**observed, **own})
        members.append(member)
    prompt = decode(group[0].turns[0].observation_ids)
    return {**group[0].episode.record["example"], "prompt": prompt, "trajectories": members}


def _mean_advantage(row: TokenRow) -> float | None:
    each = np.broadcast_to(row.advantage, row.ids.shape)[row.is_action]
    return round(float(each.mean()), _PLACES) if each.size else None


RECORDED_SAMPLES = 8
"""Samples of a question of an evaluation that are written down."""


def write_answers(
    folder: Path, lines: Sequence[Mapping[str, Any]], prompts: Sequence[Observation]
) -> None:
    """Write down the questions of an evaluation, and what they were asked by."""
    with whole_file(folder / RECORDS) as file:
        file.write(json.dumps({"step": 0, "version": RECORDS_VERSION}) + "\n")
        for number, (line, prompt) in enumerate(zip(lines, prompts, strict=True), 1):
            text = "\n".join(message.content for message in prompt)
            file.write(json.dumps({"step": number, **line, "prompt": text}) + "\n")


def is_right(outcome: CaseVerdict) -> bool:
    """Tell whether a query is right by the first measure; it is not where nothing judged it."""
    return next(iter(outcome.scores.values()), None) == 1


def answer_line(
    example: Example, sampled: Sampled, verdict: QuestionVerdict, outcomes: Sequence[CaseVerdict]
) -> dict[str, Any]:
    """Write down a question of an evaluation and its first samples, with what came of each: the
    first rows of its result and of the gold query's, as `shown` has them.
    """
    line, queries = sampled.line, sampled.queries
    # Which of several samples answers, where that is one of them.
    is_chosen = len(queries) > 1 and verdict.sql in queries
    chosen = {"chosen": queries.index(verdict.sql)} if is_chosen else {}
    if line is not None:
        # The verdicts of the evaluation take the place of the environment's.
        for member, found in zip(line["trajectories"], outcomes, strict=False):
            member["correct"] = is_right(found)
            for turn in member["turns"][-1:]:
                if turn.get("kind", "answer") == "answer":
                    turn["correct"] = is_right(found)
        return {**line, **chosen}
    members = []
    for number, outcome in enumerate(outcomes[:RECORDED_SAMPLES]):
        said: dict[str, Any] = {}
        if sampled.replies:
            end = sampled.ends[number] if sampled.ends else "stop"
            said = {"reply": sampled.replies[number], "finish": end}
            if (place := sampled.places[number]) >= 0:
                said["place"] = place
        sql, correct = queries[number], is_right(outcome)
        tags = () if correct or sql != verdict.sql else verdict.tags
        turn = _answer(sql, tags, outcome.predicted, correct=correct)
        members.append({"turns": [{**said, **turn}]})
    asked = question(example, outcomes[0].gold if example.gold_sql else None)
    return {**asked, **chosen, "trajectories": members}


def read_answers(
    path: Path | None, report: Report, tell: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Read the questions of an evaluation as `answer_line` wrote them; of one that is not there, or
    has lost a field, the verdict says what was asked and answered.
    """
    groups = read_groups(path, tell) if path else ()
    kept = {str(one.get("id")): one for _, part in groups for one in part}
    found = []
    for one in report.questions:
        ended = {"status": one.status} if one.status else None
        turn = _answer(one.sql, one.tags, ended, correct=one.scores.get(report.first) == 1)
        line = {**facts_of(one), "trajectories": [{"turns": [turn]}]}
        found.append(line | kept.get(one.id, {}))
    return found


def _answer(
    sql: str, tags: Sequence[str], result: Mapping[str, Any] | None, *, correct: bool
) -> dict[str, Any]:
    named = [tag for tag in tags if tag != "none"]
    said = {"sql": sql, "kind": "answer", "correct": correct, "tags": named}
    return said if result is None else {**said, "result": result}


def read_groups(
    path: Path, tell: Callable[[str], object]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Read what was written down by its steps, and tell what is the matter with the file."""
    damage: list[str] = []
    lines = read_json_lines(path, damage.append)
    if next(lines, {}).get("version") != RECORDS_VERSION:
        tell("no whole groups that can be read, or of an older version; they are not shown")
        return
    groups = (line for line in lines if _is_group(line))
    for step, part in groupby(groups, key=lambda line: line.get("step", 0)):
        yield step, [*part]
    for words in damage:
        tell(words)


def _is_group(line: Mapping[str, Any]) -> bool:
    members = line.get("trajectories")
    return isinstance(members, list) and all(isinstance(one, dict) for one in members)


def read_json_lines(
    path: Path, tell: Callable[[str], object] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Read objects, one a line, up to a damaged line, as a run that goes on may leave its last one,
    which is told. No file has no lines.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                tell(f"cut off or damaged in line {number}; what stands before it is shown")
                return
            if isinstance(found, dict):
                yield found
