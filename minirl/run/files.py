"""Files and folders that appear whole or not at all, and those of a Hugging Face model folder; no
JAX is needed for either.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from minirl.errors import UserError

PART = ".part"
"""Ends the name of a file that is not whole yet."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NEEDED = ("config.json", "tokenizer.json")


def check_folder(folder: Path) -> None:
    """Look for everything that a policy is read from.

    Raises:
        UserError: A file is not there.
    """
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise UserError(f"no {name} in {folder.absolute()}")
    weight_files(folder)


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights: one, or those that the index names.

    Raises:
        UserError: One is not there, or the index is broken.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise UserError(
                f"no {SINGLE} nor {INDEX} in {folder.absolute()}; "
                "give a Hugging Face model folder with safetensors files"
            )
        return [folder / SINGLE]
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        files = [folder / name for name in sorted(set(names))]
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index of safetensors files ({error!r})") from None
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: not there; copy all files of the model again")
    return files


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Let errors of the system name a file, as Python's own do only where one is opened.

    Raises:
        OSError: As raised inside, with the file's name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def whole_file(path: Path) -> Generator[IO[str]]:
    """Write a file of text that appears, or is replaced, when the block ends well.

    A power failure leaves the old file or the new one. Its folder is made where there is none. What
    is no plain file, such as a pipe, cannot be replaced and is written to.

    Raises:
        OSError: It cannot be written; names the file.
    """
    if path.exists() and not path.is_file():
        with naming(path), path.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
        return
    place = path.resolve()
    scratch = place.with_name(f".{place.name}{PART}")
    try:
        with naming(path):
            place.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("w", encoding="utf-8") as file:
                yield file
            settle(scratch, place)
    except OSError as error:
        if error.filename != str(scratch):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            scratch.unlink()


def settle(scratch: Path, path: Path) -> None:
    """Put a finished file in the place of another one; a power failure leaves either of them."""
    sync(scratch)
    scratch.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        # Not every file system keeps a folder's list as a file.
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def appearing(folder: Path) -> Generator[Path]:
    """Make a folder that appears, or is replaced, when the block ends well.

    What a kill leaves of it is hidden beside it, until the next attempt.

    Yields:
        The folder to write to.
    """
    folder = folder.absolute()
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.new"):
        shutil.rmtree(left, ignore_errors=True)
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = new.with_suffix(".old")
    made = [parent for parent in folder.parents if not parent.exists()]
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
        with suppress(OSError):  # not empty: all went well
            for parent in made:
                parent.rmdir()
    shutil.rmtree(old, ignore_errors=True)
