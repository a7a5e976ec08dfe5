"""Files: read as a user may have written them, written whole or not at all, known by contents."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import apsw

from minirl.exchange import UserError
from minirl.run.files import whole_file
from sqlenv.data.records import is_utf16
from sqlenv.executor.database import fingerprint

_MODEL_FILES = (".json", ".safetensors", ".jinja")


def read_text(path: Path) -> str:
    """Read a file of text, with or without a byte order mark; all line ends become line feeds."""
    data = b""
    try:
        data = path.read_bytes()  # once: it may be a pipe
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError as error:
        what = "it is UTF-16" if is_utf16(data) else f"byte {error.start} is not UTF-8"
        raise UserError(f"{path}: cannot be read as text, {what}; save it as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def nearest(word: str, known: Iterable[str]) -> str:
    """Ask for the known word that is most like another one; empty where none is like it."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {found[0]}? " if found else ""


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


def digest(files: Collection[Path]) -> str:
    """Digest files by name and contents: the same on every machine, whatever the paths."""
    with ThreadPoolExecutor() as threads:
        contents = threads.map(fingerprint, files)
        lines = sorted(f"{path.name} {found}" for path, found in zip(files, contents, strict=True))
    return short(os.fsencode("\n".join(lines)))


def model_digest(folder: Path) -> str:
    """Digest what a policy is read from: weights, their shape, tokenizer and template."""
    files = [path for path in folder.iterdir() if path.suffix in _MODEL_FILES and path.is_file()]
    return digest(files)


def short(content: bytes) -> str:
    """Digest bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def versions(*libraries: str) -> dict[str, str]:
    """Name the versions that results may depend on; SQLite's decides which queries run."""
    found = {"python": platform.python_version(), "sqlite": apsw.sqlite_lib_version()}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # the SQL side works without the learner's
            found[name] = "not installed"
    return found
