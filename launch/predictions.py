"""Files of predictions: one a line, BIRD's JSON, and episodes of a run."""

from __future__ import annotations

import json
from collections import Counter
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


def pair_up(path: Path, examples: Sequence[Example]) -> list[tuple[Example, str]]:
    """Give each prediction of a file its question: by id if its lines have ids, else by order.

    Raises:
        UserError: An id is of no question, is there twice or only in some lines; or lines without
            ids are not as many as the questions.
    """
    predictions = _predictions(path)
    names = [name for name, _ in predictions if name is not None]
    if names:
        by_id = {example.id: example for example in examples}
        _check_ids(path, names, by_id, count=len(predictions))
        return [(by_id[name], sql) for name, sql in predictions if name is not None]
    if len(predictions) != len(examples):
        raise UserError(
            f"{path}: {len(predictions)} predictions for {len(examples)} questions; give one a "
            "line, in the order of --data, or a .jsonl file with the field `id`"
        )
    return [(example, sql) for (_, sql), example in zip(predictions, examples, strict=True)]


def _check_ids(
    path: Path, names: Sequence[str], known: Mapping[str, Example], *, count: int
) -> None:
    if len(names) < count:
        raise UserError(f"{path}: {count - len(names)} of {count} lines have no `id`; add it")
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"{path}: {len(unknown)} predictions are of no question of --data, the first is "
            f"{unknown[0]}; theirs are such as {min(known)}: check --data and --layout"
        )
    if len(set(names)) < count:
        twice, _ = Counter(names).most_common(1)[0]
        raise UserError(f"{path}: the id {twice} is there twice")


def read_predictions(path: Path) -> list[str]:
    """Read one query a line; empty lines of a file of SQL are empty queries.

    A file that ends in .json has BIRD's form.
    """
    return [sql for _, sql in _predictions(path)]


def _predictions(path: Path) -> list[tuple[str | None, str]]:
    """Read the id, where there is one, and the query of each line."""
    if path.suffix == ".json":
        return [(None, sql) for sql in read_bird(path)]
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from error
    if path.suffix != ".jsonl":
        return [(None, line) for line in lines]
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            sql = record["pred" if "pred" in record else "sql"]
            found.append((record.get("id"), str(sql)))
        except (ValueError, TypeError, LookupError, AttributeError):
            raise UserError(
                f"{path}:{number}: not a JSON object with `pred` or `sql`; write one a line"
            ) from None
    return [(None if name is None else str(name), sql) for name, sql in found]


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
