import pytest

from sqlenv.evaluators.features import clauses_of


@pytest.mark.parametrize(
    ("sql", "clauses"),
    [
        ("SELECT a FROM t", ("none",)),
        ("SELECT a FROM t, u", ("JOIN",)),
        ("SELECT a FROM t WHERE b IN (SELECT c FROM u LIMIT 1)", ("WHERE", "LIMIT", "subquery")),
        ("SELECT a FROM t WHERE EXISTS (SELECT 1)", ("WHERE", "subquery")),
        ("SELECT count(DISTINCT a) FROM t GROUP BY b HAVING max(c) > 1 ORDER BY b",
         ("GROUP BY", "HAVING", "ORDER BY", "DISTINCT", "aggregate")),
        ("SELECT a FROM t EXCEPT SELECT b FROM u", ("set operation",)),
        ("WITH x AS (SELECT 1) SELECT CASE WHEN 1 THEN row_number() OVER () END FROM x",
         ("WITH", "window", "CASE")),
        ("SELECT a FROM", ("unparsed",)),
    ],
)  # fmt: skip
def test_clauses(sql, clauses):
    assert clauses_of(sql) == clauses
