"""Tables of queries and what official programs make of them, from `tests/data/sql_rules.json`."""

import json
from pathlib import Path
from typing import Any

_TABLES = json.loads((Path(__file__).parents[1] / "data" / "sql_rules.json").read_text())


def read_cases(table: str) -> list[Any]:
    """Read the rows of a table, without the remarks between them."""
    return [row for row in _TABLES[table] if isinstance(row, list)]
