"""The one definition of when two results are the same."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

from sqlenv.types import Result, Table

MatchMode = Literal["set", "bag", "bag_ordered"]

# Quoted names and strings, and comments: whatever stands in them is not SQL.
_OPAQUE = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `(?:[^`]|``)*` | \[[^\]]*\]
    | --[^\n]* | /\*.*?(?:\*/|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_TOKENS = re.compile(r"[()]|\border\s+by\b", re.IGNORECASE)


def matches(predicted: Result, gold: Result, *, mode: MatchMode, gold_sql: str = "") -> bool:
    """Say whether a prediction is right.

    Values compare as Python's do: 1 equals 1.0 and not '1', with no tolerance. Column names are
    ignored, column order is not.

    Args:
        predicted: What the prediction gave.
        gold: What the gold query gave.
        mode: `set` ignores order and duplicates (BIRD's evaluator); `bag` ignores order;
            `bag_ordered` ignores it unless the gold query orders its rows.
        gold_sql: The gold query; only `bag_ordered` reads it.

    Returns:
        False where either did not give a table. Two empty tables match, whatever their columns.
    """
    if not isinstance(predicted, Table) or not isinstance(gold, Table):
        return False
    if predicted.rows == gold.rows:
        return True
    if mode == "set":
        return set(predicted.rows) == set(gold.rows)
    if len(predicted.rows) != len(gold.rows) or (mode == "bag_ordered" and is_ordered(gold_sql)):
        return False
    return Counter(predicted.rows) == Counter(gold.rows)


def is_ordered(sql: str) -> bool:
    """Say whether a query has an ORDER BY of its own, outside all parentheses."""
    depth = 0
    for token in _TOKENS.findall(_OPAQUE.sub(" ", sql)):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth == 0 and token not in "()":
            return True
    return False
