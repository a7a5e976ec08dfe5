"""Scores of questions by what the questions are: level, database, clauses, tags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from sqlglot import exp

from sqlenv.parse import parse
from sqlenv.types import Example

Labels = Mapping[str, Sequence[str]]
"""What a question is, by heading; it may have several labels of one kind, or none."""

_CLAUSES: Mapping[str, tuple[type[exp.Expr], ...]] = {
    "JOIN": (exp.Join,),
    "WHERE": (exp.Where,),
    "GROUP BY": (exp.Group,),
    "HAVING": (exp.Having,),
    "ORDER BY": (exp.Order,),
    "LIMIT": (exp.Limit,),
    "DISTINCT": (exp.Distinct,),
    "aggregate": (exp.AggFunc,),
    "subquery": (exp.Subquery, exp.Exists),
    "set operation": (exp.SetOperation,),
    "WITH": (exp.CTE,),
    "window": (exp.Window,),
    "CASE": (exp.Case,),
}


@dataclass(frozen=True, slots=True)
class Part:
    """The questions of one label.

    Attributes:
        count: How many they are.
        mean: Their mean score.
    """

    count: int
    mean: float


def clauses_of(sql: str) -> tuple[str, ...]:
    """Name what a query has, anywhere in it; `none` for a plain one, `unparsed` for no query."""
    tree = parse(sql)
    if tree is None:
        return ("unparsed",)
    return tuple(name for name, kinds in _CLAUSES.items() if tree.find(*kinds)) or ("none",)


def labels_of(example: Example, *, tags: Sequence[str] = ()) -> Labels:
    """Say what a question is.

    Args:
        example: The question.
        tags: The diagnostic tree's, of its prediction.
    """
    return {
        "difficulty": (example.difficulty or "unknown",),
        "database": (example.db_id,),
        "clause": clauses_of(example.gold_sql),
        "tag": tuple(tags) or ("none",),
    }


def break_down(labels: Sequence[Labels], scores: Sequence[float]) -> dict[str, dict[str, Part]]:
    """Average scores over the questions of each label.

    Args:
        labels: Of each question.
        scores: Of each question, in the same order.

    Returns:
        By heading and label, in the order of first sight; empty without questions.
    """
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for own, score in zip(labels, scores, strict=True):
        for heading, names in own.items():
            for name in names:
                found[heading][name].append(score)
    return {
        heading: {name: Part(len(each), fmean(each)) for name, each in parts.items()}
        for heading, parts in found.items()
    }
