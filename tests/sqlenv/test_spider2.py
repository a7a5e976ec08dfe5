"""Spider 2's comparison of tables; verdicts measured with the official program."""

import json
from pathlib import Path

import pytest

from exchange import UserError
from sqlenv.evaluators.comparators import COMPARATORS, Case, QueryRuns
from sqlenv.evaluators.spider2 import (
    Reference,
    agrees,
    columns_of_rows,
    read_references,
)
from tests.sqlenv.cases import table

DB = Path("db")


def reference(*rows, ignore_order=False):
    return Reference((columns_of_rows(rows, len(rows[0])),), ignore_order)


def test_nothing_equals_zero_and_nothing():
    nothing = table([(None, 1), (5, 1)])
    assert agrees(nothing, reference((0, 1), (5, 1)))
    assert agrees(nothing, reference((None, 1), (5, 1)))


def test_any_gold_counts():
    golds = (((1, 2),), ((3, 4),))
    assert agrees(table([(3,), (4,)]), Reference(golds))
    assert not agrees(table([(3,), (5,)]), Reference(golds))
    assert not agrees(table([(3,), (4,)]), Reference(()))


def test_types_of_rows_are_those_of_the_written_text():
    rows = [(1, 2, b"x", "5"), (None, 2.5, "y", "6")]
    assert columns_of_rows(rows, 4)[1:] == ((2.0, 2.5), ("b'x'", "y"), (5, 6))
    # Integers beside floats alone become floats, as the program's array of numbers has it.
    found = columns_of_rows([(1, 2.5)], 2)
    assert [type(value) for column in found for value in column] == [float, float]


def test_references(tmp_path):
    results = tmp_path / "exec_result"
    results.mkdir()
    texts = {
        "local1_a": "a,b\n1,x\n", "local1_b": "a,b\n2,y\n",
        "local2": "a,b\n1,x\n", "local2_a": "a\n7\n",
        "local3_a": "a,b\n0,1\n", "local4_a": "a\n1\n", "local4_b": "a\n2\n",
    }  # fmt: skip
    for name, text in texts.items():
        (results / f"{name}.csv").write_text(text)
    standards = [
        {"instance_id": "local1", "condition_cols": [[1], [0]], "ignore_order": True},
        {"instance_id": "local2", "condition_cols": [0], "ignore_order": False},
        # Of one file with a letter the first number alone counts, and 0 means all.
        {"instance_id": "local3", "condition_cols": [1, 0], "ignore_order": False},
        # The second gold has no such column, where the program stops.
        {"instance_id": "local4", "condition_cols": [[0], [5]], "ignore_order": False},
        {"instance_id": "local5", "condition_cols": [], "ignore_order": False},
    ]
    file = tmp_path / "spider2lite_eval.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in standards))
    found = read_references(tmp_path)
    assert found["local1"] == Reference(((("x",),), ((2,),)), ignore_order=True)
    assert [each.rows for each in found["local1"].tables] == [((1, "x"),), ((2, "y"),)]
    assert found["local2"] == Reference((((1,),),))
    assert found["local3"] == Reference((((1,),),))
    assert found["local4"] == Reference((((1,),),))
    assert found["local5"] == Reference(())
    file.write_text("no json\n")
    with pytest.raises(UserError, match="line 1 is no record"):
        read_references(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        read_references(tmp_path / "nowhere")


def test_comparator_takes_fences_and_refuses_blanks():
    rows = table([(1,), (2,)])
    gold = reference((1,), (2,))
    function = COMPARATORS["spider2_local"].function
    runs = QueryRuns(lambda _path, sql: rows if sql == "SELECT 1" else table([(9,)]))
    for sql, score in (("```sql\nSELECT 1\n```", 1), ("SELECT 1", 1), ("SELECT 2", 0), ("", 0)):
        assert function(Case(sql, "", DB, reference=gold), runs).score == score
