"""What a gold query has, and Spider's four levels of difficulty, from a query's text.

Levels are those of taoyds/test-suite-sql-eval (evaluation.py) at e97acc546ecb, of the first SELECT
of a set operation as there. What its parser (process_sql.py) does to conditions is kept; what it
cannot read, such as `<>`, has a level all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Literal

from sqlglot import exp

from sqlenv.sql.extraction import bare, clause, parse

Hardness = Literal["easy", "medium", "hard", "extra"]

_AGGREGATES = (exp.Max, exp.Min, exp.Count, exp.Sum, exp.Avg)
_VALUES = ("expression", "low", "high", "query")
_QUERIES = (exp.Subquery, exp.Query)
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
    return tuple(name for name, kinds in _CLAUSES.items() if tree.find(*kinds)) or ("none",)


@lru_cache(maxsize=16384)
def grade(sql: str) -> Hardness | None:
    """Grade the text of a query; None where it does not parse."""
    if (query := parse(sql)) is None:
        return None
    select = bare(query)
    while isinstance(select, exp.SetOperation):
        select = bare(select.this)
    if not isinstance(select, exp.Select):
        return None
    joins = select.args.get("joins") or ()
    where, having = (_conditions(clause(select, name)) for name in ("where", "having"))
    on = [_conditions([join.args["on"]]) for join in joins if join.args.get("on")]
    conditions = [*chain.from_iterable(on), *where, *having]
    groups, orders = clause(select, "group"), clause(select, "order")
    present = (where, groups, orders, select.args.get("limit"))
    clauses = sum(map(bool, present)) + len(joins)
    clauses += sum((w == "or") + isinstance(_plain(node), exp.Like) for w, node in conditions)
    values = (_plain(node).args.get(name) for _, node in conditions for name in _VALUES)
    nested = sum(isinstance(value, _QUERIES) for value in values)
    nested += isinstance(bare(query), exp.SetOperation)
    # As in the original: a NOT in a condition and a connector in HAVING count as aggregates.
    aggregates = sum(isinstance(node, exp.Not) for _, node in (*where, *having))
    aggregates += max(0, len(having) - 1)
    shown = (*select.expressions, *groups, *chain.from_iterable(map(_sides, orders)))
    plain = (one.this if isinstance(one, exp.Alias) else one for one in shown)
    aggregates += sum(isinstance(bare(one), _AGGREGATES) for one in plain)
    counts = (aggregates, len(select.expressions), len(where), len(groups))
    return _level(clauses, nested, sum(count > 1 for count in counts))


def _level(clauses: int, nested: int, others: int) -> Hardness:
    if nested:
        return "hard" if clauses <= 1 and nested == 1 and others == 0 else "extra"
    if clauses <= 1 and others == 0:
        return "easy"
    if (clauses <= 1 and others == 2) or (clauses <= 2 and others < 2):
        return "medium"
    return "hard" if (clauses <= 2 < others) or (clauses == 3 and others <= 2) else "extra"


def _conditions(roots: Sequence[exp.Expression]) -> list[tuple[str, exp.Expression]]:
    """List conditions in the order of the text, each with the word before it; what follows a column
    on the right of a comparison is lost up to an AND.
    """
    kept: list[tuple[str, exp.Expression]] = []
    is_lost = False
    for word, node in chain.from_iterable(map(_in_order, roots)):
        is_lost = word == "or" and (is_lost or _ends_with_column(kept[-1][1]))
        if not is_lost:
            kept.append((word, node))
    return kept


def _ends_with_column(condition: exp.Expression) -> bool:
    """Tell a column on the right; a name in double quotes is text to Spider."""
    last = condition.args.get("expression")
    return isinstance(last, exp.Column) and not last.this.args.get("quoted")


def _in_order(node: exp.Expression, word: str = "and") -> Iterator[tuple[str, exp.Expression]]:
    node = bare(node)
    if isinstance(node, exp.Connector):
        yield from _in_order(node.this, word)
        yield from _in_order(node.expression, node.key)
    else:
        yield word, node


def _plain(condition: exp.Expression) -> exp.Expression:
    return condition.this if isinstance(condition, exp.Not) else condition


def _sides(order: exp.Expression) -> list[exp.Expression]:
    node = bare(order.this)
    return [node.this, node.expression] if isinstance(node, exp.Binary) else [node]
