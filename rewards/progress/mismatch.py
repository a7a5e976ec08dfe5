"""How often predictions differ from gold queries in structure, clause by clause.

In the manner of Progress-SQL's table 8 (arXiv:2606.06825, appendix E.4), whose columns are sets of
the diagnostic tree's tags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from rewards.progress.diagnosis import Diagnosis

UNPARSED = "unparsed"
"""The label of a prediction that does not parse. It differs in every category: counted in none, the
worse model would have the lower rates."""

CATEGORIES: Mapping[str, frozenset[str]] = {
    "SELECT": frozenset({"SELECT_ERROR", "AGGREGATE_ERROR", "DISTINCT_MISMATCH"}),
    "JOIN": frozenset({"JOIN_MISSING", "JOIN_KEY_MISMATCH", "FROM_OR_JOIN_TABLE_MISMATCH"}),
    "WHERE": frozenset({"WHERE_ERROR"}),
    "GROUP": frozenset({"GROUP_BY_MISSING", "GROUP_BY_ERROR"}),
}
"""The columns of the table, as sets of tags."""


def labels_of(diagnosis: Diagnosis) -> tuple[str, ...] | None:
    """Return the tags of a prediction, `UNPARSED` for one that does not parse.

    Returns:
        None where the gold query does not parse: nothing can be said of the prediction.
    """
    if not diagnosis.gold_parsed:
        return None
    return diagnosis.tags if diagnosis.pred_parsed else (UNPARSED,)


def mismatches(labels: Collection[str]) -> dict[str, bool]:
    """Tell in which categories a prediction differs, from its labels."""
    return {
        category: UNPARSED in labels or not own.isdisjoint(labels)
        for category, own in CATEGORIES.items()
    }


def mismatch_rates(labels: Sequence[Collection[str]]) -> dict[str, float]:
    """Return the share of predictions that differ in each category, and the mean of the shares.

    Args:
        labels: Of each prediction that can be compared (`labels_of`).

    Returns:
        Shares in [0, 1] by category, and their mean as `average`; all 0 without predictions.
    """
    found = [mismatches(each) for each in labels]
    rates = {
        category: fmean(one[category] for one in found) if found else 0.0 for category in CATEGORIES
    }
    return {**rates, "average": fmean(rates.values())}
