"""The mistakes of a weak annotator: one part confused or forgotten, the rest left alone."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sqlenv.data.corruptions import corrupt

DATA = Path(__file__).parents[1] / "data"
CASES = {
    "SELECT a FROM t GROUP BY a HAVING COUNT(*) > 2": (
        "SELECT a FROM t GROUP BY a HAVING COUNT(*) < 2"
    ),
    "SELECT a FROM t WHERE b = 1": "SELECT a FROM t WHERE b <> 1",
    "SELECT a FROM t WHERE b <> 1": "SELECT a FROM t WHERE b = 1",
    "SELECT a FROM t WHERE b = 1 AND c AND d": "SELECT a FROM t WHERE b = 1 AND c AND NOT d",
    "SELECT a FROM t WHERE b = 1 OR c <= 2": "SELECT a FROM t WHERE b = 1 OR c >= 2",
    "SELECT a FROM t WHERE b = 1 AND (c OR d)": "SELECT a FROM t WHERE b = 1 AND NOT (c OR d)",
    "SELECT a FROM t WHERE b NOT IN (SELECT d FROM u)": (
        "SELECT a FROM t WHERE b IN (SELECT d FROM u)"
    ),
    "SELECT a FROM t WHERE b BETWEEN 1 AND 2": "SELECT a FROM t WHERE NOT b BETWEEN 1 AND 2",
    "SELECT DISTINCT a FROM t": "SELECT a FROM t",
    "SELECT COUNT(DISTINCT a) FROM t": "SELECT COUNT(a) FROM t",
    "SELECT a FROM t ORDER BY b DESC LIMIT 1": "SELECT a FROM t ORDER BY b LIMIT 1",
    "SELECT a FROM t ORDER BY b ASC, c DESC": "SELECT a FROM t ORDER BY b DESC, c",
    "SELECT a, COUNT(*) FROM t GROUP BY a": "SELECT a, COUNT(*) FROM t",
    "SELECT MAX(a) FROM t": "SELECT MIN(a) FROM t",
    "SELECT b, AVG(a) FROM t": "SELECT b, SUM(a) FROM t",
    "SELECT COUNT(*) FROM t": "SELECT * FROM t",
    "SELECT a, b FROM t AS x JOIN u AS y ON x.c": "SELECT * FROM t AS x JOIN u AS y ON x.c",
    "SELECT a FROM t UNION SELECT b FROM u": "SELECT a FROM t INTERSECT SELECT b FROM u",
    "SELECT a FROM t EXCEPT SELECT a FROM t WHERE b": (
        "SELECT a FROM t INTERSECT SELECT a FROM t WHERE b"
    ),
    "SELECT a FROM t INTERSECT SELECT b FROM u": "SELECT a FROM t UNION SELECT b FROM u",
    "(SELECT a FROM t WHERE b)": "SELECT a FROM t WHERE NOT b",
    "SELECT a FROM t UNION SELECT b FROM u UNION SELECT d FROM u": (
        "SELECT a FROM t UNION SELECT b FROM u INTERSECT SELECT d FROM u"
    ),
    "WITH x AS (SELECT a FROM t) SELECT a FROM x UNION SELECT b FROM u": (
        "WITH x AS (SELECT a FROM t) SELECT a FROM x INTERSECT SELECT b FROM u"
    ),
    "WITH x AS (SELECT a FROM t WHERE b) SELECT a FROM x WHERE a": (
        "WITH x AS (SELECT a FROM t WHERE b) SELECT a FROM x WHERE NOT a"
    ),
    "SELECT MAX(a) AS m FROM t": "SELECT MIN(a) AS m FROM t",
    "SELECT MAX(a, b) FROM t": "SELECT * FROM t",
    "SELECT (SELECT DISTINCT a FROM t LIMIT 1) FROM u": "SELECT * FROM u",
    "SELECT EXISTS(SELECT DISTINCT a FROM t) FROM u": "SELECT * FROM u",
    "SELECT x.a FROM (SELECT a FROM t WHERE b) AS x": (
        "SELECT * FROM (SELECT a FROM t WHERE b) AS x"
    ),
    "SELECT SUM(a) OVER (ORDER BY b) FROM t": "SELECT * FROM t",
}


@pytest.mark.parametrize(("sql", "wrong"), CASES.items())
def test_one_part_is_wrong(sql, wrong):
    found = corrupt(sql)
    assert found is not None
    assert found.replace(" ASC", "") == wrong


NO_MISTAKE = ("", "DROP TABLE t", "SELECT FROM", "(" * 5000, "SELECT * FROM t", "SELECT 1")


@pytest.mark.parametrize("sql", NO_MISTAKE)
def test_what_does_not_parse_or_has_nothing_to_get_wrong_has_no_mistake(sql):
    assert corrupt(sql) is None


def test_a_mistake_runs():
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript("CREATE TABLE t (a, b, c, d); CREATE TABLE u (b, d);")
        for sql in CASES:
            wrong = corrupt(sql)
            assert wrong is not None
            db.execute(wrong)
