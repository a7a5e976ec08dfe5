"""How often predictions differ from gold queries in structure, clause by clause.

In the manner of Progress-SQL's table 8 (arXiv:2606.06825), whose columns are sets of the diagnostic
tree's tags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

CATEGORIES: Mapping[str, frozenset[str]] = {
    "SELECT": frozenset({"SELECT_ERROR", "AGGREGATE_ERROR", "DISTINCT_MISMATCH"}),
    "JOIN": frozenset({"JOIN_MISSING", "JOIN_KEY_MISMATCH", "FROM_OR_JOIN_TABLE_MISMATCH"}),
    "WHERE": frozenset({"WHERE_ERROR"}),
    "GROUP": frozenset({"GROUP_BY_MISSING", "GROUP_BY_ERROR"}),
}
"""The columns of the table, as sets of tags."""


def mismatches(tags: Collection[str]) -> dict[str, bool]:
    """Tell in which categories a prediction differs, from its tags."""
    return {category: not own.isdisjoint(tags) for category, own in CATEGORIES.items()}


def mismatch_rates(tags: Sequence[Collection[str]]) -> dict[str, float]:
    """Return the share of predictions that differ in each category, and the mean of the shares.

    Args:
        tags: Of each prediction (`Diagnosis.tags`); one that does not parse has none.

    Returns:
        Shares in [0, 1] by category, and their mean as `average`; all 0 without predictions.
    """
    found = [mismatches(each) for each in tags]
    rates = {
        category: fmean(one[category] for one in found) if found else 0.0 for category in CATEGORIES
    }
    return {**rates, "average": fmean(rates.values())}
