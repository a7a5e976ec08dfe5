"""Spider's levels from a query's text, and the official parser's ways."""

import pytest

from sqlenv.evaluators.hardness import grade
from tests.sqlenv.cases import read_cases


@pytest.mark.parametrize(("sql", "level"), read_cases("Spider's levels"))
def test_levels(sql, level):
    assert grade(sql) == level


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "SELECT 1",
        "SELECT a FROM t WHERE a <> 1",
        "SELECT a FROM t WHERE b=1",
        "SELECT a FROM t WHERE b = 'x\0y'",
        "SELECT a FROM t WHERE name = 'O''Brien' AND x = 'it\"s'",
        "SELECT a FROM t WHERE b IN (1, 2",
        "SELECT a FROM t GROUP a",
        "SELECT a FROM t WHERE " + "(" * 5000,
        "SELECT a FROM " + "(SELECT a FROM " * 3000,
    ],
)
def test_what_the_official_parser_cannot_read_has_no_level(sql):
    assert grade(sql) is None
