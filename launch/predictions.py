"""Files of predictions in other forms than one a line: BIRD's JSON, and episodes of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.workbench import Turn
from sqlenv.config import AgenticConfig
from sqlenv.envs.agentic import Call, read_call
from sqlenv.errors import UserError
from sqlenv.parse import extract_sql
from sqlenv.types import Example

BIRD_MARK = "\t----- bird -----\t"
_TOOLS = (
    AgenticConfig(),
    AgenticConfig(tool="execute_sql", finish_tool="finish"),
)


def read_bird(path: Path) -> list[str]:
    """Read BIRD's form, `{"0": "SQL\\t----- bird -----\\tdb_id"}`, in the order of its numbers.

    An entry that is no text is an empty query, as in BIRD's evaluator.

    Raises:
        UserError: It is not of this form, or numbers are left out.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        queries = {int(number): query for number, query in found.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        raise UserError(
            f'{path}: not of BIRD\'s form {{"0": "SQL{BIRD_MARK!r:.20}…db_id"}}; one query a line '
            "goes into a file that does not end in .json"
        ) from None
    if sorted(queries) != list(range(len(queries))):
        raise UserError(f"{path}: its numbers should run from 0 to {len(queries) - 1}")
    return [_bird_query(queries[number]) for number in range(len(queries))]


def is_trajectories(path: Path) -> bool:
    """Tell whether a file holds episodes of several turns: its first line has `turns`."""
    if path.suffix != ".jsonl":
        return False
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "turns" in first


def read_trajectories(
    path: Path, examples: Sequence[Example]
) -> list[tuple[Mapping[str, Any], Example, list[Turn]]]:
    """Read episodes as a run writes them, and find the question of each by its `id`.

    Returns:
        The record, the question and the turns of each.

    Raises:
        UserError: A line is not of this form, or asks for another question than `examples` has.
    """
    known = {example.id: example for example in examples}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name, gold = record["id"], record["gold"]
            turns = [_turn(turn) for turn in record["turns"]]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise UserError(
                f"{path}:{number}: not an episode with `id`, `gold` and `turns`"
            ) from None
        example = known.get(name) if isinstance(name, str) else None
        if example is None or example.gold_sql != gold:
            raise UserError(
                f"{path}:{number}: question {name} is not in --data, or has another gold query; "
                "give the question file that the run was trained on"
            )
        found.append((record, example, turns))
    return found


def _bird_query(entry: Any) -> str:
    return entry.partition(BIRD_MARK)[0] if isinstance(entry, str) else ""


def _turn(record: Mapping[str, Any]) -> Turn:
    text = str(record["reply"])
    kind = record.get("kind", "answer")
    if kind not in ("answer", "call", "bad_call"):
        raise ValueError(kind)
    sql = record.get("sql")
    return Turn(text, sql if isinstance(sql, str) else _sql(text, is_call=kind == "call"), kind)


def _sql(text: str, *, is_call: bool) -> str:
    """Find the query of a reply whose record does not have it apart."""
    calls = [call for tool in _TOOLS if isinstance(call := read_call(text, tool), Call)]
    chosen = next((call.sql for call in calls if call.is_final != is_call), "")
    if is_call:
        return chosen
    return extract_sql(text, "sql_tag") or extract_sql(text, "fence") or chosen
