"""The records of a data set: streamed from JSON files, and checked once as they are read."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, ValidationError

from minirl.exchange import UserError
from sqlenv.evaluators.graded import checked_method

Record = dict[str, Any]

_BLANKS, _OPENING, _COMMA = (
    re.compile(rf"[ \t\r\n]*{mark}[ \t\r\n]*") for mark in ("", r"\[", ",")
)
_CHUNK_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 26  # of a record; a longer one means a broken file


def read_records(path: Path) -> Iterator[Record]:
    """Stream the records of a JSON list, or of JSON lines, one at a time."""
    return (record for _, _, record in placed_records(path))


def placed_records(path: Path) -> Iterator[tuple[int, int, Record]]:
    """Stream records, each led by the byte where it begins and its length in bytes."""
    count = 0
    try:
        with path.open("rb") as file:
            file.seek(3 if file.read(3) == codecs.BOM_UTF8 else 0)
            for start, content in _items(file):
                record = json.loads(content.decode())
                if not isinstance(record, dict):
                    raise UserError(f"{path}: record {count} is not an object with fields")
                yield start, len(content), record
                count += 1
    except UnicodeDecodeError:
        raise UserError(f"{path}: record {count} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: broken JSON after {count} whole records; it is cut off, damaged or not "
            "UTF-8, fetch it again"
        ) from error
    if not count:
        raise UserError(f"{path}: expected a list of records, found none")


def _items(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Give the items of a list, or those that follow one another, each with where it begins.

    A character of `text`, which begins at the byte `begin`, is a byte: places are the same.
    """
    decode = json.JSONDecoder().raw_decode
    text, at, begin = "", 0, file.tell()
    is_list = file.read(_CHUNK_BYTES).lstrip().startswith(b"[")  # whatever the file is called
    file.seek(begin)
    gap = _OPENING if is_list else _BLANKS
    while True:
        before = gap.match(text, at)
        try:
            end = decode(text, before.end())[1] if before else 0
        except ValueError:
            end = 0
        if before and end:
            yield begin + before.end(), text[before.end() : end].encode("latin-1")
            at, gap = end, _COMMA if is_list else _BLANKS
            continue
        more = file.read(max(_CHUNK_BYTES, len(text) - at))
        if not more or len(text) - at > _LARGEST_BYTES:
            break
        text, at, begin = text[at:] + more.decode("latin-1"), 0, begin + at
    rest = text[at:].strip(" \t\r\n")
    if rest != ("" if not is_list else "]" if gap is _COMMA else "[]"):
        raise ValueError("items that do not end")


Text = Annotated[str, Field(min_length=0)]
"""A text without unpaired surrogates: pydantic refuses them where a length is limited."""
Rule = Annotated[Text | None, AfterValidator(checked_method)]
"""A question's own rule; empty for none."""


class QuestionRecord(BaseModel, frozen=True):
    """The fields of a question, under our names; others are ignored."""

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
    alternatives: tuple[Text, ...] | None = None


class TableNames(BaseModel, frozen=True):
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
        words, mistake = first["msg"].removeprefix("Value error, "), first["type"]
        found = "" if mistake in ("missing", "value_error") else f", not {first['input']!r:.60}"
        raise UserError(f"{where}: {field}: {words}{found}; {advice}") from None
