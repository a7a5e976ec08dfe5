"""How one result differs from another: EXPO-SQL's ten types (table 1, appendix A.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from rewards.clauses import ClauseKind
from sqlenv.types import Row, Table, Value

Difference = Literal[
    "col_count",
    "col_name",
    "row_order",
    "row_dedup",
    "row_subset",
    "row_superset",
    "row_emptied",
    "row_created",
    "row_disjoint",
    "row_partial",
]
Differences = frozenset[Difference]

CANDIDATES: Mapping[Difference, frozenset[ClauseKind]] = {
    "col_count": frozenset({"SELECT", "FROM", "JOIN"}),
    "col_name": frozenset({"SELECT", "FROM", "JOIN"}),
    "row_order": frozenset({"ORDER BY"}),
    "row_dedup": frozenset({"SELECT", "GROUP BY"}),
    "row_subset": frozenset({"WHERE", "JOIN", "HAVING", "LIMIT"}),
    "row_superset": frozenset({"JOIN", "WHERE"}),
    "row_emptied": frozenset({"WHERE", "JOIN", "HAVING"}),
    "row_created": frozenset({"FROM", "JOIN"}),
    "row_disjoint": frozenset({"FROM", "JOIN", "WHERE"}),
    "row_partial": frozenset({"SELECT"}),
}
"""The clauses that can cause each type (table 12)."""

_DIGITS = 6


def differences(reference: Table, candidate: Table) -> Differences:
    """Name what sets a candidate apart from a reference, in columns and in rows.

    Values compare as Python's do, floats rounded to 6 decimals. Rows of different width are never
    the same, so a wrong projection is `col_count` and `row_disjoint` (figure 5).

    Returns:
        At most one type for the columns, and one or two for the rows; empty for equal tables.
    """
    return _of_columns(reference, candidate) | _of_rows(reference, candidate)


def _of_columns(reference: Table, candidate: Table) -> Differences:
    if reference.width != candidate.width:
        return frozenset({"col_count"})
    names = ([name.lower() for name in table.columns] for table in (reference, candidate))
    first, second = names
    return frozenset() if first == second else frozenset({"col_name"})


def _of_rows(reference: Table, candidate: Table) -> Differences:
    """Apply the first rule that fires, in the order of the notes' decision table."""
    if not reference.rows or not candidate.rows:
        return _of_emptiness(reference, candidate)
    if reference.width != candidate.width:
        return frozenset({"row_disjoint"})
    left, right = _rounded(reference.rows), _rounded(candidate.rows)
    if left == right:
        return frozenset()
    left_set, right_set = set(left), set(right)
    if left_set == right_set:
        same_bag = len(left) == len(right) and Counter(left) == Counter(right)
        return frozenset({"row_order"}) if same_bag else frozenset({"row_dedup"})
    if len(left) == len(right) and _shares_a_column(left, right):
        return frozenset({"row_partial"})
    return _of_sets(left_set, right_set)


def _of_emptiness(reference: Table, candidate: Table) -> Differences:
    if reference.rows:
        return frozenset({"row_emptied"})
    return frozenset({"row_created"}) if candidate.rows else frozenset()


def _of_sets(reference: set[Row], candidate: set[Row]) -> Differences:
    if candidate < reference:
        return frozenset({"row_subset"})
    if candidate > reference:
        return frozenset({"row_superset"})
    if reference.isdisjoint(candidate):
        return frozenset({"row_disjoint"})
    return frozenset({"row_subset", "row_superset"})


def _shares_a_column(left: Sequence[Row], right: Sequence[Row]) -> bool:
    """Tell whether some column position holds the same bag of values on both sides."""
    pairs = zip(zip(*left, strict=True), zip(*right, strict=True), strict=True)
    return any(Counter(ours) == Counter(theirs) for ours, theirs in pairs)


def _rounded(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    if not any(isinstance(value, float) for row in rows for value in row):
        return rows
    return tuple([tuple([_round(value) for value in row]) for row in rows])


def _round(value: Value) -> Value:
    return round(value, _DIGITS) if isinstance(value, float) else value
