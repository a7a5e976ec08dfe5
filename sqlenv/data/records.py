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

from sqlenv.errors import UserError

Record = dict[str, Any]

_CHUNK_BYTES = 1 << 17
_LONGEST_TOKEN = 16  # characters of JSON that are one token, texts and numbers apart
_BLANK = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


def read_records(path: Path) -> Iterator[Record]:
    """Stream the records of a JSON list, or of a .jsonl file, one at a time."""
    count = 0
    with path.open("rb") as file:
        start = file.read(3)
        if start != codecs.BOM_UTF8:
            file.seek(0)
        if is_utf16(start):
            raise UserError(f"{path}: is UTF-16; save it as UTF-8")
        try:
            lines = (json.loads(line.decode()) for line in file if line.strip())
            for record in lines if path.suffix == ".jsonl" else _json_list(file):
                if not isinstance(record, dict):
                    raise UserError(f"{path}: record {count} is not an object with fields")
                yield record
                count += 1
        except UnicodeDecodeError as error:
            at = file.tell() - len(error.object) + error.start
            raise UserError(f"{path}: byte {at} is not UTF-8; save it as UTF-8") from None
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


def _json_list(file: IO[bytes]) -> Iterator[Any]:
    """Yield the items of a list, none of an object. Only a part of the file is in memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, at, opening = decoder.decode(file.read(_CHUNK_BYTES)), 0, "["
    if text.startswith("{"):
        return
    while True:
        try:
            found, end = _next_item(text, at, opening)
        except (IndexError, json.JSONDecodeError) as error:
            if isinstance(error, json.JSONDecodeError) and not _is_cut_off(error):
                raise
            # Half of the text at least is new, so that a long item is not read again and again.
            chunk = file.read(max(_CHUNK_BYTES, len(text)))
            text, at = text[at:] + decoder.decode(chunk, final=not chunk), 0
            if not chunk:
                raise ValueError("cut off") from None
        else:
            yield from found
            at, opening = end, ","
            if not found:
                break
    if text[at:].strip() or file.read().strip():
        raise ValueError("text behind the list")


def _next_item(text: str, at: int, opening: str) -> tuple[list[Any], int]:
    """Read a list's next item, none at its end, and say where it ends.

    Raises:
        IndexError: More text is needed.
    """
    at = _skip(text, at)
    if text[at] == "]" and opening == ",":
        return [], at + 1
    if text[at] != opening:
        raise ValueError(f"no {opening}")
    start = _skip(text, at + 1)
    if text[start] == "]" and opening == "[":
        return [], start + 1
    item, end = _decode(text, start)
    if end == len(text):  # a number goes on until something else comes
        raise IndexError
    return [item], end


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


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


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class QuestionRecord(_Fields):
    """The fields of a question, under our names."""

    db_id: Annotated[Text, Field(min_length=1, validation_alias=AliasChoices("db_id", "db"))]
    question: Text
    query: Text | None = None
    evidence: Text | None = None
    instance_id: Text | None = None
    difficulty: Text | None = None
    sql_complexity: Text | None = None
    dialect: Text | None = None
    question_style: Text | None = None


class TableNames(_Fields):
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
        raise UserError(f"{where}: {field}: {first['msg']}{found}; {advice}") from None
