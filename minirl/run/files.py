"""Files: read and checked once, written whole or not at all; without JAX."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from minirl.exchange import UserError

_Kind = TypeVar("_Kind")

PART = ".part"
"""Ends the name of a file that is not whole yet."""
# How safetensors words an error of the system.
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
# How the names of pydantic's errors begin, and what it words by the names of our classes.
_WORDS = {
    **dict.fromkeys(("model_", "dataclass_", "dict_"), "should be a mapping of keys to values"),
    **dict.fromkeys(("list_type", "tuple_type"), "should be a list"),
    "string_type": "should be text",
    "path_type": "should be a path",
    "int_": "should be a whole number",
    "float_": "should be a number",
    "bool_": "should be true or false",
}


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Add the file's name to errors of the system, also to those that safetensors words itself."""
    try:
        yield
    except Exception as error:
        words = _SYSTEM_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else words and int(words[1])
        if not number or getattr(error, "filename", None) is not None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


@contextmanager
def whole_file(path: Path) -> Generator[TextIOWrapper]:
    """Write a file of text that appears, or is replaced, when the block succeeds.

    A power failure leaves the old file or the new one. Missing folders are made; a pipe is written
    to. Errors name the file.
    """
    if path.exists() and not path.is_file():
        with naming(path), path.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
        return
    target = path.resolve()
    # Of its own: two processes may write one file at a time.
    scratch = target.with_name(f".{target.name}.{uuid4().hex[:8]}{PART}")
    try:
        with naming(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("w", encoding="utf-8") as file:
                yield file
            sync(scratch)
            scratch.replace(target)
            sync(target.parent)
    except OSError as error:
        if error.filename != str(scratch):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            scratch.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        # Not every file system keeps a folder's list as a file.
        with suppress(OSError) if path.is_dir() else naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def appearing(folder: Path) -> Generator[Path]:
    """Make a folder to write to that appears, or is replaced, when the block succeeds.

    What a kill leaves is hidden beside it: of a new one until the next attempt, of an old one until
    there is a new one.
    """
    folder = folder.absolute()
    hidden = f".{glob.escape(folder.name)}.*"
    for left in folder.parent.glob(f"{hidden}.new"):
        shutil.rmtree(left, ignore_errors=True)
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = new.with_suffix(".old")
    new.mkdir(parents=True)
    try:
        yield new
        for path in (*new.rglob("*"), new):
            sync(path)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    for left in folder.parent.glob(f"{hidden}.old"):
        shutil.rmtree(left, ignore_errors=True)


def check(kind: type[_Kind], value: Any, *, where: str, advice: str) -> _Kind:
    """Validate a value by pydantic; the `UserError` says where it is, and what to do."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        what = f"{field} {describe(first)}".lstrip()
        raise UserError(f"{where}: {what}; {advice}") from None


def describe(error: Mapping[str, Any]) -> str:
    """Say what is wrong with a value, as in "should be a number, not 'x'"; an error is one of those
    that pydantic's `ValidationError` lists.
    """
    kind = error["type"]
    if kind == "missing":
        return "is missing"
    if kind == "union_tag_invalid":
        return f"kind should be one of {error['ctx']['expected_tags']}, not {error['ctx']['tag']!r}"
    words = next((words for start, words in _WORDS.items() if kind.startswith(start)), "")
    words = words or error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind == "value_error":  # a rule of ours names itself what it refuses
        return words
    return f"{words}, not {error['input']!r:.60}"


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def _parsed(kind: type[_Kind], text: bytes, *, where: str, advice: str) -> _Kind:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: broken JSON ({error}); {advice}") from None
    return check(kind, value, where=where, advice=advice)


def read_json(path: Path, kind: type[_Kind], *, advice: str) -> _Kind:
    """Read a file of JSON; a `UserError` says why it cannot be read, or is of another kind."""
    return _parsed(kind, _bytes(path, advice), where=str(path), advice=advice)


def read_lines(path: Path, kind: type[_Kind], *, advice: str) -> Iterator[tuple[bytes, _Kind]]:
    """Read a file of JSON lines, as bytes and as values; a last line without its end is left out.

    A `UserError` says why the file, or which line, cannot be read.
    """
    for number, line in enumerate(_bytes(path, advice).split(b"\n")[:-1], start=1):
        yield line + b"\n", _parsed(kind, line, where=f"{path}: line {number}", advice=advice)


def keep_lines(path: Path, kind: type[_Kind], *, advice: str) -> list[_Kind]:
    """Read JSON lines as `read_lines` does, and truncate a last line without its end."""
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
