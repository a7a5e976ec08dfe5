"""Inputs and what has to come of them, as JSON in `tests/data`."""

import json
from pathlib import Path
from typing import Any


def read(name: str) -> Any:
    """Read a file of vectors by its name without `.json`."""
    return json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text("utf-8"))
