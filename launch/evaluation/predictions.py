"""Files of predictions: read in three forms, and written in those of the official programs."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from launch.build import SqlSide
from launch.config import Split
from launch.evaluation.answers import Decode, Outcomes, Sampled, Source, SourceOutput
from launch.evaluation.results import PREDICTIONS, QuestionVerdict
from launch.files import read_text, write_text
from minirl.exchange import UserError
from minirl.types import Progress
from sqlenv.sql.answers import answer_of, begins_query
from sqlenv.sql.lexer import one_line
from sqlenv.types import Example

BIRD_MARK = "\t----- bird -----\t"
"""Stands between query and database in BIRD's file."""
_NO_QUERY = "SELECT"
"""Stands for a missing query: a blank line would shift every later line against its gold query."""
_log = logging.getLogger(__name__)
_SEPARATORS = re.compile(r"[\t\n\r]+")


def as_line(sql: str) -> str:
    """Write a query as Spider's file of predictions has it: on one line, without tabs."""
    if sql.strip() and not _SEPARATORS.search(sql):
        return sql
    # The evaluators split at line ends and tabs, also of those in quotes.
    return _SEPARATORS.sub(" ", one_line(sql)) or _NO_QUERY


def write_official(verdicts: Sequence[QuestionVerdict], folder: Path) -> None:
    """Write predictions in the official programs' forms.

    `predictions.sql` is Spider's (test-suite-sql-eval: one query a line), `predictions_bird.json`
    BIRD's (DAMO-ConvAI and mini_dev: query and database by number).
    """
    lines = [as_line(verdict.sql) for verdict in verdicts]
    pairs = enumerate(zip(lines, verdicts, strict=True))
    bird = {str(number): f"{line}{BIRD_MARK}{verdict.db_id}" for number, (line, verdict) in pairs}
    write_text(folder / "predictions.sql", "\n".join(lines) + "\n")
    text = json.dumps(bird, indent=1, ensure_ascii=False)
    write_text(folder / "predictions_bird.json", text + "\n")


@dataclass(frozen=True, slots=True)
class FileSource(Source):
    """A file of predictions; nobody knows how its model was asked."""

    path: Path
    split: Split
    is_asked: ClassVar[bool] = False

    def deciding(self) -> Mapping[str, Any]:
        """Name the file, and the questions: where they are, and how many of them are judged."""
        asked = self.config.model_dump(mode="json", include={"data": {self.split}})
        return {"predictions": str(self.path), "limit": self.config.evaluation.questions, **asked}

    def answers(self, examples: Sequence[Example], sql: SqlSide, show: Progress) -> SourceOutput:
        """Read the file, which may have answers to all questions."""
        is_whole = self.config.evaluation.of(self.split) is None
        every = examples if is_whole else sql.examples(self.split)
        read = read_samples(self.path, every, self.decode, asked=examples)
        return [Sampled(one, outcomes=Outcomes.total(map(Outcomes.of, one))) for one in read], {}


@dataclass(frozen=True, slots=True)
class _Prediction:
    """The queries for one question, one or several samples, and what their line says of the
    question; `place` is the line as messages name it, such as `file.sql:12`, `ids` the fields and
    the values that name the question, and `others` fields that might, with values.
    """

    place: str
    queries: tuple[str, ...]
    ids: Mapping[str, str] = field(default_factory=dict)
    db_id: str | None = None
    question: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)


def read_samples(
    path: Path, examples: Sequence[Example], decode: Decode, *, asked: Sequence[Example]
) -> list[tuple[str, ...]]:
    """Read as many samples for each question that is asked as the decoding takes, the first ones.

    The file has those of all questions, or of the ones asked alone.

    Lines are matched by `id` if they have ids, else by order.

    Raises:
        UserError: An id is unknown, or a line is of another question or database; lines without
            ids are not as many as the questions; a question is left out, is there twice, or has
            fewer samples than the decoding takes, or several for one greedy answer.
    """
    found: dict[str, tuple[str, ...]] = {}
    for example, one in _paired(path, examples, asked):
        count, problem = len(one.queries), ""
        if example.id in found:
            problem = f"a second prediction for {example.id}; leave one out"
        elif count > 1 and not decode.temperature:
            problem = f"{count} samples a question; say --decode vote@{count} or pass@{count}"
        elif count < decode.samples:
            problem = f"{count} samples, and --decode {decode.name} takes {decode.samples}"
        if problem:
            raise UserError(f"{one.place}: {problem}")
        found[example.id] = one.queries[: decode.samples]
    if left := [example.id for example in asked if example.id not in found]:
        raise UserError(
            f"{path}: no prediction for {len(left)} of {len(asked)} questions, the first is "
            f"{left[0]}; predict an empty query where there is none"
        )
    said = [query for queries in found.values() for query in queries if query.strip()]
    if said and not any(map(begins_query, said)):
        raise UserError(
            f"{path}: nothing in it begins as a query, the first prediction is {said[0]!r:.80}; "
            "give each as text, one a line or in the field `sql`"
        )
    return [found[example.id] for example in asked]


_Pairs = list[tuple[Example, _Prediction]]


def _paired(path: Path, examples: Sequence[Example], asked: Sequence[Example]) -> _Pairs:
    predictions = _predictions(path)
    by, why = "id", "its id is that of"
    if any(one.ids for one in predictions):
        pairs = _by_id(predictions, examples)
    else:
        pairs = _by_order(path, predictions, examples, asked)
        by, why = "order", "in the order of --data comes"
    # Where no text is known, it is written otherwise, which says nothing.
    texts = {example.question for example, _ in pairs}
    has_texts = any(one.question in texts for _, one in pairs)
    for name in _like_ids(predictions):  # there are none where ids are known
        if name != "question" or not has_texts:
            _log.warning(
                "%s: %s looks like an id, and is none that is known (%s): the order decides",
                path, name, ", ".join(_ID_FIELDS),
            )  # fmt: skip
    _log.info("%s: matched with the questions by %s", path, by)
    for example, one in pairs:
        other = "" if one.db_id in (None, example.db_id) else f"database {one.db_id}"
        if not other and has_texts and one.question not in (None, example.question):
            other = f"the question {one.question!r:.60}"
        if other:
            raise UserError(
                f"{one.place}: is for {other}, but {why} {example.id} on {example.db_id}; check "
                f"--data, and how the file is matched, by {by}"
            )
    return pairs


_QUERY_FIELDS = dict.fromkeys(("samples", "pred_sqls", "pred", "sql"))
"""Where a record may have its queries; the first that is there and not empty counts."""
_ID_FIELDS = ("id", "question_id", "qid", "instance_id", "idx")
"""Where a record may name its question. `idx` is the place among the questions of --data, from 0;
the others are ids of ours or of the data set."""
_LIKE_IDS = re.compile(
    r"question|(?i:(.*[\W_])?([qu]?id|idx|index|key|uuid|no|nr|num|number))|.*[a-z](Id|ID|Idx|Index)"
)


def _like_ids(predictions: Sequence[_Prediction]) -> list[str]:
    """List the fields that have the name of an id, and another value in each record."""
    first = predictions[0].others if len(predictions) > 1 else {}
    values = {name: {str(one.others.get(name)) for one in predictions} for name in first}
    return [name for name, found in values.items() if len(found) == len(predictions)]


def _by_id(predictions: Sequence[_Prediction], examples: Sequence[Example]) -> _Pairs:
    """Find the questions by their ids: ours, or the data set's own. Several that are known in a
    record have to name one question together.
    """
    counts = Counter(example.question_id for example in examples)
    named = {one.question_id: one for one in examples if counts[one.question_id] == 1}
    # Spider 2 names its questions.
    named |= {example.id.removeprefix("spider2/"): example for example in examples}
    named |= {example.id: example for example in examples}
    places = {str(number): example for number, example in enumerate(examples)}
    pairs = []
    for one in predictions:
        known = ((places if key == "idx" else named).get(id) for key, id in one.ids.items())
        found = {example.id: example for example in known if example}
        if len(found) != 1:
            first = examples[0]
            said = ", ".join(f"{key} {id}" for key, id in one.ids.items())
            count = f"{len(found)} questions" if found else "no question"
            what = f"{said} is of {count}" if said else "no id, though others have one,"
            raise UserError(
                f"{one.place}: {what} of --data; theirs are such as id {first.id}, question_id "
                f"{first.question_id}, idx 0"
            )
        pairs.append((next(iter(found.values())), one))
    return pairs


def _by_order(
    path: Path,
    predictions: Sequence[_Prediction],
    examples: Sequence[Example],
    asked: Sequence[Example],
) -> _Pairs:
    if len(predictions) == len(asked):
        examples = asked
    while len(predictions) > len(examples) and not any(predictions[-1].queries):
        predictions = predictions[:-1]  # blank lines at the end are no predictions
    if len(predictions) != len(examples):
        sample = f" or a sample of {len(asked)}" if len(asked) < len(examples) else ""
        raise UserError(
            f"{path}: {len(predictions)} predictions for {len(examples)} questions{sample}; give "
            "one a line, in the order of --data, or JSON lines with the field `id`"
        )
    return list(zip(examples, predictions, strict=True))


def _predictions(path: Path) -> list[_Prediction]:
    """Read a file of one of three forms, which its content tells: a JSON value, a list or an object
    by id; JSON lines; or a query a line, where none begins as an object does.
    """
    path = path / PREDICTIONS if (path / PREDICTIONS).is_file() else path  # a result of ours
    text = read_text(path)
    begin = text.lstrip()[:1]
    value = _parsed(text) if begin in ("{", "[") else None
    if isinstance(value, list):
        return [_record(f"{path}: entry {n}", entry) for n, entry in enumerate(value)]
    if isinstance(value, dict) and _QUERY_FIELDS.keys().isdisjoint(value):
        return _by_key(path, value)
    lines = enumerate(text.removesuffix("\n").split("\n") if text else [], 1)
    if begin == "{":
        return [_record(f"{path}:{n}", _parsed(line)) for n, line in lines if line.strip()]
    return [_line(f"{path}:{n}", line) for n, line in lines]


def _line(place: str, line: str) -> _Prediction:
    """Read a line of SQL, which may have the database behind a tab as in Spider's gold files."""
    if line.lstrip().startswith("{"):
        raise UserError(f"{place}: an object among queries; give JSON lines, or a query a line")
    sql, *rest = line.strip("\t ").split("\t")
    if len(rest) > 1 or (rest and not re.fullmatch(r"\w+", rest[0])):
        raise UserError(
            f"{place}: a tab inside the query, where the official program would cut it off; write "
            "a space"
        )
    return _Prediction(place, (_query(sql),), db_id=rest[0] if rest else None)


def _by_key(path: Path, entries: Mapping[str, Any]) -> list[_Prediction]:
    """Read BIRD's object, or one of records: keys are places, from 0 on without a gap, or ids."""
    places = [str(number) for number in range(len(entries))]
    has_places = entries.keys() == {*places}
    found = []
    for key in places if has_places else entries:
        entry = entries[key]
        if isinstance(entry, str):
            sql, _, db_id = entry.partition(BIRD_MARK)
            entry = {"sql": sql, "db_id": db_id or None}
        record = entry if isinstance(entry, dict) else {"sql": entry}
        named = {} if has_places else {"question_id": key}
        found.append(_record(f'{path}: entry "{key}"', {**named, **record}))
    return found


def _record(place: str, record: Any) -> _Prediction:
    if isinstance(record, str):
        return _Prediction(place, (_query(record),))
    known = ", ".join(_QUERY_FIELDS)
    if not isinstance(record, dict) or _QUERY_FIELDS.keys().isdisjoint(record):
        raise UserError(
            f"{place}: no JSON object with a query ({known}), or one that is cut off; queries "
            "without JSON stand one a line"
        )
    queries = next((record[name] for name in _QUERY_FIELDS if record.get(name)), "")
    if not isinstance(queries, list) or not queries:
        queries = [queries]
    if any(isinstance(one, dict | list) for one in queries):
        raise UserError(
            f"{place}: its query is an object, as in a file of questions; give queries as text"
        )
    # Data frames write whole numbers as 5.0 beside missing ones.
    values = {name: record[name] for name in _ID_FIELDS if record.get(name) is not None}
    ids = {name: str(value).strip().removesuffix(".0") for name, value in values.items()}
    db_id, question = (
        None if record.get(key) is None else str(record[key]).strip()
        for key in ("db_id", "question")
    )
    others = {} if ids else {name: record[name] for name in record if _LIKE_IDS.fullmatch(name)}
    return _Prediction(place, tuple(map(_query, queries)), ids, db_id, question, others)


def _parsed(text: str) -> Any:
    """Parse JSON; None where it is broken, and for NaN."""
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _query(value: Any) -> str:
    """Read a query, which may stand in a whole reply; what holds none is left as it is, and what is
    no text is an empty one, as in BIRD's evaluator, also where JSON spells half a character.
    """
    try:
        str.encode(value)
    except (TypeError, UnicodeEncodeError):
        return ""
    answer = answer_of(value, "any")
    # Without any mark it is no reply, and the official programs run it as it stands, tail and all.
    return answer.sql if answer.form not in (None, "bare") or answer.reasoning else value
