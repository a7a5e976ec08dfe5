"""What a gold query has, so that scores can be told apart by it."""

from __future__ import annotations

from collections.abc import Mapping

from sqlglot import exp

from sqlenv.sql.extraction import parse

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


def clauses_of(sql: str) -> tuple[str, ...]:
    """Name what a query has, anywhere in it; `none` for a plain one, `unparsed` for no query."""
    tree = parse(sql)
    if tree is None:
        return ("unparsed",)
    found = {type(node) for node in tree.walk()}  # once, where `find` would walk for each clause
    names = (
        name for name, kinds in _CLAUSES.items() if any(issubclass(kind, kinds) for kind in found)
    )
    return tuple(names) or ("none",)
