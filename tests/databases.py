"""Database files of tests."""

from pathlib import Path

from sqlenv.executor.database import open_new


def make_file(path: Path, script: str) -> Path:
    """Run statements on a database file, which is made where there is none, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = open_new(path)  # also where a name is no text
    connection.execute(f"PRAGMA synchronous = off; {script}")
    connection.close()
    return path
