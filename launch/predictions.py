"""Files of predictions: one a line, BIRD's JSON, and episodes of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from launch.texts import read_lines, read_text
from rewards.workbench import Turn
from sqlenv.errors import UserError
from sqlenv.types import AttemptKind, Example

BIRD_MARK = "\t----- bird -----\t"

Paired = list[tuple[Example, str]]
Played = tuple[Mapping[str, Any], Example, list[Turn]]
"""The record of an episode, its question and its turns."""


@dataclass(frozen=True, slots=True)
class _Prediction:
    """One query, and what its line says of the question.

    Attributes:
        number: Of the line, from 1.
        question: The text, or database and text; empty where the line does not have it.
    """

    number: int
    sql: str
    id: str | None = None
    question: tuple[str, ...] = ()


def pair_up(path: Path, examples: Sequence[Example]) -> Paired:
    """Give each prediction of a file its question.

    By `id` if its lines have ids, else by `question` (and `db_id`) if they have one that `examples`
    has, else by order.

    Raises:
        UserError: An id or a question is unknown, an id is there twice or only in some lines; or
            lines without either are not as many as the questions.
    """
    predictions = _predictions(path)
    if any(one.id is not None for one in predictions):
        return _by_id(path, predictions, examples)
    if found := _by_question(path, predictions, examples):
        return found
    if len(predictions) != len(examples):
        raise UserError(
            f"{path}: {len(predictions)} predictions for {len(examples)} questions; give one a "
            "line, in the order of --data, or a .jsonl file with the field `id` or `question`"
        )
    return [(example, one.sql) for one, example in zip(predictions, examples, strict=True)]


def _by_id(path: Path, predictions: Sequence[_Prediction], examples: Sequence[Example]) -> Paired:
    known = {example.id: example for example in examples}
    names = [one.id for one in predictions if one.id is not None]
    count = len(predictions)
    if len(names) < count:
        raise UserError(f"{path}: {count - len(names)} of {count} lines have no `id`; add it")
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"{path}: {len(unknown)} predictions are of no question of --data, the first is "
            f"{unknown[0]}; theirs are such as {min(known)}: check --data and --layout"
        )
    if len(set(names)) < count:
        twice, _ = Counter(names).most_common(1)[0]
        raise UserError(f"{path}: the id {twice} is there twice; leave one out")
    return [(known[str(one.id)], one.sql) for one in predictions]


def _by_question(
    path: Path, predictions: Sequence[_Prediction], examples: Sequence[Example]
) -> Paired | None:
    """Find the questions by their text; None where it does not tell them, or tells none."""
    named: list[tuple[str, ...]] = [(example.question,) for example in examples]
    named += [(example.db_id, example.question) for example in examples]
    counts = Counter(named)
    known = dict(zip(named, [*examples, *examples], strict=True))
    if not any(one.question in known for one in predictions):
        return None
    for one in predictions:
        if one.question not in known:
            raise UserError(
                f"{path}:{one.number}: its `question` is none of --data, though others are; check "
                "--data, or add the field `id`"
            )
        if counts[one.question] > 1:
            return None
    return [(known[one.question], one.sql) for one in predictions]


def read_predictions(path: Path) -> list[str]:
    """Read one query a line; empty lines of a file of SQL are empty queries.

    A file that ends in .json has BIRD's form.
    """
    return [one.sql for one in _predictions(path)]


def _predictions(path: Path) -> list[_Prediction]:
    if path.suffix == ".jsonl":
        return [_prediction(path, *numbered) for numbered in read_lines(path)]
    if path.suffix == ".json":
        lines = read_bird(path)
    else:
        lines = read_text(path).removesuffix("\n").split("\n")
    return [_Prediction(number, line) for number, line in enumerate(lines, 1)]


def _prediction(path: Path, number: int, line: str) -> _Prediction:
    """Read a JSON line; a query that is no text is an empty one, as in BIRD's evaluator."""
    try:
        record = json.loads(line)
        sql, name = record["pred" if "pred" in record else "sql"], record.get("id")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise UserError(
            f"{path}:{number}: not a JSON object with `pred` or `sql`; write one a line"
        ) from None
    asked = [record[key] for key in ("db_id", "question") if key in record]
    return _Prediction(
        number,
        sql if isinstance(sql, str) else "",
        None if name is None else str(name),
        tuple(str(each).strip() for each in asked) if "question" in record else (),
    )


def read_bird(path: Path) -> list[str]:
    """Read BIRD's form, `{"0": "SQL\\t----- bird -----\\tdb_id"}`, in the order of its numbers.

    An entry that is no text is an empty query, as in BIRD's evaluator.

    Raises:
        UserError: It is not of this form, or numbers are left out.
    """
    text = read_text(path)
    try:
        queries = {int(number): query for number, query in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError):
        raise UserError(
            f'{path}: not of BIRD\'s form {{"0": "SQL{BIRD_MARK!r:.20}…db_id"}}; one query a line '
            "goes into a file that does not end in .json"
        ) from None
    if sorted(queries) != list(range(len(queries))):
        raise UserError(f"{path}: its numbers should run from 0 to {len(queries) - 1}")
    return [_bird_query(queries[number]) for number in range(len(queries))]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Name files by their stems, led by as many folders as it takes to tell them apart.

    Runs call all their files alike.
    """
    parts = [path.with_suffix("").parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]  # alike but for their endings


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


def read_trajectories(path: Path, examples: Sequence[Example]) -> list[Played]:
    """Read episodes as a run writes them, and find the question of each by its `id`.

    Raises:
        UserError: A line is not of this form, or asks for another question than `examples` has.
    """
    known = {example.id: example for example in examples}
    found = []
    for number, line in read_lines(path):
        try:
            record = json.loads(line)
            name, gold = record["id"], record["gold"]
            turns = [_turn(turn) for turn in record["turns"]]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise UserError(
                f"{path}:{number}: not an episode with `id`, `gold` and `turns` of `reply`, `sql` "
                "and `kind`; give the trajectories.jsonl of a run"
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
    kind, sql = record.get("kind", "answer"), record["sql"]
    if kind not in get_args(AttemptKind) or not isinstance(sql, str):
        raise ValueError(kind)
    return Turn(str(record["reply"]), sql, kind)
