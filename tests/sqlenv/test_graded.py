"""The rules of corrected golds: as published, and repeated on published verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sqlenv.config import OFFICIAL
from sqlenv.evaluators.comparators import Case
from sqlenv.evaluators.graded import GradingMethod, is_graded_right, is_strictly_equal
from sqlenv.executor import Executor
from sqlenv.types import Row, Table

AB: list[Row] = [("a", 1), ("b", 2)]
THREE: list[Row] = [("a",), ("b",), ("c",)]


def table(rows: list[Row]) -> Table:
    return Table(("x",) * len(rows[0]) if rows else (), tuple(rows))


@pytest.mark.parametrize(
    ("method", "predicted", "gold", "expected"),
    [
        ("set", [("b", 2), ("a", 1), ("a", 1)], AB, True),
        ("set", [(2, "b"), (1, "a")], AB, True),  # the order of cells in a row does not count
        ("set", [("a", "1"), ("b", "2")], AB, True),  # cells are text
        ("set", [("a", 1.0), ("b", 2.0)], AB, False),
        ("set", [("a",), ("b",)], AB, False),
        ("set", [], [], True),
        ("set", [], AB, False),
        ("set", [(None,), (" ",), ("a",)], [("a",)], True),  # rows of nothing do not count
        ("multiset", AB[::-1], AB, True),
        (" multiset", [*AB, ("a", 1)], AB, False),
        ("list", AB, AB, True),
        ("list", AB[::-1], AB, False),
        ("subset,=,2", [("c",), ("a",)], THREE, True),
        ("subset,=,2", [("c",), ("a",), ("a",)], THREE, True),  # distinct rows are counted
        ("subset,=,2", THREE, THREE, False),
        ("subset,=,2", [("c",), ("d",)], THREE, False),
        ("subset,>=,2", THREE, THREE, True),
        ("subset,>=,2", [("c",)], THREE, False),
        ("subset", [("c",)], THREE, True),
        # One number may be off by a hundredth of the gold's.
        ("multiset", [(0.335,)], [(0.3333,)], True),
        ("multiset", [("33",)], [(33.0,)], True),
        ("multiset", [(0.34,)], [(0.3333,)], False),
        ("set", [(None,)], [(0,)], False),
        ("set", [(0,)], [(0,)], True),
    ],
)
def test_a_question_has_its_own_rule(method, predicted, gold, expected):
    found = is_graded_right(table(predicted), table(gold), GradingMethod.parse(method))
    assert found == expected


@pytest.mark.parametrize(
    ("predicted", "gold", "expected"),
    [
        ([(2, "b"), (1, "a")], AB, True),
        ([*AB, ("a", 1)], AB, False),
        ([("33",)], [(33,)], True),
        ([(33.0,)], [(33,)], False),
        ([(None,)], [], False),
        ([], [], True),
    ],
)
def test_the_strict_rule(predicted, gold, expected):
    assert is_strictly_equal(table(predicted), table(gold)) == expected


@pytest.mark.parametrize("text", ["", "sets", "subset,<,2", "subset,=,", "set,=,2", "subset,=,x"])
def test_other_rules_are_refused(text):
    with pytest.raises(ValueError, match="none of set, multiset, list, subset"):
        GradingMethod.parse(text)


def test_the_best_of_several_golds_counts(database: Path):
    golds = ("SELECT name FROM city WHERE country = 'FR'", "SELECT 'Oslo'")
    cases = [Case(sql, golds[0], database, alternatives=golds[1:]) for sql in (*golds, "SELECT 1")]
    with Executor(OFFICIAL.model_copy(update={"isolation": "thread"})) as executor:
        judged = executor.judge(cases, ("set", "bird_ex"))
    assert [one.scores for one in judged] == [
        {"set": score, "bird_ex": score} for score in (1.0, 1.0, 0.0)
    ]


def test_published_verdicts_of_bird_platinum_are_repeated(shared: Path):
    """31 result files on superhero, judged by BIRD's rule and by the strict one."""
    lines = (shared / "data/corrected/bird_platinum_superhero.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    database = shared / "data/bird_dev/dev_databases/superhero/superhero.sqlite"
    cases = [Case(one["prediction"], one["gold"], database) for one in records]
    with Executor(OFFICIAL) as executor:
        judged = executor.judge(cases, ("bird_ex", "bird_strict"))
    pairs = [(one.scores["bird_ex"] == 1, one.scores["bird_strict"] == 1) for one in judged]
    published = [(one["set"], one["multiset"]) for one in records]
    differing = [n for n, pair in enumerate(pairs) if pair != published[n]]
    assert (len(pairs), differing) == (1073, [])
