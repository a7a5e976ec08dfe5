"""The mistakes of a weak annotator: one part confused or forgotten, the rest left alone."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sqlenv.data.corruptions import corrupt

DATA = Path(__file__).parents[1] / "data"
CASES = dict(json.loads((DATA / "corruptions.json").read_text()))


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
