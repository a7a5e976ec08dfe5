"""The records of a data set: streamed from JSON files, and checked once as they are read."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from exchange import UserError
from sqlenv.evaluators.graded import checked_method

Record = dict[str, Any]

# Of JSON: a text, a bracket, or whatever else is written without a blank.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]|[^\s"\[\]{},:]++', re.DOTALL)
_DEEPER = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
_INK = re.compile(rb"\S")
_KEPT_BYTES = 1 << 20


def read_records(path: Path) -> Iterator[Record]:
    """Stream the records of a JSON list, or of a .jsonl file, one at a time."""
    return (record for _, _, record in placed_records(path))


def placed_records(path: Path) -> Iterator[tuple[int, int, Record]]:
    """Stream records, each led by the byte where it begins and its length in bytes."""
    start = done = count = dropped = 0
    with path.open("rb") as file:
        head = file.read(3)
        if is_utf16(head):
            raise UserError(f"{path}: is UTF-16; save it as UTF-8")
        first = len(head) if head == codecs.BOM_UTF8 else 0
        try:
            content = mmap(file.fileno(), 0, access=ACCESS_READ)
            for start, end in (_lines if path.suffix == ".jsonl" else _items)(content, first):
                record = json.loads(content[start:end].decode())
                if not isinstance(record, dict):
                    raise UserError(f"{path}: record {count} is not an object with fields")
                yield start, end - start, record
                count, done = count + 1, end
                if done > dropped + _KEPT_BYTES:  # what was read leaves this process's memory
                    content.madvise(MADV_DONTNEED, 0, done)
                    dropped = done
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}: byte {start + error.start} is not UTF-8; save it as UTF-8"
            ) from None
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}: broken JSON after {count} whole records, which end at byte {done}; "
                "it is cut off or damaged, fetch it again"
            ) from error
    if not count:
        raise UserError(f"{path}: expected a list of records, found none")


def is_utf16(start: bytes) -> bool:
    """Tell from the first bytes of a text that its characters have two bytes each."""
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in start[:2]


def _lines(content: mmap, at: int) -> Iterator[tuple[int, int]]:
    content.seek(at)
    while line := content.readline():
        if line.strip():
            yield at, at + len(line)
        at += len(line)


def _items(content: mmap, at: int) -> Iterator[tuple[int, int]]:
    """Give where the items of a list begin and end; an object has none."""
    tokens = _TOKEN.finditer(content, at)
    first = next(tokens, None)
    if first is not None and first[0] == b"{":
        return
    if first is None or first[0] != b"[" or content[at : first.start()].strip():
        raise ValueError("no list")
    depth, end, between = 0, first.end(), b""
    for token in tokens:
        if depth == 0:
            at = token.start()
            is_over = token[0] == b"]"
            if content[end:at].strip() != (b"" if is_over else between):
                raise ValueError("no comma between two items, or more than that")
            if is_over and not _INK.search(content, token.end()):
                return
        depth += _DEEPER.get(token[0], 0)
        if depth == 0:
            end, between = token.end(), b","
            yield at, end
    raise ValueError("a list that does not end")


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
