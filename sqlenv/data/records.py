"""The records of a data set: streamed from JSON files, and checked once as they are read."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from sqlenv.errors import UserError
from sqlenv.evaluators.hardness import hardness

Record = dict[str, Any]

_CHUNK_BYTES = 1 << 17
_LONGEST_TOKEN = 16
"""Characters of JSON that are one token, texts and numbers apart."""
_BLANK = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


def read_records(path: Path) -> Iterator[Record]:
    """Stream the records of a JSON list, or of a .jsonl file, one at a time.

    Raises:
        UserError: The file is damaged or is not a list of objects.
    """
    count = 0
    with path.open("rb") as file:
        reads = _json_lines if path.suffix == ".jsonl" else _json_list
        start = file.read(3)
        if start != codecs.BOM_UTF8:
            file.seek(0)
        try:
            if is_utf16(start):
                raise UserError(f"{path}: is UTF-16; save it as UTF-8")
            for record in reads(file):
                if not isinstance(record, dict):
                    raise UserError(f"{path}: record {count} is not an object with fields")
                yield record
                count += 1
        except UnicodeDecodeError as error:
            at = file.tell() - len(error.object) + error.start
            advice = "save it as UTF-8, or fetch it again"
            raise UserError(f"{path}: byte {at} is not UTF-8; {advice}") from None
        except (ValueError, RecursionError) as error:
            where = f"after {count} whole records, before byte {file.tell()}"
            where += f", in line {error}" if isinstance(error, _BrokenLineError) else ""
            where = where if start else "in it: the file is empty"
            advice = "it is cut off or damaged, fetch it again"
            raise UserError(f"{path}: broken JSON {where}; {advice}") from error
    if not count:
        raise UserError(f"{path}: expected a list of records, found none")


def is_utf16(start: bytes) -> bool:
    """Tell from the first bytes of a text that its characters have two bytes each."""
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in start[:2]


class _BrokenLineError(ValueError):
    """The number of a line that is not JSON."""


def _json_lines(file: IO[bytes]) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            text = line.decode()
            try:
                yield json.loads(text)
            except (ValueError, RecursionError) as error:
                raise _BrokenLineError(number) from error


def _json_list(file: IO[bytes]) -> Iterator[Any]:
    """Yield the items of a list, none of an object. Only a part of the file is in memory.

    Raises:
        ValueError: The text is not JSON.
    """
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
        ValueError: The text is not JSON.
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


def _filled(name: str) -> str:
    if not name:
        raise ValueError("should name a database")
    return name


def _grade(parse: Any) -> Any:
    """Grade a parsed query; SynSQL and others keep texts in a field of that name."""
    if not isinstance(parse, dict):
        return parse if parse is None else ""
    try:
        return hardness(parse)
    except (LookupError, TypeError, AttributeError):
        raise ValueError("is not a query as Spider's parser writes it") from None


Text = Annotated[str, AfterValidator(_encodable)]


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Question(_Fields):
    """The fields of a question, under our names; `question_kind` has each layout's.

    Attributes:
        parsed: Level of the parsed query in a Spider record; None where the parse is null.
    """

    db_id: Annotated[Text, AfterValidator(_filled)] = Field(
        validation_alias=AliasChoices("db_id", "db")
    )
    question: Text
    gold: Text | None = None
    evidence: Text | None = None
    instance_id: Text | None = None
    difficulty: Text | None = None
    sql_complexity: Text | None = None
    dialect: Text | None = None
    question_style: Text | None = None
    parsed: Annotated[str | None, BeforeValidator(_grade)] = Field("", validation_alias="sql")


@cache
def question_kind(*, question: str, gold: str, evidence: str) -> type[Question]:
    """Make the kind of record whose fields have a layout's names."""
    return create_model(
        "Question",
        __base__=Question,
        question=(Text, Field(validation_alias=question)),
        gold=(Text | None, Field(None, validation_alias=gold)),
        evidence=(Text | None, Field(None, validation_alias=evidence)),
    )


class Named(_Fields):
    """An entry of tables.json of which only the database matters."""

    db_id: Text = ""


class TableNames(Named):
    """An entry of tables.json: names as in the database, and in natural words."""

    table_names_original: list[Text]
    column_names_original: list[tuple[int, Text]]
    column_names: list[tuple[int, Text]]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        originals, natural = self.column_names_original, self.column_names
        if len(originals) != len(natural):
            raise ValueError(
                f"column_names has {len(natural)} items, column_names_original {len(originals)}"
            )
        tables = len(self.table_names_original)
        for number, (table, _) in enumerate(originals):
            if table >= tables:
                raise ValueError(
                    f"column_names_original.{number}: there is no table {table}, "
                    f"table_names_original has {tables}"
                )
        return self


_Kind = TypeVar("_Kind", bound=BaseModel)


def check(kind: type[_Kind], record: Mapping[str, Any], *, where: str, advice: str) -> _Kind:
    """Read a record as one of the kinds above.

    Args:
        kind: What it must hold.
        record: As it stands in the file.
        where: File and number of the record, for the message.
        advice: What to do, for the message.

    Raises:
        UserError: A field is missing or is of another type.
    """
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        raise UserError(f"{where} {_problem(error)}; {advice}") from None


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"has no field {field!r}"
    words = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    words = words.replace("a valid string", "text")
    if not field:
        return f"is wrong: {words}"
    return f"has a wrong field: {field} {words}, not {first['input']!r:.60}"
