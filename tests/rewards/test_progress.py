"""Progress-SQL: the diagnostic tree, alignment, feedback; the reward from attempts to parts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from rewards.config import ProgressiveConfig
from rewards.execution import KnownColumns
from rewards.progress.diagnosis import (
    UNPARSED,
    Diagnosis,
    diagnose,
    feedback,
    labels_of,
    local_similarity,
    mismatch_rates,
)
from rewards.progress.reward import (
    Alignment,
    ProgressiveReward,
    lexical_similarity,
    one_shot_reward,
)
from rewards.progress.tree import build_tree
from sqlenv.sql.answers import answer_of
from sqlenv.types import Answer, Attempt, Episode, Example, Result, SqlError, Table, TimedOut
from tests.vectors import read

TREES, RULES = read("diagnosis")["cases"], read("normalisation")
SCHEMA = KnownColumns({name: frozenset(columns) for name, columns in RULES["schema"].items()})


def main_profile(sql: str):
    tree = build_tree(sql, SCHEMA)
    assert tree is not None, sql
    return tree.children[0].profile


@pytest.mark.parametrize("case", TREES, ids=lambda case: case["id"])
def test_vectors_of_the_paper(case):
    found = diagnose(case["pred"], case["gold"], None)
    assert found.struct == pytest.approx(case["struct"], abs=1e-6)
    assert list(found.tags) == case["tags"]
    assert found.pred_parsed == case.get("pred_parsed", True)
    assert found.gold_parsed == case.get("gold_parsed", True)
    if "local" in case:
        pred, gold = main_profile(case["pred"]), main_profile(case["gold"])
        assert local_similarity(pred, gold) == pytest.approx(case["local"])


@pytest.mark.parametrize("case", TREES, ids=lambda case: case["id"])
def test_lexical_vectors(case):
    expected = float(Fraction(case["lexical"]))
    assert lexical_similarity(case["pred"], case["gold"]) == pytest.approx(expected, abs=1e-12)
    assert lexical_similarity(case["gold"], case["pred"]) == pytest.approx(expected, abs=1e-12)


def test_lexical_similarity_of_texts_without_a_pair():
    pairs = [("a", "a"), ("a", "b"), ("", ""), ("a", "a b")]
    assert [lexical_similarity(*pair) for pair in pairs] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("rule", "one", "other", "same"),
    [(*row, True) for row in RULES["same"]] + [(*row, False) for row in RULES["different"]],
    ids=lambda value: str(value)[:40],
)
def test_normalisation(rule, one, other, same):
    tree = build_tree(one, SCHEMA)
    assert tree is not None
    assert (tree == build_tree(other, SCHEMA)) is same, rule


@pytest.mark.parametrize(
    ("sql", "expected"),
    RULES["aggregates of the main SELECT"],
)
def test_aggregate_is_one_of_this_select(sql, expected):
    assert main_profile(sql).aggregate is expected


def test_children_are_matched_greedily_in_the_golds_order():
    # Gold child 1 takes the only equal one (score 1), gold child 2 what is left:
    # its WHERE differs, .7 * .8 + .3 = .86. Two predicted, two gold: child = .93.
    gold = "SELECT a FROM t WHERE b IN (SELECT c FROM u WHERE d = 1) AND e IN (SELECT c FROM u)"
    pred = "SELECT a FROM t WHERE b IN (SELECT c FROM u WHERE f = 1) AND e IN (SELECT c FROM u)"
    assert diagnose(pred, gold, None).struct == pytest.approx(0.7 + 0.3 * 0.93)
    assert diagnose(pred, gold, None).tags == ()
    # Three predicted for one gold child: child = 1 / 3, and the rest is reported.
    many = "SELECT a FROM t WHERE b IN (SELECT 1) AND c IN (SELECT 1) AND d IN (SELECT 1)"
    one = "SELECT a FROM t WHERE b IN (SELECT 1)"
    found = diagnose(many, one, None)
    assert found.struct == pytest.approx(0.7 * (1 - 0.2 * 2 / 3) + 0.1)
    assert "EXTRA_SUBQUERY_OR_CTE" in found.tags


def test_mismatch_rates():
    """Counted by hand; a prediction that does not parse differs everywhere."""
    tags = [
        ("JOIN_MISSING", "FROM_OR_JOIN_TABLE_MISMATCH", "SELECT_ERROR"),
        ("DISTINCT_MISMATCH",),
        ("ORDER_BY_MISMATCH", "SUBQUERY_MISSING"),
        (),
    ]
    rates = {"SELECT": 0.5, "JOIN": 0.25, "WHERE": 0.0, "GROUP": 0.0}
    assert mismatch_rates(tags) == {**rates, "average": pytest.approx(0.75 / 4)}
    assert set(mismatch_rates([]).values()) == {0.0}
    gold = "SELECT a FROM t"
    labels = [labels_of(diagnose(sql, gold, None)) for sql in (gold, "SELECT FROM", "")]
    assert labels == [(), (UNPARSED,), (UNPARSED,)]
    rates = mismatch_rates([found for found in labels if found is not None])
    assert list(rates.values()) == [pytest.approx(2 / 3)] * 5


@pytest.mark.parametrize("form", ["sql_tag", "fence", None])
def test_without_both_trees_the_feedback_is_generic(form):
    # Appendix F: another text where the prediction or the gold query does not parse. Nothing was
    # compared, so nothing is said to look close; and what ran is not said to have a wrong syntax.
    empty, failed = Table((), ()), SqlError("incomplete input")

    def told(sql: str, gold: str, result: Result) -> str:
        example = Example("1", "?", "shop", Path("shop.sqlite"), gold)
        attempt = Attempt(Answer(sql, sql), result, correct=False)
        tags, text = feedback(example, attempt, form=form)
        assert tags == ()
        return text

    good, broken = "SELECT name FROM singer", "SELECT name FROM singer WHERE"
    fails = told(broken, good, failed)
    assert fails == told(good, broken, failed)
    # sqlglot reads past a comma too many, and finds the structure of the gold query.
    assert fails == told("SELECT name, FROM singer", good, SqlError('near "FROM": syntax error'))
    runs = told(broken, good, empty)  # SQLite reads what sqlglot does not
    assert runs == told(good, broken, empty) == told(broken, good, TimedOut("steps"))
    # The structures agree and the values do not.
    close = told(f"{good} WHERE age = 1", f"{good} WHERE age = 2", empty)
    assert ("syntax" in fails.lower(), "syntax" in runs.lower()) == (True, False)
    assert "looks close" not in fails + runs
    assert fails not in (runs, close)
    assert (runs == close) is (form is None)


NESTED = RULES["nested"]


@pytest.mark.parametrize(("head", "piece", "body", "tail"), NESTED, ids=[n[1] for n in NESTED])
def test_whatever_parses_can_be_compared(head, piece, body, tail):
    parsed = []
    for count in range(1, 200, 4):
        sql = head + piece * count + body + tail * count
        found = diagnose(sql, sql, None)
        assert found.struct == float(found.pred_parsed)
        parsed.append(found.pred_parsed)
    assert parsed[4]
    assert parsed == sorted(parsed, reverse=True)


# The progressive reward and its one-shot baseline, from attempts to parts.

REWARDS = read("progressive")["cases"]
STUDY = {case["id"]: case for case in read("diagnosis")["cases"]}
GOOD = "<think> … </think>\n<sql>SELECT 1</sql>\n"
TABLE, ERROR = Table(("a",), ((1,),)), SqlError("no such column: b")
ASKED = Example("1", "?", "db", Path("db.sqlite"), "SELECT a FROM t")


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
    return Episode(ASKED, tuple(attempts))


@pytest.mark.parametrize("case", REWARDS, ids=lambda case: case["id"])
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


def test_a_match_before_a_wrong_last_answer_pays_nothing():
    """Trainers may go on after a match, where the environment ends."""
    example = Example("1", "?", "db", Path("db.sqlite"), "SELECT 1")
    right, wrong = (attempt(f"SELECT {n}", correct=n == 1) for n in (1, 2))
    reward = ProgressiveReward(ProgressiveConfig())
    parts = [
        reward(Episode(example, turns)).parts["latency"] for turns in ((right,), (right, wrong))
    ]
    assert parts == [2.0, 0.0]


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
    episode = Episode(ASKED, (attempt("0", text="<sql>a</sql>"), attempt("0")))
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
    score = one_shot_reward(Episode(ASKED, (attempt("", correct=True), last)))
    assert score.total == total
    assert score.correct is last.correct
