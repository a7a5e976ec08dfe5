"""What official programs do to a query's text."""

import pytest

from sqlenv.evaluators.official import (
    as_omnisql_writes,
    as_spider_runs,
    count_statements,
    same_query,
)
from tests.sqlenv.cases import read_cases


@pytest.mark.parametrize(("sql", "expected"), read_cases("what Spider runs"))
def test_what_spider_runs(sql: str, expected: str | None) -> None:
    expected = expected or "SELECT a FROM t WHERE a >= 1 AND b <=2 AND c != 3"
    assert as_spider_runs(sql) == expected


def test_spider_may_keep_distinct_and_all_statements() -> None:
    sql = "SELECT DISTINCT a FROM t WHERE b > = 1; SELECT 2"
    assert as_spider_runs(sql, keep_distinct=True) == sql.replace("> =", ">=")


@pytest.mark.parametrize(("sql", "count"), read_cases("statements"))
def test_statements_as_pythons_module_counts_them(sql: str, count: str) -> None:
    assert count_statements(sql) == count


@pytest.mark.parametrize(("sql", "written"), read_cases("what OmniSQL writes"))
def test_what_omnisql_writes(sql: str, written: str) -> None:
    assert as_omnisql_writes(sql) == written


def test_same_query_evens_out_case_and_blanks_outside_quotes() -> None:
    sql = "SELECT  Name\nFROM T WHERE a = 'X  Y' ;"
    assert same_query(sql) == "select name from t where a = 'X  Y'"
    assert same_query("select name from t where a = 'x  y'") != same_query(sql)
    assert same_query("SELECT É") != same_query("SELECT é")
    for kept in ("SELECT 1 -- A", "SELECT /* A */ 1", "SELECT 1 /* open"):
        assert same_query(kept) == kept
