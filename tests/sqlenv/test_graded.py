"""The rules of corrected golds: as published, and repeated on published verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sqlenv.config import OFFICIAL
from sqlenv.evaluators.comparators import Case, judge_cases
from sqlenv.evaluators.graded import GradingMethod, is_graded_right, is_strictly_equal
from sqlenv.executor import Executor
from tests.sqlenv.cases import read_cases, table


@pytest.mark.parametrize(
    ("method", "predicted", "gold", "expected"),
    read_cases("a question's own rule"),
)
def test_a_question_has_its_own_rule(method, predicted, gold, expected):
    found = is_graded_right(table(predicted), table(gold), GradingMethod.parse(method))
    assert found == expected


@pytest.mark.parametrize(
    ("predicted", "gold", "expected"),
    read_cases("BIRD-Platinum's strict rule"),
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
    with Executor(OFFICIAL) as executor:
        judged = judge_cases(executor, cases, ("set", "bird_ex"))
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
        judged = judge_cases(executor, cases, ("bird_ex", "bird_strict"))
    pairs = [(one.scores["bird_ex"] == 1, one.scores["bird_strict"] == 1) for one in judged]
    published = [(one["set"], one["multiset"]) for one in records]
    differing = [n for n, pair in enumerate(pairs) if pair != published[n]]
    assert (len(pairs), differing) == (1073, [])
