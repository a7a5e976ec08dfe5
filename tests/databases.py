"""Database files of tests."""

from pathlib import Path

import apsw


def make_file(path: Path, script: str) -> Path:
    """Run statements on a database file, which is made where there is none, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = apsw.Connection(str(path))
    connection.execute(f"PRAGMA synchronous = off; {script}")
    connection.close()
    return path
