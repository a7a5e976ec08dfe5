"""Spider's levels of difficulty, on queries whose official level is known."""

import pytest

from sqlenv.evaluators.hardness import hardness

COLUMN = [0, [0, [0, 1, False], None]]
COUNT = [3, [0, [0, 0, False], None]]
UNIT = [0, 1, False]
AGE = [False, 3, [0, UNIT, None], 20.0, None]
LIKE = [False, 9, [0, UNIT, None], "'%a%'", None]
NOT_IN = [True, 8, [0, UNIT, None], {"select": []}, None]
BY_COLUMN = ["asc", [[0, UNIT, None]]]
BY_COUNT = ["desc", [[0, [3, 0, False], None]]]


def parsed(*items, tables=1, **clauses):
    empty = {
        "where": [], "groupBy": [], "having": [], "orderBy": [], "limit": None,
        "intersect": None, "union": None, "except": None,
    }  # fmt: skip
    joins = [AGE] * (tables - 1)
    return {
        "select": [False, list(items)],
        "from": {"table_units": [["table_unit", i] for i in range(tables)], "conds": joins},
        **empty,
        **clauses,
    }


@pytest.mark.parametrize(
    ("sql", "level"),
    [
        (parsed(COUNT), "easy"),
        (parsed(COLUMN, where=[AGE]), "easy"),
        (parsed(COLUMN, COLUMN, where=[AGE]), "medium"),
        (parsed(COLUMN, where=[AGE], orderBy=BY_COLUMN), "medium"),
        (parsed(COLUMN, where=[LIKE]), "medium"),
        (parsed(COUNT, COUNT, COUNT, where=[AGE]), "medium"),
        (parsed(COLUMN, tables=2, where=[AGE], groupBy=[UNIT]), "hard"),
        (parsed(COLUMN, where=[NOT_IN]), "hard"),
        (parsed(COLUMN, **{"except": parsed(COLUMN)}), "hard"),
        (parsed(COLUMN, COUNT, groupBy=[UNIT], orderBy=BY_COUNT, limit=1), "hard"),
        (parsed(COLUMN, where=[AGE, "and", AGE], union=parsed(COLUMN)), "extra"),
        (parsed(COLUMN, tables=3, where=[AGE, "or", AGE]), "extra"),
        # Two of both: neither medium (one clause at most) nor hard (more than two others).
        (parsed(COUNT, COUNT, where=[AGE], orderBy=BY_COLUMN), "extra"),
        # The quirk: in HAVING a connector counts as an aggregate.
        (parsed(COLUMN, having=[AGE, "and", AGE]), "easy"),
        (parsed(COUNT, having=[AGE, "and", AGE]), "medium"),
    ],
)
def test_level(sql, level):
    assert hardness(sql) == level
