"""The progressive reward and its one-shot baseline, from attempts to parts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from rewards.config import ProgressiveConfig
from rewards.progress.diagnosis import Diagnosis
from rewards.progress.reward import Alignment, OneShotReward, ProgressiveReward
from sqlenv.sql.answers import answer_of
from sqlenv.types import Attempt, Episode, Example, SqlError, Table
from tests.vectors import read

CASES = read("progressive")["cases"]
STUDY = {case["id"]: case for case in read("diagnosis")["cases"]}
GOOD = "<think> … </think>\n<sql>SELECT 1</sql>\n"
TABLE, ERROR = Table(("a",), ((1,),)), SqlError("no such column: b")
EXAMPLE = Example("1", "?", "db", Path("db.sqlite"), "SELECT a FROM t")


class KnownAlignment(ProgressiveReward):
    """Takes the alignment from the query's own text."""

    def align(self, example: Example, sql: str) -> Alignment:
        return Alignment(float(sql), 0.0, Diagnosis(0.0, (), pred_parsed=True, gold_parsed=True))


def attempt(sql: str, *, text: str = GOOD, runs: bool = True, correct: bool = False) -> Attempt:
    answer = replace(answer_of(text, "sql_tag"), sql=sql)
    return Attempt(answer, TABLE if runs else ERROR, correct)


def episode_of(case: dict) -> Episode:
    attempts = [
        attempt(str(turn["F"]), runs=turn["runs"], correct=turn.get("correct", False))
        for turn in case["turns"]
    ]
    if not case["format"]:
        last = case["turns"][-1]
        attempts[-1] = attempt(str(last["F"]), text="no tags", runs=last["runs"])
    return Episode(EXAMPLE, tuple(attempts))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_vectors(case):
    score = KnownAlignment(ProgressiveConfig())(episode_of(case))
    assert score.total == pytest.approx(case["total"], abs=1e-6)
    assert score.total == sum(score.parts.values())
    assert score.correct == case["turns"][-1].get("correct", False)
    if "parts" in case:
        names = ["format", "execution", "latency", "alignment"]
        expected = dict(zip(names, case["parts"], strict=True))
        assert score.parts == pytest.approx(expected, abs=1e-6)
    spared = KnownAlignment(ProgressiveConfig(align_k1="zero"))(episode_of(case))
    expected = case.get("total_align_k1_zero", case["total"])
    assert spared.total == pytest.approx(expected, abs=1e-6)


def test_case_study_end_to_end():
    rounds = [STUDY[f"case study, round {r}"] for r in ("1 as printed", "2", "3")]
    example = Example("1", "?", "db", Path("db.sqlite"), rounds[0]["gold"])
    attempts = [attempt(r["pred"], correct=r is rounds[2]) for r in rounds]
    reward = ProgressiveReward(ProgressiveConfig())
    episode = Episode(example, tuple(attempts))
    assert reward(episode).total == pytest.approx(1.918668, abs=1e-6)
    seen = reward.diagnostics(episode)
    assert seen["align/first"] == pytest.approx(0.549417, abs=1e-6)
    assert seen["align/last"] == pytest.approx(0.968085, abs=1e-6)
    assert not any(value for name, value in seen.items() if name.startswith("tag/"))
    two = Episode(example, tuple(attempts[:2]))
    told = reward.diagnostics(two)
    assert {name for name, value in told.items() if name.startswith("tag/") and value} == {
        "tag/JOIN_KEY_MISMATCH",
        "tag/FROM_OR_JOIN_TABLE_MISMATCH",
    }


def test_columns_of_the_database_reach_the_tree(make_database):
    path = make_database(["CREATE TABLE s (id, a)", "CREATE TABLE c (sid, b)"])
    example = Example("1", "?", "db", Path("x"), "SELECT s.a, c.b FROM s JOIN c ON s.id = c.sid")
    sql = "SELECT a, b FROM s JOIN c ON id = sid"
    reward = ProgressiveReward(ProgressiveConfig())
    assert reward.align(replace(example, database=path), sql).diagnosis.struct == 1.0
    assert reward.align(example, sql).diagnosis.struct < 1.0


@pytest.mark.parametrize(("alignment", "weights"), [("structural", (1, 0)), ("lexical", (0, 1))])
def test_ablations_leave_one_alignment(alignment, weights):
    """Table 3, without one of the two: F is the other, and so is its rise."""
    first, last = STUDY["case study, round 1 as printed"], STUDY["case study, round 3"]
    example = Example("1", "?", "db", Path("db.sqlite"), first["gold"])
    reward = ProgressiveReward(ProgressiveConfig(alignment=alignment))
    of = {}
    for case in (first, last):
        of[case["id"]] = weights[0] * case["struct"] + weights[1] * float(Fraction(case["lexical"]))
        assert reward.align(example, case["pred"]).value == pytest.approx(of[case["id"]], abs=1e-6)
    score = reward(Episode(example, (attempt(first["pred"]), attempt(last["pred"], correct=True))))
    assert score.parts["alignment"] == pytest.approx(of[last["id"]] - of[first["id"]], abs=2e-6)


def test_the_format_is_that_of_the_last_reply():
    episode = Episode(EXAMPLE, (attempt("0", text="<sql>a</sql>"), attempt("0")))
    assert KnownAlignment(ProgressiveConfig())(episode).parts["format"] == 0.5


@pytest.mark.parametrize(
    ("last", "total"),
    [
        (attempt("", correct=True), 3.0),
        (attempt(""), 1.0),
        (attempt("", text="x"), 0.5),
        (attempt("", runs=False), 0.5),
        (attempt("", runs=False, text="x"), 0.0),
    ],
)
def test_one_shot_sees_the_last_reply_only(last, total):
    reward = OneShotReward()
    score = reward(Episode(EXAMPLE, (attempt("", correct=True), last)))
    assert score.total == total
    assert score.correct is last.correct
