"""Spider's four levels of difficulty, from a query's text or its parse in a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from sqlenv.evaluators.spider_parse import OPERATORS, NotSpiderError, spider_parse

Hardness = Literal["easy", "medium", "hard", "extra"]
_LIKE = OPERATORS.index("like")


@lru_cache(maxsize=16384)
def grade(sql: str) -> Hardness | None:
    """Grade the text of a query; None where Spider's parser cannot read it."""
    try:
        return hardness(spider_parse(sql))
    except NotSpiderError:
        return None


def hardness(sql: Mapping[str, Any]) -> Hardness:
    """Grade the `sql` field of a Spider record (taoyds/test-suite-sql-eval, evaluation.py)."""
    clauses, nested, others = _clauses(sql), _nested(sql), _others(sql)
    if nested:
        return "hard" if clauses <= 1 and nested == 1 and others == 0 else "extra"
    if clauses <= 1 and others == 0:
        return "easy"
    if (clauses <= 1 and others == 2) or (clauses <= 2 and others < 2):
        return "medium"
    return "hard" if (clauses <= 2 < others) or (clauses == 3 and others <= 2) else "extra"


def _clauses(sql: Mapping[str, Any]) -> int:
    present = sum(bool(sql[clause]) for clause in ("where", "groupBy", "orderBy"))
    joins = max(0, len(sql["from"]["table_units"]) - 1)
    lists = (sql["from"]["conds"], sql["where"], sql["having"])
    ors = sum(list(conditions[1::2]).count("or") for conditions in lists)
    likes = sum(condition[1] == _LIKE for condition in _conditions(sql))
    return present + (sql["limit"] is not None) + joins + ors + likes


def _nested(sql: Mapping[str, Any]) -> int:
    values = (value for condition in _conditions(sql) for value in condition[3:5])
    operands = (sql[operator] for operator in ("intersect", "except", "union"))
    return sum(isinstance(value, Mapping) for value in values) + sum(map(bool, operands))


def _others(sql: Mapping[str, Any]) -> int:
    items = sql["select"][1]
    ordered = [unit for value in (sql["orderBy"] or [[], []])[1] for unit in value[1:3] if unit]
    # As in the original: a NOT in WHERE and a connector in HAVING count as aggregates.
    aggregates = _marked([*items, *sql["where"][::2], *sql["groupBy"], *ordered, *sql["having"]])
    return sum(n > 1 for n in (aggregates, len(items), len(sql["where"]), len(sql["groupBy"])))


def _conditions(sql: Mapping[str, Any]) -> list[Sequence[Any]]:
    return [*sql["from"]["conds"][::2], *sql["where"][::2], *sql["having"][::2]]


def _marked(units: Iterable[Sequence[Any]]) -> int:
    return sum(unit[0] != 0 for unit in units)
