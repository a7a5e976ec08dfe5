"""Ask an official program for verdicts, in a process of the environment that it needs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def ask(python: Path, program: str, folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one of the functions of `_official.py`.

    Args:
        python: The interpreter of an environment that has what the program imports.
        program: Name of the function.
        folder: The program's own.
        job: What it is asked.
    """
    script = Path(__file__).with_name("_official.py")
    with tempfile.TemporaryDirectory() as place:
        request = Path(place) / "job.json"
        task = {"program": program, "folder": str(folder.resolve())}
        request.write_text(json.dumps({**job, **task}))
        found = subprocess.run(
            [python.absolute(), script.resolve(), request],
            stdout=subprocess.PIPE,
            cwd=place,
            check=False,
        )
    if found.returncode:
        sys.exit(f"{folder}: the official program failed; its own words are above")
    return json.loads(found.stdout)
