"""The oracle-guided diagnostic tree (Progress-SQL, section 4.1 and appendix D): scores, tags, and
the text of the next turn (appendix F).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from rewards.execution import KnownColumns, columns_of
from rewards.progress.tree import Node, Profile, build_tree, ctes, renamed
from sqlenv.cache import cached
from sqlenv.prompts import Undiagnosed, feedback_text
from sqlenv.types import Attempt, Example, SqlError, Wrapping

T = TypeVar("T")

ALPHA = 0.70
"""Share of a SELECT's own clauses in its score; the rest is its nested queries' (table 4)."""
WEIGHTS = {
    "join": 0.22,
    "where": 0.20,
    "select": 0.16,
    "tables": 0.12,
    "group": 0.10,
    "counts": 0.10,
    "order": 0.06,
    "distinct": 0.04,
}
"""Weights of the clauses of a SELECT (table 5), which sum up to 1. HAVING is extracted and not
weighed."""
THRESHOLDS = {
    "join": 0.60,
    "where": 0.60,
    "select": 0.60,
    "group": 0.65,
    "order": 0.65,
    "tables": 0.70,
}
"""Similarities below which a clause's tag is emitted (table 6)."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the tree says of a prediction.

    `struct` is the structural alignment in [0, 1], 0.0 when either side does not parse; `tags`
    stand in the order of the paper's case study, none when none applies or none can be told.
    """

    struct: float
    tags: tuple[str, ...]
    pred_parsed: bool
    gold_parsed: bool


@cached(maxsize=16384)
def diagnose(pred_sql: str, gold_sql: str, schema: KnownColumns | None) -> Diagnosis:
    """Compare the trees of a prediction, whatever the model wrote, and of the gold query.

    The schema tells the table of a column that has none.
    """
    pred = build_tree(pred_sql, schema)
    gold = build_tree(gold_sql, schema)
    if pred is None or gold is None:
        return Diagnosis(0.0, (), pred is not None, gold is not None)
    pred = renamed(pred, _names_of_ctes(pred, gold))
    match = _match(pred, gold)
    # Operands match in any order: the gold's first SELECT is compared with the one it matched.
    tags = _clause_tags(match.main or _main_profile(pred), _main_profile(gold))
    if match.missing:
        tags.append("SUBQUERY_MISSING")
    if match.extra:
        tags.append("EXTRA_SUBQUERY_OR_CTE")
    return Diagnosis(match.score, tuple(tags), pred_parsed=True, gold_parsed=True)


def _names_of_ctes(pred: Node, gold: Node) -> dict[str, str]:
    """Map the names of a prediction's WITH items to the gold's, where these have other names.

    A name is only an alias: each item whose name the gold lacks stands for the gold item that it
    is most like, of those whose name the prediction lacks.
    """
    own, theirs = list(ctes(pred)), list(ctes(gold))
    left = [node for node in theirs if node.name not in {one.name for one in own}]
    names: dict[str, str] = {}
    for node in own:
        if not left or node.name in names or any(node.name == one.name for one in theirs):
            continue
        likeness = [_match(renamed(node, names | {node.name: g.name}), g).score for g in left]
        names[node.name] = left.pop(likeness.index(max(likeness))).name
    return names


@dataclass(frozen=True, slots=True)
class _Match:
    """The score of two nodes, and what came of the nodes below them.

    `missing` and `extra` tell whether a gold or predicted node that is no SELECT stayed unmatched;
    `main` is the predicted profile that the gold's main SELECT matched.
    """

    score: float
    missing: bool = False
    extra: bool = False
    main: Profile | None = None


def _match(pred: Node, gold: Node) -> _Match:
    """Score two nodes of one type: a SELECT by its clauses and children, others by children."""
    below = _match_children(pred.children, gold.children)
    if pred.profile is None or gold.profile is None:
        return below
    local = local_similarity(pred.profile, gold.profile)
    score = ALPHA * local + (1 - ALPHA) * below.score
    return _Match(score, below.missing, below.extra, pred.profile)


def _match_children(preds: tuple[Node, ...], golds: tuple[Node, ...]) -> _Match:
    """Give each gold child, in order, the best predicted child that is left and compatible."""
    if not preds and not golds:
        return _Match(1.0)
    left = list(preds)
    found: list[_Match] = []
    unmatched: list[Node] = []
    main: Profile | None = None
    for at, gold in enumerate(golds):
        scored = [(_match(p, gold), p) for p in left if _is_compatible(p, gold)]
        if not scored:
            unmatched.append(gold)
            continue
        match, best = max(scored, key=lambda pair: pair[0].score)
        found.append(match)
        left = [pred for pred in left if pred is not best]
        main = match.main if at == 0 else main
    return _Match(
        sum(match.score for match in found) / max(len(preds), len(golds)),
        missing=any(m.missing for m in found) or any(n.kind != "SELECT" for n in unmatched),
        extra=any(m.extra for m in found) or any(n.kind != "SELECT" for n in left),
        main=main,
    )


def _is_compatible(pred: Node, gold: Node) -> bool:
    return pred.kind == gold.kind and (pred.kind != "CTE" or pred.name == gold.name)


def local_similarity(pred: Profile, gold: Profile) -> float:
    """Average the similarities of the clauses of two SELECTs by their weights (table 5)."""
    counts = [(pred.joins, gold.joins), (pred.items, gold.items)]
    similarities = {
        "counts": fmean(number_similarity(*pair) for pair in counts),
        "distinct": float(pred.distinct == gold.distinct),
    }
    for name in WEIGHTS.keys() - similarities.keys():
        similarities[name] = jaccard(getattr(pred, name), getattr(gold, name))
    weighted = sum(weight * similarities[name] for name, weight in WEIGHTS.items())
    return weighted / sum(WEIGHTS.values())


def jaccard(pred: frozenset[T], gold: frozenset[T]) -> float:
    """Divide the common features by all; two empty sets agree, one empty set agrees with none."""
    if not pred and not gold:
        return 1.0
    shared = len(pred & gold)
    return shared / (len(pred) + len(gold) - shared)


def number_similarity(pred: int, gold: int) -> float:
    """Compare two counts: 1 - min(1, |pred - gold| / max(1, gold))."""
    return 1.0 - min(1.0, abs(pred - gold) / max(1, gold))


def _main_profile(node: Node) -> Profile:
    return node.profile or _main_profile(node.children[0])


def _clause_tags(pred: Profile, gold: Profile) -> list[str]:
    """Name the clauses that differ (tables 6 and 7), in the order of the case study."""
    differ = {
        name: jaccard(getattr(pred, name), getattr(gold, name)) < threshold
        for name, threshold in THRESHOLDS.items()
    }
    no_joins = not pred.joins and gold.joins > 0
    no_group = not pred.group and bool(gold.group)
    rules = {
        "JOIN_MISSING": pred.joins < gold.joins,
        "JOIN_KEY_MISMATCH": not no_joins and differ["join"],
        "FROM_OR_JOIN_TABLE_MISMATCH": differ["tables"],
        "WHERE_ERROR": differ["where"],
        "SELECT_ERROR": differ["select"],
        "AGGREGATE_ERROR": pred.aggregate != gold.aggregate,
        "GROUP_BY_MISSING": no_group,
        "GROUP_BY_ERROR": not no_group and differ["group"],
        "ORDER_BY_MISMATCH": differ["order"],
        "DISTINCT_MISMATCH": pred.distinct != gold.distinct,
    }
    return [tag for tag, applies in rules.items() if applies]


def feedback(
    example: Example, attempt: Attempt, *, form: Wrapping | None
) -> tuple[tuple[str, ...], str]:
    """Tell a policy the tags of its last query, and ask for another in a form (`Feedback`)."""
    found = diagnose(attempt.sql, example.gold_sql, columns_of(example))
    why: Undiagnosed = "close"
    is_error = isinstance(attempt.result, SqlError)  # also where sqlglot reads what SQLite does not
    if is_error or not (found.pred_parsed and found.gold_parsed):
        why = "fails" if is_error else "runs"  # also where a limit ended it
    text = feedback_text(example, found.tags, form=form, undiagnosed=why)
    return found.tags, text


# Rates of structural mismatches, in the manner of table 8 (appendix E.4).

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
    """Return the tags of a prediction, or `UNPARSED`; None where the gold query does not parse."""
    if not diagnosis.gold_parsed:
        return None
    return diagnosis.tags if diagnosis.pred_parsed else (UNPARSED,)


def mismatch_rates(labels: Iterable[Collection[str]]) -> dict[str, float]:
    """Return the share of predictions that differ in each category, and their mean, `average`.

    All are 0 without predictions.
    """
    found = list(labels)
    rates = {
        category: fmean(UNPARSED in one or not own.isdisjoint(one) for one in found or [()])
        for category, own in CATEGORIES.items()
    }
    return {**rates, "average": fmean(rates.values())}
