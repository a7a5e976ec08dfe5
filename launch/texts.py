"""Files of text: read as a user may have written them, and written whole or not at all."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from minirl.run.files import whole_file
from sqlenv.data.records import is_utf16
from sqlenv.errors import UserError

_log = logging.getLogger(__name__)


def read_text(path: Path) -> str:
    """Read a file of text, with or without a byte order mark; all line ends become line feeds."""
    return _read(path).replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path) -> str:
    """Read a file once, which may be a pipe; line ends stay as they are."""
    data = b""
    try:
        data = path.read_bytes()
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError as error:
        what = "it is UTF-16" if is_utf16(data) else f"byte {error.start} is not UTF-8"
        raise UserError(f"{path}: cannot be read as text, {what}; save it as UTF-8") from None


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Read the lines of a file that are not blank, with their numbers, from 1."""
    lines = enumerate(read_text(path).split("\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]


def read_plain_lines(path: Path) -> list[str]:
    """Read all lines of a file, blank ones too, of which each counts.

    Windows line ends are taken for what they are, with a warning.

    Raises:
        UserError: As `read_text`; or a line has a carriage return inside, which other programs take
            for a line end.
    """
    text = _read(path)
    lines = text.removesuffix("\n").split("\n") if text else []
    windows = 0
    for number, line in enumerate(lines, 1):
        windows += line.endswith("\r")
        if "\r" in line.removesuffix("\r"):
            raise UserError(
                f"{path}:{number}: a carriage return inside the line, which other programs take "
                "for a line end; write a space"
            )
    if windows:
        first = next(number for number, line in enumerate(lines, 1) if line.endswith("\r"))
        _log.warning(
            "%s:%d: Windows line ends in %d lines, left out of the queries", path, first, windows
        )
    return [line.removesuffix("\r") for line in lines]


def check_new(path: Path, option: str) -> None:
    """Raise a `UserError` if a file with content is there: it may be anything of the user's."""
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; name a file")
    if path.is_file() and path.stat().st_size:
        raise UserError(f"{option} {path}: is there already, and is not written over; name another")


def write_json(path: Path, value: Any) -> None:
    """Write a file that is there whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, and its folder where there is none."""
    with whole_file(path) as file:
        file.write(text)
