"""What results depend on: digests of files and prompts by contents, and versions."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import apsw

from sqlenv.executor.database import fingerprint
from sqlenv.types import Observation


def digest(files: Collection[Path]) -> str:
    """Digest files by name and contents: the same on every machine, whatever the paths."""
    with ThreadPoolExecutor() as threads:
        contents = threads.map(fingerprint, files)
        lines = sorted(f"{path.name} {found}" for path, found in zip(files, contents, strict=True))
    return short(os.fsencode("\n".join(lines)))


def short(content: bytes) -> str:
    """Digest bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def of_prompts(prompts: Iterable[Observation]) -> str:
    """Digest the prompts of all questions, as the model is shown them."""
    total = hashlib.sha256()
    for prompt in prompts:
        total.update(json.dumps([[m.role, m.content] for m in prompt]).encode())
    return total.hexdigest()[:16]


def versions(*libraries: str) -> dict[str, str]:
    """Name the versions that results may depend on; SQLite's decides which queries run."""
    found = {"python": platform.python_version(), "sqlite": apsw.sqlite_lib_version()}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # the SQL side works without the learner's
            found[name] = "not installed"
    return found
