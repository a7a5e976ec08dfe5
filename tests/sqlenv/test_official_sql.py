"""What official programs do to a query's text."""

import pytest

from sqlenv.evaluators.official import (
    as_omnisql_writes,
    as_spider_runs,
    count_statements,
    same_query,
)


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        # Figures of the official program, as the notes on evaluation give them.
        ("SELECT DISTINCT a, count(DISTINCT b) FROM t", "SELECT  a, count( b) FROM t"),
        ("SELECT DiStInCt(a) FROM t", "SELECT (a) FROM t"),
        ("SELECT a FROM t WHERE b = 'DISTINCT'", "SELECT a FROM t WHERE b = 'DISTINCT'"),
        ('SELECT "distinct", `distinct`, [distinct]', 'SELECT "distinct", `distinct`, [distinct]'),
        ("SELECT a_distinct, distinct_b, t.distinct", "SELECT a_distinct, distinct_b, t."),
        ("SELECT a -- DISTINCT\n, DISTINCT b", "SELECT a -- DISTINCT\n,  b"),
        ("SELECT /* DISTINCT */ DISTINCT b", "SELECT /* DISTINCT */  b"),
        (r"SELECT 'a\' DISTINCT b'", r"SELECT 'a\' DISTINCT b'"),
        ("SELECT a FROM t WHERE a > = 1 AND b < =2 AND c ! = 3", None),
        ("SELECT YEAR ( curdate( ) ) - a", "SELECT 2020- a"),
        ("SELECT 1; SELECT 2", "SELECT 1;"),
        ("SELECT ';'; SELECT DISTINCT 2", "SELECT ';';"),
        ("SELECT a -- ; \n FROM t;", "SELECT a -- ; \n FROM t;"),
    ],
)
def test_what_spider_runs(sql: str, expected: str | None) -> None:
    expected = expected or "SELECT a FROM t WHERE a >= 1 AND b <=2 AND c != 3"
    assert as_spider_runs(sql) == expected


def test_spider_may_keep_distinct_and_all_statements() -> None:
    sql = "SELECT DISTINCT a FROM t WHERE b > = 1; SELECT 2"
    assert as_spider_runs(sql, keep_distinct=True) == sql.replace("> =", ">=")


@pytest.mark.parametrize(
    ("sql", "count"),
    [
        ("", "none"),
        (" \n", "none"),
        (";", "none"),
        ("-- a", "none"),
        ("/* a */ ; -- b", "none"),
        ("/* open", "none"),
        ("SELECT 1", "one"),
        ("SELECT 1;", "one"),
        (";SELECT 1; -- a", "one"),
        ("SELECT 1; /* open", "one"),
        ("-- a;\nSELECT 1", "one"),
        ("SELECT ';;'", "one"),
        ('SELECT "a;b", [c;d], `e;f`', "one"),
        ("SELECT 1;;", "several"),
        ("SELECT 1; SELECT 2", "several"),
        ("SELECT 1;\v", "several"),
        ("SELECT 1; 'x'", "several"),
    ],
)
def test_statements_as_pythons_module_counts_them(sql: str, count: str) -> None:
    assert count_statements(sql) == count


@pytest.mark.parametrize(
    ("sql", "written"),
    [
        ("SELECT a,\n\tb FROM t -- all\nWHERE c", "SELECT a,  b FROM t  WHERE c"),
        ("SELECT /* x\ny */ 1", "SELECT  1"),
        ("SELECT '--' FROM t", "SELECT '"),
        ("-- nothing", "Error SQL"),
        ("", "Error SQL"),
    ],
)
def test_what_omnisql_writes(sql: str, written: str) -> None:
    assert as_omnisql_writes(sql) == written


def test_same_query_evens_out_case_and_blanks_outside_quotes() -> None:
    sql = "SELECT  Name\nFROM T WHERE a = 'X  Y' ;"
    assert same_query(sql) == "select name from t where a = 'X  Y'"
    assert same_query("select name from t where a = 'x  y'") != same_query(sql)
    assert same_query("SELECT É") != same_query("SELECT é")
    for kept in ("SELECT 1 -- A", "SELECT /* A */ 1", "SELECT 1 /* open"):
        assert same_query(kept) == kept
