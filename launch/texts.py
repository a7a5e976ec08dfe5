"""Files of text that a user names."""

from __future__ import annotations

from pathlib import Path

from sqlenv.errors import UserError


def read_text(path: Path) -> str:
    """Read a file of text, with or without a byte order mark.

    Raises:
        UserError: It is not there, cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: cannot be read as text, byte {error.start} is not UTF-8; save it as UTF-8"
        ) from None


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Read the lines of a file that are not blank, with their numbers, from 1.

    Raises:
        UserError: As `read_text`.
    """
    lines = enumerate(read_text(path).split("\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]
