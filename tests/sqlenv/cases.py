"""Tables of queries, results and what has to become of them, from `tests/data/sql_rules.json`."""

from collections.abc import Sequence
from typing import Any

from sqlenv.types import Table
from tests.vectors import read

_TABLES = read("sql_rules")


def read_cases(name: str) -> list[Any]:
    """Read the rows of a table, without the remarks between them."""
    return [_tuples(row) for row in _TABLES[name] if isinstance(row, list)]


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def table(rows: Sequence[Any]) -> Table:
    """Give rows columns with names; one column where there are none."""
    return Table(tuple(f"c{n}" for n in range(len(rows[0]) if rows else 1)), tuple(rows))
