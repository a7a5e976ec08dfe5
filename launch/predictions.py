"""Files of predictions: one a line, the official programs' forms, and episodes of a run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from launch.official import BIRD_MARK
from launch.texts import read_lines, read_plain_lines, read_text
from rewards.types import Turn
from sqlenv.errors import UserError
from sqlenv.types import AttemptKind, Example

Paired = list[tuple[Example, str]]
Played = tuple[Mapping[str, Any], Example, list[Turn]]
"""The record of an episode, its question and its turns."""


@dataclass(frozen=True, slots=True)
class _Prediction:
    """The queries for one question, and what their line says of the question.

    Attributes:
        place: The line as messages name it, such as `file.sql:12`.
        sqls: One query, or several samples.
        id: Of the question, or None.
        db_id: Of its database, or None.
        question: Its text, or None.
    """

    place: str
    sqls: tuple[str, ...]
    id: str | None = None
    db_id: str | None = None
    question: str | None = None


def pair_up(path: Path, examples: Sequence[Example]) -> Paired:
    """Give each prediction of a file its question; of several samples the first one counts.

    By `id` if its lines have ids, else by `question` (and `db_id`) if they have one that `examples`
    has, else by order.

    Raises:
        UserError: An id or a question is unknown, an id is there twice or only in some lines; lines
            without either are not as many as the questions; or one says that it is for another
            question or database.
    """
    return [(example, one.sqls[0]) for example, one in _paired(path, examples)]


def read_samples(path: Path, examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """Read the predictions for all questions: one query or several samples each.

    Args:
        path: One query a line; JSON lines; BIRD's or OmniSQL's JSON; or a folder as Spider 2's, of
            a file of SQL a question.
        examples: The questions, each of which the file has to answer.

    Raises:
        UserError: As `pair_up`; or a question is left out, is there twice, or has fewer samples
            than others.
    """
    pairs = _paired(path, examples)
    found: dict[str, _Prediction] = {}
    for example, one in pairs:
        if example.id in found:
            raise UserError(f"{one.place}: a second prediction for {example.id}; leave one out")
        found[example.id] = one
    if left := [example.id for example in examples if example.id not in found]:
        raise UserError(
            f"{path}: no prediction for {len(left)} of {len(examples)} questions, the first is "
            f"{left[0]}; predict an empty query where there is none"
        )
    predictions = [found[example.id] for example in examples]
    counts = Counter(len(one.sqls) for one in predictions)
    if len(counts) > 1:
        usual = max(counts, key=lambda count: counts[count])
        odd = next(one for one in predictions if len(one.sqls) != usual)
        raise UserError(
            f"{odd.place}: {len(odd.sqls)} samples where others have {usual}; give every question "
            "as many"
        )
    return [one.sqls for one in predictions]


def _refuse_strangers(pairs: Sequence[tuple[Example, _Prediction]]) -> None:
    """Refuse a prediction that says it is for another question, or for another database."""
    # Where no text is known, it is written otherwise, which says nothing.
    asked = {example.question for example, _ in pairs}
    has_texts = any(one.question in asked for _, one in pairs)
    for example, one in pairs:
        other = "" if one.db_id in (None, example.db_id) else f"database {one.db_id}"
        if not other and has_texts and one.question not in (None, example.question):
            other = f"the question {one.question!r:.60}"
        if other:
            raise UserError(
                f"{one.place}: is for {other}, but in the order of --data comes {example.id} on "
                f"{example.db_id}; check --data, and the order of the file"
            )


def _paired(path: Path, examples: Sequence[Example]) -> list[tuple[Example, _Prediction]]:
    predictions = _predictions(path)
    if not predictions:
        raise UserError(f"{path}: no prediction in it; give one for each question")
    if any(one.id is not None for one in predictions):
        pairs = _by_id(path, predictions, examples)
    else:
        pairs = _by_question(predictions, examples) or _by_order(path, predictions, examples)
    _refuse_strangers(pairs)
    return pairs


def _by_id(
    path: Path, predictions: Sequence[_Prediction], examples: Sequence[Example]
) -> list[tuple[Example, _Prediction]]:
    # Spider 2 names its questions, and its own form of predictions knows no other name.
    known = {example.id.removeprefix("spider2/"): example for example in examples}
    known |= {example.id: example for example in examples}
    count = len(predictions)
    if nameless := [one for one in predictions if one.id is None]:
        raise UserError(
            f"{nameless[0].place}: {len(nameless)} of {count} lines have no `id`; add it"
        )
    if unknown := [one for one in predictions if one.id not in known]:
        raise UserError(
            f"{unknown[0].place}: {len(unknown)} predictions are of no question of --data, the "
            f"first is {unknown[0].id}; theirs are such as {min(known)}: check --data"
        )
    pairs = [(known[str(one.id)], one) for one in predictions]
    times = Counter(example.id for example, _ in pairs)
    if twice := [one for example, one in pairs if times[example.id] > 1]:
        raise UserError(f"{twice[-1].place}: the id {twice[-1].id} is there twice; leave one out")
    return pairs


def _by_question(
    predictions: Sequence[_Prediction], examples: Sequence[Example]
) -> list[tuple[Example, _Prediction]] | None:
    """Find the questions by their text; None where it does not tell them, or tells none."""
    named: list[tuple[str | None, str]] = [(None, example.question) for example in examples]
    named += [(example.db_id, example.question) for example in examples]
    counts = Counter(named)
    known = dict(zip(named, [*examples, *examples], strict=True))
    pairs = []
    for one in predictions:
        if one.question is None:
            return None
        name = (one.db_id, one.question)
        pairs.append((known.get(name), counts[name], one))
    if all(example is None for example, _, _ in pairs):
        return None
    found = []
    for example, count, one in pairs:
        if example is None:
            raise UserError(
                f"{one.place}: its `question` is none of --data, though others are; check --data, "
                "or add the field `id`"
            )
        if count > 1:
            return None
        found.append((example, one))
    return found


def _by_order(
    path: Path, predictions: Sequence[_Prediction], examples: Sequence[Example]
) -> list[tuple[Example, _Prediction]]:
    while len(predictions) > len(examples) and not any(predictions[-1].sqls):
        predictions = predictions[:-1]  # blank lines at the end are no predictions
    if len(predictions) != len(examples):
        last = predictions[min(len(predictions), len(examples) + 1) - 1].place
        what = "the last one" if len(predictions) < len(examples) else "the first one too many"
        raise UserError(
            f"{path}: {len(predictions)} predictions for {len(examples)} questions, {what} is "
            f"{last}; give one a line, in the order of --data, or a .jsonl file with the field "
            "`id` or `question`"
        )
    return list(zip(examples, predictions, strict=True))


def read_predictions(path: Path) -> list[str]:
    """Read one query a line; empty lines of a file of SQL are empty queries.

    A file that ends in .json has BIRD's form, or OmniSQL's.
    """
    return [one.sqls[0] for one in _predictions(path)]


def _predictions(path: Path) -> list[_Prediction]:
    if path.is_dir():
        return _files(path)
    if path.suffix == ".jsonl":
        return [_record(f"{path}:{number}", line) for number, line in read_lines(path)]
    if path.suffix == ".json":
        return _json(path)
    lines = read_plain_lines(path)
    return [_line(f"{path}:{number}", line) for number, line in enumerate(lines, 1)]


def _line(place: str, line: str) -> _Prediction:
    """Read a line of SQL, which may have the database behind a tab as in Spider's gold files."""
    sql, *rest = line.strip("\t ").split("\t")
    if len(rest) > 1 or (rest and not re.fullmatch(r"\w+", rest[0])):
        raise UserError(
            f"{place}: a tab inside the query, where the official program would cut it off; write "
            "a space"
        )
    return _Prediction(place, (sql,), db_id=rest[0] if rest else None)


def _record(place: str, line: str) -> _Prediction:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if found := _named(place, record):
        return found
    raise UserError(
        f"{place}: not a JSON object with `pred` or `sql`, nor with several as `samples` or "
        "`pred_sqls`; write one a line"
    )


_QUERY_FIELDS = ("samples", "pred_sqls", "pred", "sql")
"""Where a record may have its queries; the first that is there and not empty counts."""


def _named(place: str, record: Any) -> _Prediction | None:
    """Read a record; a query that is no text is an empty one, as in BIRD's evaluator."""
    if not isinstance(record, dict):
        return None
    fields = [name for name in _QUERY_FIELDS if name in record]
    if not fields:
        return None
    name = next((name for name in fields if record[name]), fields[-1])
    queries = record[name]
    if not isinstance(queries, list) or not queries:
        queries = [queries]
    texts = {key: record.get(key) for key in ("id", "instance_id", "db_id", "question")}
    id, instance, db_id, question = (
        None if text is None else str(text).strip() for text in texts.values()
    )
    return _Prediction(place, tuple(map(_text, queries)), id or instance, db_id, question)


def _text(query: Any) -> str:
    return query if isinstance(query, str) else ""


def _json(path: Path) -> list[_Prediction]:
    """Read OmniSQL's list (of records with `pred_sqls`, or of queries), or BIRD's object."""
    entries = _parsed(path)
    if not isinstance(entries, list):
        return _bird(path, entries)
    found = []
    for number, entry in enumerate(entries):
        place = f"{path}: entry {number}"
        one = _Prediction(place, (entry,)) if isinstance(entry, str) else _named(place, entry)
        if one is None:
            raise UserError(
                f"{place}: neither a query nor an object with `pred_sqls`; give OmniSQL's or "
                "BIRD's form"
            )
        found.append(one)
    return found


def read_bird(path: Path) -> list[str]:
    """Read BIRD's form, `{"0": "SQL\\t----- bird -----\\tdb_id"}`, in the order of its numbers.

    An entry that is no text is an empty query, as in BIRD's evaluator.

    Raises:
        UserError: It is not of this form, or numbers are left out.
    """
    return [one.sqls[0] for one in _bird(path, _parsed(path))]


def _bird(path: Path, entries: Any) -> list[_Prediction]:
    try:
        queries = {int(number): query for number, query in entries.items()}
    except (ValueError, AttributeError):
        raise UserError(_NO_FORM.format(path=path)) from None
    numbers = range(len(queries))
    if left := [number for number in numbers if number not in queries]:
        raise UserError(
            f"{path}: its numbers should run from 0 to {len(queries) - 1}, and {left[0]} is not "
            "there"
        )
    return [_bird_entry(f'{path}: entry "{number}"', queries[number]) for number in numbers]


_WRITTEN_MARK = BIRD_MARK.replace("\t", "\\t")
_NO_FORM = (
    f'{{path}}: not of BIRD\'s form {{{{"0": "SQL{_WRITTEN_MARK}db_id"}}}}; one query a line '
    "goes into a file that does not end in .json"
)


def _parsed(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(_NO_FORM.format(path=path)) from None


def _bird_entry(place: str, entry: Any) -> _Prediction:
    sql, _, db_id = _text(entry).partition(BIRD_MARK)
    return _Prediction(place, (sql,), db_id=db_id.strip() or None)


def _files(folder: Path) -> list[_Prediction]:
    """Read a folder of Spider 2's form: the query of question local001 is in local001.sql."""
    paths = sorted(folder.glob("*.sql"))
    if not paths:
        raise UserError(f"{folder}: no .sql file in it; give a file of predictions, or Spider 2's")
    return [_Prediction(str(path), (_unfenced(read_text(path)),), id=path.stem) for path in paths]


def _unfenced(text: str) -> str:
    """Take a query out of its fence, as Spider 2's evaluate.py does."""
    match = re.search(r"```sql\n(.*?)\n```", text, re.DOTALL)
    return match[1].strip() if match else text


def short_names(paths: Sequence[Path]) -> list[str]:
    """Name files by their stems, led by as many folders as it takes to tell them apart.

    Runs call all their files alike.
    """
    parts = [(*path.parts[:-1], path.stem) for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]  # alike but for their endings


def is_trajectories(path: Path) -> bool:
    """Tell whether a file holds episodes: its first line has `turns`, or names a version."""
    if path.suffix != ".jsonl":
        return False
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and not first.keys().isdisjoint(("turns", "version"))


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
            if "version" in record:
                continue
            name, gold = record["id"], record["gold"]
            members = record.get("trajectories") or [record]
            episodes = [[_turn(turn) for turn in member["turns"]] for member in members]
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
        found += [(record, example, turns) for turns in episodes]
    return found


def _turn(record: Mapping[str, Any]) -> Turn:
    kind, sql = record.get("kind", "answer"), record["sql"]
    if kind not in get_args(AttemptKind) or not isinstance(sql, str):
        raise ValueError(kind)
    return Turn(str(record["reply"]), sql, kind)
