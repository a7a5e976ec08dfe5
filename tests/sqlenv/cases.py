"""Tables of queries, results and what has to become of them, from `tests/data/sql_rules.json`."""

import json
from pathlib import Path
from typing import Any

_TABLES = json.loads((Path(__file__).parents[1] / "data" / "sql_rules.json").read_text())


def read_cases(table: str) -> list[Any]:
    """Read the rows of a table, without the remarks between them."""
    return [_tuples(row) for row in _TABLES[table] if isinstance(row, list)]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
