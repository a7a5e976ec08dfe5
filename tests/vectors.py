"""Inputs and what has to come of them, as JSON in `tests/data`."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sqlenv.types import Table


def read(name: str) -> Any:
    """Read a file of vectors by its name without `.json`."""
    return json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text("utf-8"))


@cache
def _rules() -> dict[str, list[Any]]:
    return read("sql_rules")


def read_cases(name: str) -> list[Any]:
    """Read a table of `sql_rules.json` in tuples, without the remarks between its rows."""
    return [_tuples(row) for row in _rules()[name] if isinstance(row, list)]


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def table(rows: Sequence[Any], names: Sequence[str] | None = None) -> Table:
    """Give rows columns, with names of ours if there are none; one column if there is no row."""
    names = names or [f"c{n}" for n in range(len(rows[0]) if rows else 1)]
    return Table(tuple(names), tuple(map(tuple, rows)))
