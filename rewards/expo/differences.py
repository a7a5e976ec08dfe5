"""How one result differs from another: EXPO-SQL's ten types (table 1, appendix A.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from rewards.expo.clauses import ClauseKind
from sqlenv.types import Row, Table

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

OF_COLUMNS: Differences = frozenset({"col_count", "col_name"})  # the types that tell of columns


def differences(reference: Table, candidate: Table, *, is_computed: bool = False) -> Differences:
    """Name what sets a candidate apart from a reference: one type for columns, one or two for rows.

    Columns are named by their attributes (`with_attributes`). Values compare as Python's do. Rows
    of different width are never the same, so a wrong projection is `col_count` and `row_disjoint`
    (figure 5). Where the candidate's query computes every output, as many rows align with the
    reference's though no column agrees.
    """
    columns: Differences = frozenset()
    if reference.width != candidate.width:
        columns = frozenset({"col_count"})
    elif [*map(str.lower, reference.columns)] != [*map(str.lower, candidate.columns)]:
        columns = frozenset({"col_name"})
    return columns | _of_rows(reference, candidate, is_computed=is_computed)


def leads_away(gold: Table, before: Table, after: Table) -> bool:
    """Tell whether a step leads away from the gold result, whatever the type of its change.

    It does where less of the gold result can be found in it than before, each gold column in the
    column that has most of its values; where it has rows too many; or where it sorts them into
    another order.
    """
    if before.rows == after.rows and before.width == after.width:
        return False
    if not gold.rows:
        return len(after.rows) > len(before.rows)
    if _count_held(gold, after) < _count_held(gold, before):
        return True
    ordered, found = (dict.fromkeys(table.rows) for table in (gold, after))
    is_sorted = before.width == after.width and len(before.rows) == len(after.rows)
    return is_sorted and [r for r in ordered if r in found] != [r for r in found if r in ordered]


def _count_held(gold: Table, table: Table) -> int:
    """Count the values of the gold columns that some column of a table has, at best."""
    held, wanted = ([*map(Counter, one.by_column())] for one in (table, gold))
    return sum(max(((want & have).total() for have in held), default=0) for want in wanted)


def _of_rows(reference: Table, candidate: Table, *, is_computed: bool) -> Differences:
    """Apply the first rule that fires, in the order of the appendix."""
    left, right = reference.rows, candidate.rows
    if left == right:
        return frozenset()
    if not left or not right:
        return frozenset({"row_emptied" if left else "row_created"})
    if reference.width != candidate.width:
        return frozenset({"row_disjoint"})
    # Of the candidate's rows only those of the reference are in a set: a query can be written whose
    # rows, all of them numbers, have one hash.
    left_set = set(left)
    held = {row for row in right if row in left_set}
    has_others = any(row not in left_set for row in right)
    if len(held) == len(left_set) and not has_others:
        same_bag = len(left) == len(right) and Counter(left) == Counter(right)
        return frozenset({"row_order"}) if same_bag else frozenset({"row_dedup"})
    if len(left) == len(right) and (is_computed or _shares_a_column(left, right)):
        return frozenset({"row_partial"})
    if not held:
        return frozenset({"row_disjoint"})
    lacks: Differences = frozenset({"row_subset"} if len(held) < len(left_set) else ())
    return lacks | ({"row_superset"} if has_others else set())


def _shares_a_column(left: Sequence[Row], right: Sequence[Row]) -> bool:
    """Tell whether some column position holds the same bag of values on both sides."""
    pairs = zip(zip(*left, strict=True), zip(*right, strict=True), strict=True)
    return any(Counter(ours) == Counter(theirs) for ours, theirs in pairs)
