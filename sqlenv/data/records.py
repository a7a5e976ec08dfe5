"""The records of a data set: streamed from JSON files, and checked once as they are read."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

from exchange import UserError
from sqlenv.evaluators.graded import checked_method

Record = dict[str, Any]

_WINDOW_BYTES = 1 << 18
_LONGEST_TOKEN = 16  # characters of JSON that are one token, texts and numbers apart
_SIGN = re.compile(r"[ \t\n\r]*([\[\],])[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


def read_records(path: Path) -> Iterator[Record]:
    """Stream the records of a JSON list, or of a .jsonl file, one at a time."""
    return (record for _, _, record in placed_records(path))


def placed_records(path: Path) -> Iterator[tuple[int, int, Record]]:
    """Stream records, each led by the byte where it begins and its length in bytes."""
    count = at = 0
    with path.open("rb") as file:
        start = file.read(3)
        if is_utf16(start):
            raise UserError(f"{path}: is UTF-16; save it as UTF-8")
        first = len(start) if start == codecs.BOM_UTF8 else 0
        file.seek(first)
        try:
            for at, written in (_lines if path.suffix == ".jsonl" else _items)(file, first):
                record = json.loads(written.decode())
                if not isinstance(record, dict):
                    raise UserError(f"{path}: record {count} is not an object with fields")
                yield at, len(written), record
                count += 1
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}: byte {at + error.start} is not UTF-8; save it as UTF-8"
            ) from None
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}: broken JSON after {count} whole records, before byte {file.tell()}; "
                "it is cut off or damaged, fetch it again"
            ) from error
    if not count:
        raise UserError(f"{path}: expected a list of records, found none")


def is_utf16(start: bytes) -> bool:
    """Tell from the first bytes of a text that its characters have two bytes each."""
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in start[:2]


def _lines(file: IO[bytes], at: int) -> Iterator[tuple[int, bytes]]:
    for line in file:
        if line.strip():
            yield at, line
        at += len(line)


def _items(file: IO[bytes], at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the items of a list as they are written, none of an object; a part of the file is in
    memory. In Latin-1 a byte is a character, and what JSON is built of is ASCII.
    """
    size, expected = _WINDOW_BYTES, "["
    while True:
        file.seek(at)
        text, place = file.read(size).decode("latin-1"), 0
        if expected == "[" and text.startswith("{"):
            return
        while span := _next_item(text, place, expected, is_last=len(text) < size):
            start, end = span
            if start == end:
                if text[end:].strip() or file.read().strip():
                    raise ValueError("text behind the list")
                return
            yield at + start, text[start:end].encode("latin-1")
            place, expected = end, ","
        # A long item is not read again and again.
        size = _WINDOW_BYTES if place else 2 * size
        at += place


def _next_item(text: str, at: int, expected: str, *, is_last: bool) -> tuple[int, int] | None:
    """Find the next item of a list; an empty one behind its end, None where more text is needed."""
    sign = _SIGN.match(text, at)
    if sign is None and (is_last or text[at:].strip()):
        raise ValueError(f"no {expected}")
    if sign is None or (sign.end() == len(text) and not is_last):
        return None
    start = sign.end()
    if sign[1] == "]" and expected == ",":
        return start, start
    if sign[1] != expected:
        raise ValueError(f"no {expected}")
    if expected == "[" and text[start : start + 1] == "]":
        return start + 1, start + 1
    try:
        _, end = _decode(text, start)
    except json.JSONDecodeError as error:
        if is_last or not _is_cut_off(error):
            raise
        return None
    # A number goes on until something else comes.
    return None if end == len(text) and not is_last else (start, end)


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    is_at_end = error.pos + _LONGEST_TOKEN > len(error.doc)
    return is_at_end or error.msg.startswith("Unterminated string")


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("should be valid Unicode text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Rule = Annotated[Text | None, AfterValidator(checked_method)]
"""A question's own rule; empty for none."""


class Fields(BaseModel):
    """Base of the kinds of records; fields that nobody asks for are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class QuestionRecord(Fields):
    """The fields of a question, under our names."""

    db_id: Annotated[Text, Field(min_length=1, validation_alias=AliasChoices("db_id", "db"))]
    question: Text
    gold_sql: Text | None = None
    evidence: Text | None = None
    instance_id: Text | None = None
    question_id: int | Text | None = Field(
        default=None, validation_alias=AliasChoices("question_id", "id")
    )
    difficulty: Text | None = None
    sql_complexity: Text | None = None
    dialect: Text | None = None
    question_style: Text | None = None
    grading_method: Rule = ""
    alternatives: tuple[Text, ...] = ()


class TableNames(Fields):
    """An entry of tables.json: names as in the database, and in natural words; types if any."""

    table_names_original: list[Text]
    column_names_original: list[tuple[int, Text]]
    column_names: list[tuple[int, Text]]
    column_types: list[Text] | None = None


_Kind = TypeVar("_Kind", bound=BaseModel)


def check(
    kind: type[_Kind],
    record: Record,
    *,
    where: str,
    advice: str,
    names: Mapping[str, str] | None = None,
) -> _Kind:
    """Read a record as one of the kinds above; a mistake is told with `where` and `advice`.

    `names` leads from our names of fields to the file's, where they may differ.
    """
    names = names or {}
    try:
        return kind.model_validate(record | {ours: record.get(it) for ours, it in names.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(names.get(str(part), part)) for part in first["loc"])
        found = "" if first["type"] == "missing" else f", not {first['input']!r:.60}"
        words = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {field}: {words}{found}; {advice}") from None
