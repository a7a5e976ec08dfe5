"""Database files and question files of tests."""

import json
from pathlib import Path
from typing import Any

from sqlenv.executor.database import open_new


def make_file(path: Path, script: str) -> Path:
    """Run statements on a database file, which is made where there is none, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = open_new(path)  # also where a name is no text
    connection.execute(f"PRAGMA synchronous = off; {script}")
    connection.close()
    return path


def write(path: Path, value: Any, *, encoding: str = "utf-8") -> Path:
    """Write a value as JSON, in a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding=encoding)
    return path
