"""What official programs make of texts and tables, case by case (`tests/data/sql_rules.json`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sqlenv.evaluators.bird import soft_f1
from sqlenv.evaluators.equality import is_ordered, matches
from sqlenv.evaluators.features import clauses_of
from sqlenv.evaluators.hardness import grade
from sqlenv.evaluators.official import as_spider_runs, count_statements, same_query
from sqlenv.evaluators.spider2 import Reference, agrees, columns_of_rows
from sqlenv.sql.extraction import parse
from tests.sqlenv.cases import read_cases, table


def agrees_in_order(predicted: Any, gold: Any, expected: bool) -> bool:
    golds = (columns_of_rows(gold, len(gold[0])),)
    assert agrees(table(predicted), Reference(golds)) is expected
    return agrees(table(predicted), Reference(golds, ignore_order=True))


RULES: Mapping[str, Callable[..., Any]] = {
    "what Spider runs": as_spider_runs,
    "statements": count_statements,
    "Spider's levels": grade,
    "ORDER BY of the whole query": is_ordered,
    "Spider's rule": lambda predicted, gold, sql: matches(
        table(predicted), table(gold), mode="test_suite", gold_sql=sql
    ),
    "Spider 2's rule": agrees_in_order,
    "BIRD's soft F1": lambda predicted, gold: soft_f1(table(predicted), table(gold)),
    "what a query has": clauses_of,
    "no query": parse,
}


@pytest.mark.parametrize(("rule", "case"), [(r, case) for r in RULES for case in read_cases(r)])
def test_rule(rule: str, case: tuple[Any, ...]) -> None:
    *given, expected = case
    found = RULES[rule](*given)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_nesting_without_end_has_no_level() -> None:
    assert grade("SELECT a FROM t WHERE " + "(" * 5000) is None
    assert grade("SELECT a FROM " + "(SELECT a FROM " * 3000) is None


def test_same_query_evens_out_case_blanks_and_comments_outside_quotes() -> None:
    sql = "SELECT  Name\nFROM T WHERE a = 'X  Y' ;"
    assert same_query(sql) == "select name from t where a = 'X  Y'"
    assert same_query("select name from t where a = 'x  y'") != same_query(sql)
    assert same_query("SELECT É") != same_query("SELECT é")
    for spelling in ("SELECT 1 -- A", "SELECT /* A */ 1", "SELECT 1 /* open", "-- A\nSELECT 1 ; ;"):
        assert same_query(spelling) == "select 1"
    for kept in ("select '-- no  comment'", 'select "/* a */"', "select '; '"):
        assert same_query(kept) == kept
