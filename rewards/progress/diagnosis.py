"""The oracle-guided diagnostic tree (Progress-SQL, section 4.1 and appendix D): scores and tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewards.config import TreeConfig
from rewards.progress.normalisation import Features, Schema, schema_of
from rewards.progress.tree import Node, Profile, build_tree
from sqlenv.sql.cache import cached


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the tree says of a prediction.

    Attributes:
        struct: Structural alignment in [0, 1]; 0.0 when either side does not parse.
        tags: In the order of the paper's case study; empty when none applies or none can be told.
        pred_parsed: Whether the prediction parsed.
        gold_parsed: Whether the gold query parsed.
    """

    struct: float
    tags: tuple[str, ...]
    pred_parsed: bool
    gold_parsed: bool


def diagnose(
    pred_sql: str,
    gold_sql: str,
    columns: Mapping[str, Sequence[str]] | None = None,
    config: TreeConfig | None = None,
) -> Diagnosis:
    """Compare the trees of a prediction and of the gold query.

    Args:
        pred_sql: Whatever the model wrote.
        gold_sql: The reference.
        columns: Column names by table, to find the table of an unqualified column.
        config: Weights, thresholds and switches; None for the paper's.
    """
    return _diagnose(pred_sql, gold_sql, schema_of(columns), config or _PAPER)


_PAPER = TreeConfig()


@cached(maxsize=16384)
def _diagnose(pred_sql: str, gold_sql: str, schema: Schema | None, config: TreeConfig) -> Diagnosis:
    pred = build_tree(pred_sql, schema, config)
    gold = build_tree(gold_sql, schema, config)
    if pred is None or gold is None:
        return Diagnosis(0.0, (), pred is not None, gold is not None)
    match = _match(pred, gold, config)
    # Operands match in any order: the gold's first SELECT is compared with the one it matched.
    tags = _clause_tags(match.main or _main_profile(pred), _main_profile(gold), config)
    if match.missing:
        tags.append("SUBQUERY_MISSING")
    if match.extra:
        tags.append("EXTRA_SUBQUERY_OR_CTE")
    return Diagnosis(match.score, tuple(tags), pred_parsed=True, gold_parsed=True)


@dataclass(frozen=True, slots=True)
class _Match:
    """The score of two nodes, and what came of the nodes below them.

    Attributes:
        score: In [0, 1].
        missing: Whether a gold node that is no SELECT stayed unmatched.
        extra: Whether a predicted node that is no SELECT stayed unmatched.
        main: Predicted profile that the gold's main SELECT matched; None where it matched none.
    """

    score: float
    missing: bool
    extra: bool
    main: Profile | None = None


def _match(pred: Node, gold: Node, config: TreeConfig) -> _Match:
    """Score two nodes of one type: a SELECT by its clauses and children, others by children."""
    below = _match_children(pred.children, gold.children, config)
    if pred.profile is None or gold.profile is None:
        return below
    local = local_similarity(pred.profile, gold.profile, config)
    if config.empty_child == "renorm" and not pred.children and not gold.children:
        return _Match(local, missing=False, extra=False, main=pred.profile)
    score = config.alpha * local + (1 - config.alpha) * below.score
    return _Match(score, below.missing, below.extra, pred.profile)


def _match_children(preds: tuple[Node, ...], golds: tuple[Node, ...], config: TreeConfig) -> _Match:
    """Give each gold child, in order, the best predicted child that is left and compatible."""
    if not preds and not golds:
        return _Match(1.0, missing=False, extra=False)
    left = dict(enumerate(preds))
    unmatched: list[Node] = []
    found: list[_Match] = []
    main: Profile | None = None
    by_name = [lambda p, g: _compatible(p, g, config)]
    if config.cte_match == "name_then_any":
        by_name.append(lambda p, g: p.kind == g.kind == "CTE")
    pending = list(golds)
    for compatible in by_name:
        unmatched = []
        for gold in pending:
            scored = {
                at: _match(pred, gold, config)
                for at, pred in left.items()
                if compatible(pred, gold)
            }
            if not scored:
                unmatched.append(gold)
                continue
            best = max(scored, key=lambda at: scored[at].score)
            found.append(scored[best])
            if gold is golds[0]:
                main = scored[best].main
            del left[best]
        pending = unmatched
    return _Match(
        sum(match.score for match in found) / max(len(preds), len(golds)),
        missing=any(m.missing for m in found) or any(n.kind != "SELECT" for n in unmatched),
        extra=any(m.extra for m in found) or any(n.kind != "SELECT" for n in left.values()),
        main=main,
    )


def _compatible(pred: Node, gold: Node, config: TreeConfig) -> bool:
    if pred.kind != gold.kind:
        return False
    if pred.kind == "CTE" or (pred.kind == "SET_OP" and config.setop_match == "same"):
        return pred.name == gold.name
    return True


def local_similarity(pred: Profile, gold: Profile, config: TreeConfig) -> float:
    """Average the similarities of the clauses of two SELECTs by their weights (table 5)."""
    w = config.weights
    joins = number_similarity(pred.joins, gold.joins)
    items = number_similarity(pred.items, gold.items)
    weighted = (
        (w.join, jaccard(pred.join, gold.join)),
        (w.where, jaccard(pred.where, gold.where)),
        (w.select, jaccard(pred.select, gold.select)),
        (w.tables, jaccard(pred.tables, gold.tables)),
        (w.group, jaccard(pred.group, gold.group)),
        (w.counts, (joins + items) / 2),
        (w.order, jaccard(pred.order, gold.order)),
        (w.distinct, float(pred.distinct == gold.distinct)),
        (w.having, jaccard(pred.having, gold.having)),
    )
    total = sum(weight for weight, _ in weighted)
    return sum(weight * similarity for weight, similarity in weighted) / total if total else 1.0


def jaccard(pred: Features, gold: Features) -> float:
    """Divide the common features by all; two empty sets agree, one empty set agrees with none."""
    if not pred and not gold:
        return 1.0
    shared = len(pred & gold)
    return shared / (len(pred) + len(gold) - shared)


def number_similarity(pred: int, gold: int) -> float:
    """Compare two counts: 1 - min(1, |pred - gold| / max(1, gold))."""
    return 1.0 - min(1.0, abs(pred - gold) / max(1, gold))


def _main_profile(root: Node) -> Profile:
    """Return the profile of the main SELECT, of a set operation the leftmost."""
    node = root
    while node.profile is None:
        node = node.children[0]
    return node.profile


def _clause_tags(pred: Profile, gold: Profile, config: TreeConfig) -> list[str]:
    """Name the clauses that differ (tables 6 and 7), in the order of the case study."""
    limits = config.thresholds
    no_joins = config.tag_exclusive and not pred.joins and gold.joins > 0
    no_group = not pred.group and bool(gold.group)
    fewer = pred.joins < gold.joins
    differs = pred.joins != gold.joins
    rules = (
        ("JOIN_MISSING", fewer if config.join_missing == "fewer" else differs),
        ("JOIN_KEY_MISMATCH", not no_joins and jaccard(pred.join, gold.join) < limits.join),
        ("FROM_OR_JOIN_TABLE_MISMATCH", jaccard(pred.tables, gold.tables) < limits.tables),
        ("WHERE_ERROR", jaccard(pred.where, gold.where) < limits.where),
        ("SELECT_ERROR", jaccard(pred.select, gold.select) < limits.select),
        ("AGGREGATE_ERROR", pred.aggregate != gold.aggregate),
        ("GROUP_BY_MISSING", no_group),
        (
            "GROUP_BY_ERROR",
            not (config.tag_exclusive and no_group)
            and jaccard(pred.group, gold.group) < limits.group,
        ),
        ("ORDER_BY_MISMATCH", jaccard(pred.order, gold.order) < limits.order),
        ("DISTINCT_MISMATCH", pred.distinct != gold.distinct),
    )
    return [tag for tag, applies in rules if applies]
