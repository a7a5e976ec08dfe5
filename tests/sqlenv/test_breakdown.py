from pathlib import Path

import pytest

from sqlenv.breakdown import Part, break_down, clauses_of, labels_of
from sqlenv.types import Example


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


def test_means_by_label():
    def example(level, database, gold):
        return Example("1", "?", database, Path("x"), gold, difficulty=level)

    labels = [
        labels_of(example("easy", "one", "SELECT a FROM t WHERE b"), tags=("WHERE_ERROR",)),
        labels_of(example("easy", "two", "SELECT a FROM t WHERE b ORDER BY a")),
        labels_of(example("", "two", "SELECT a FROM t ORDER BY a")),
    ]
    assert break_down(labels, [0.0, 1.0, 0.5]) == {
        "difficulty": {"easy": Part(2, 0.5), "unknown": Part(1, 0.5)},
        "database": {"one": Part(1, 0.0), "two": Part(2, 0.75)},
        "clause": {"WHERE": Part(2, 0.5), "ORDER BY": Part(2, 0.75)},
        "tag": {"WHERE_ERROR": Part(1, 0.0), "none": Part(2, 0.75)},
    }
    assert break_down([], []) == {}
    with pytest.raises(ValueError, match="shorter"):
        break_down(labels, [1.0])
