"""Spider's levels from a query's text, and the official parser's ways."""

import json

import pytest

from sqlenv.evaluators.hardness import grade, hardness
from sqlenv.evaluators.spider_parse import NotSpiderError, spider_parse


@pytest.mark.parametrize(
    ("sql", "level"),
    [
        # Measured with the official program.
        ("SELECT count(*) FROM singer", "easy"),
        ("SELECT name FROM singer WHERE age > 20", "easy"),
        ("SELECT name, age FROM singer WHERE age > 20", "medium"),
        ("SELECT name FROM singer WHERE age > 20 ORDER BY age", "medium"),
        ("SELECT avg(age), min(age), max(age) FROM singer WHERE country = 'France'", "medium"),
        (
            "SELECT T2.name FROM a AS T1 JOIN b AS T2 ON T1.id = T2.id WHERE T1.x = 1 "
            "GROUP BY T2.name",
            "hard",
        ),
        ("SELECT name FROM s WHERE id NOT IN (SELECT id FROM c)", "hard"),
        ("SELECT name FROM s EXCEPT SELECT name FROM c", "hard"),
        (
            "SELECT country, count(*) FROM s GROUP BY country ORDER BY count(*) DESC LIMIT 1",
            "hard",
        ),
        ("SELECT a FROM s WHERE b = 1 AND c = 2 UNION SELECT a FROM s", "extra"),
        (
            "SELECT T1.a FROM x AS T1 JOIN y AS T2 ON T1.i = T2.i JOIN z AS T3 ON T2.j = T3.j "
            "WHERE T3.b = 1 OR T3.c = 2",
            "extra",
        ),
        # An OR behind a column on the right of a comparison is lost.
        ("SELECT a FROM t WHERE a = b OR c = 1", "easy"),
        ("SELECT a FROM t WHERE a = 1 OR c = 1", "medium"),
        # In HAVING a connector counts as an aggregate.
        ("SELECT count(*) FROM t GROUP BY a HAVING a = 1 AND b = 2", "medium"),
        # Two of both: neither medium (one clause at most) nor hard (more than two others).
        ("SELECT count(*), count(*) FROM t WHERE a > 1 ORDER BY b", "extra"),
        ("SELECT count(*), sum(a), avg(a) FROM t WHERE a > 1", "medium"),
        ("SELECT a FROM t WHERE b BETWEEN 1 AND 2;", "easy"),
        ("SELECT a FROM (SELECT b FROM t) WHERE a LIKE '%x y%'", "medium"),
        ("SELECT a FROM t WHERE x >= 1 AND y != 2 AND z <= 3", "medium"),
    ],
)
def test_levels(sql, level):
    assert grade(sql) == level


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "SELECT 1",
        "SELECT a FROM t WHERE a <> 1",
        "SELECT a FROM t WHERE b=1",
        "SELECT a FROM t WHERE name = 'O''Brien' AND x = 'it\"s'",
        "SELECT a FROM t WHERE b IN (1, 2",
        "SELECT a FROM t GROUP a",
        "SELECT a FROM t WHERE " + "(" * 5000,
        "SELECT a FROM " + "(SELECT a FROM " * 3000,
    ],
)
def test_what_the_official_parser_cannot_read_has_no_level(sql):
    assert grade(sql) is None
    with pytest.raises(NotSpiderError):
        spider_parse(sql)


def test_levels_of_all_records_equal_those_of_their_parse(shared):
    folder = shared / "data/spider_data"
    count = 0
    for name in ("train_spider.json", "dev_visible.json"):
        for record in json.loads((folder / name).read_text()):
            if record["sql"]:
                assert grade(record["query"]) == hardness(record["sql"]), record["query"]
                count += 1
    assert count == 7411
