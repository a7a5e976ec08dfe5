"""The files of a Hugging Face model folder; no JAX is needed to look for them."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from minirl.errors import UserError

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
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with suppress(OSError):  # not empty: all went well
            for parent in made:
                parent.rmdir()
    shutil.rmtree(old, ignore_errors=True)
