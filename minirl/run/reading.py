"""JSON that is read, ours and others': checked once, against the kind of value it has to be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError, model_validator

from minirl.errors import UserError

_Kind = TypeVar("_Kind")


class Joined(BaseModel):
    """Base of what stands as one object with the fields of several: each of them reads it whole."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, value: Any) -> Any:
        return dict.fromkeys(cls.model_fields, value)


def check(kind: type[_Kind], value: Any, *, where: str, advice: str) -> _Kind:
    """Read a value as a kind that pydantic knows.

    Args:
        kind: What it has to be.
        value: As JSON gives it.
        where: The file and the place in it, for the message.
        advice: What to do, for the message.

    Raises:
        UserError: It is of another kind.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{where}: {_problem(error)}; {advice}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def read_json(path: Path, kind: type[_Kind], *, advice: str) -> _Kind:
    """Read a file of JSON.

    Raises:
        UserError: It is not there, is not JSON, or holds another kind of value.
    """
    return check(
        kind, _parse(_bytes(path, advice), str(path), advice), where=str(path), advice=advice
    )


def read_lines(path: Path, kind: type[_Kind], *, advice: str) -> Iterator[tuple[bytes, _Kind]]:
    """Read the whole lines of a file of JSON lines, as they stand there and as values.

    A last line that a kill cut short is left out.

    Raises:
        UserError: The file cannot be read, or a line is not JSON or holds another kind of value.
    """
    for number, line in enumerate(_bytes(path, advice).split(b"\n")[:-1], start=1):
        where = f"{path}: line {number}"
        yield line + b"\n", check(kind, _parse(line, where, advice), where=where, advice=advice)


def keep_lines(path: Path, kind: type[_Kind], *, advice: str) -> list[_Kind]:
    """Read the whole lines of a file that others will follow; take away what a kill cut short.

    Raises:
        UserError: As `read_lines`.
    """
    lines = list(read_lines(path, kind, advice=advice))
    whole = sum(len(line) for line, _ in lines)
    if whole != path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(whole)
    return [value for _, value in lines]


def _bytes(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}") from None


def _parse(text: bytes, where: str, advice: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: broken JSON ({error}); {advice}") from None


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{field} is missing"
    words = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    words = words.replace("a valid dictionary", "an object").replace("a valid string", "text")
    return f"{field} {words}, not {first['input']!r:.60}".lstrip()
