"""One prediction beside its gold query, by every family: alone, by luck, and on witnesses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from rewards import score
from rewards.compose import build_reward
from rewards.config import AstraConfig, ExecutionConfig, PaverlConfig
from rewards.workbench import MODES, Workbench
from sqlenv.config import AnswerConfig, ExecutorConfig
from sqlenv.envs.single_turn import judge_reply
from sqlenv.executor import Executor
from sqlenv.sql.answers import answer_of
from sqlenv.types import Attempt, AttemptKind, Episode, Example, Numbers, SqlError, Table
from tests.vectors import read

from .conftest import EXAMPLE, Golds

CASES = read("workbench")
LAST_BITS = read("numbers")


@pytest.fixture(scope="module")
def database(make_database) -> Path:
    return make_database([CASES["tables"]])


@pytest.fixture(scope="module")
def shifts(make_database) -> Path:
    return make_database([LAST_BITS["tables"]])


@pytest.fixture(scope="module")
def bench():
    config = ExecutorConfig(workers=1, timeout_s=1, max_steps=2_000_000)
    with Executor(config) as executor:
        yield Workbench(executor)


def example(database: Path, gold: str) -> Example:
    return Example("1", "", "emp", database, gold)


@pytest.mark.parametrize("numbers", get_args(Numbers))
@pytest.mark.parametrize("case", LAST_BITS["cases"], ids=lambda case: case["id"])
def test_all_families_say_the_same_of_last_bits(case, numbers, shifts, executor):
    bench = Workbench(executor, numbers)
    record = bench.score(example(shifts, case["gold"]), case["pred"])
    found = {
        "ex": [record["ex"][mode] for mode in MODES],
        **{key: record["expo"][key] for key in ("case", "diff_types", "error_clauses")},
        "ex_f": record["paverl"]["ex_f"],
        "csmr": pytest.approx(record["astra"]["csmr"]),
    }
    assert found == case[numbers]
    # Environments, and so all training, say the same; BIRD's own rule is exact.
    reply = f"<sql>{case['pred']}</sql>"
    by_rule: Any = dict(zip(MODES, found["ex"], strict=True))
    by_rule["bird_ex"] = case["exact"]["ex"][0]
    for match, right in by_rule.items():
        config = AnswerConfig(match=match, numbers=numbers)
        judged = judge_reply(example(shifts, case["gold"]), reply, executor, config)
        assert judged.correct == right


@pytest.mark.parametrize("case", CASES["pairs"], ids=lambda case: case["name"])
def test_records(bench, database, case):
    record = bench.score(example(database, case["gold"]), case["pred"])
    assert record.pop("seconds") >= 0
    message = record.pop("message", "")
    assert bool(message) == (record["status"] != "ok")
    assert list(record) == ["status", "ex", "progress", "expo", "paverl", "astra"]
    expo = record["expo"]
    found = {
        "status": record["status"],
        "ex": [record["ex"][mode] for mode in MODES],
        "struct": pytest.approx(record["progress"]["struct"]),
        "tags": record["progress"]["tags"],
        **{key: expo[key] for key in ("case", "diff_types", "error_clauses")},
        "rewards": [[one["clause"], one["reward"]] for one in expo["rewards"]],
        "paverl": pytest.approx([*record["paverl"].values()]),
        "csmr": pytest.approx(record["astra"]["csmr"]),
    }
    assert found == case["record"]


GOLD = "SELECT name FROM emp WHERE sal > 20"
HOSTILE = [
    *("", " ", ";", "\0", "\ud800", "SELECT", "(" * 5000, "SELECT '" + "x" * 200_000, "🦆" * 99),
    *("DROP TABLE emp", "PRAGMA user_version = 3", "ATTACH 'x' AS y", "SELECT 1; SELECT 2"),
    "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT * FROM r",
    "SELECT zeroblob(1000000000)",
    "SELECT " + ", ".join(["*"] * 500) + " FROM emp",
    "SELECT " * 3000,
    "\x1b[2J SELECT name FROM emp --",
]


@pytest.mark.parametrize("sql", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_predictions_are_scores(bench, database, sql):
    record = bench.score(example(database, GOLD), sql)
    assert not any(record["ex"].values())
    assert record["paverl"]["reward"] <= 0.5
    assert 0 <= record["astra"]["csmr"] < 1
    assert 0 <= record["progress"]["struct"] <= 1
    assert 0 <= record["progress"]["lex"] <= 1
    assert all(-1.5 <= each["reward"] <= 0.5 for each in record["expo"]["rewards"])
    json.loads(json.dumps(record))


def test_a_failing_gold_matches_nothing(bench, database):
    for sql in ("SELECT nope FROM emp", "SELECT name FROM emp"):
        record = bench.score(example(database, "SELECT nope FROM emp"), sql)
        assert not any(record["ex"].values())
        assert record["astra"]["csmr"] == record["paverl"]["ex_f"] == 0


def test_no_family_pays_for_luck(bench, database):
    """Each query gives the gold result, whatever chance says."""
    gold = example(database, "SELECT count(*) FROM emp")
    for sql in (
        "SELECT count(*) + 0 * random() FROM emp",
        "SELECT count(*) FROM emp WHERE typeof(random()) = 'integer'",
    ):
        record = bench.score(gold, sql)
        assert record["nondeterministic"] is True
        # What comparators say of it stays theirs.
        assert set(record["ex"].values()) == {True}
        assert record["paverl"] == {"ex_f": 0, "ex_b": 0, "reward": 0.5}  # it ran
        assert record["astra"] == {"csmr": 0}
        assert record["expo"]["case"] == "incorrect"
        assert {one["reward"] for one in record["expo"]["rewards"]} == {-0.5}
    assert "nondeterministic" not in bench.score(gold, gold.gold_sql)


# 0 and 1 for a right answer.

ASKED = Example("1", "?", "d", Path("d.sqlite"), "SELECT 1")


def attempt(*, correct: bool, kind: AttemptKind = "answer") -> Attempt:
    return Attempt(answer_of("SELECT 1", "any"), SqlError(""), correct, kind=kind)


def test_only_the_answer_is_paid():
    """The last attempt, and only one that answers: a call of a tool may give the right rows."""
    nothing = Golds(SqlError(""))
    reward = build_reward(ExecutionConfig(), nothing)
    right, wrong, call = (
        attempt(correct=True),
        attempt(correct=False),
        attempt(correct=True, kind="call"),
    )
    paid = {(right,): 1, (wrong, right): 1, (right, wrong): 0, (call,): 0, (call, right): 1, (): 0}
    for attempts, total in paid.items():
        score = reward(Episode(ASKED, attempts))
        assert (score.total, score.correct, score.parts) == (
            total,
            bool(total),
            {"execution": total},
        )


@pytest.mark.parametrize("own", [{"alternatives": ("SELECT 2",)}, {"grading_method": "subset"}])
def test_right_by_another_gold_or_its_own_rule_is_paid_in_full(own):
    """Rewards of columns too, though the first gold's result has none of the answer's."""
    right = Attempt(answer_of("SELECT 2", "any"), Table(("a",), ((2,),)), correct=True)
    gold = Golds(Table(("a",), ((1,),)))
    for config, total in ((PaverlConfig(), 10), (AstraConfig(), 1)):
        reward = build_reward(config, gold)
        assert reward(Episode(replace(EXAMPLE, **own), (right,))).total == pytest.approx(total)


# What a witness refutes is judged on that witness, by every family.


@pytest.fixture(scope="module")
def pets(make_database) -> Path:
    """One cat lives here."""
    return make_database([CASES["pets"]])


@pytest.mark.parametrize(
    "case", CASES["witnessed"], ids=lambda case: f"{[*case['reward'].values()]} {case['why']}"
)
def test_what_a_witness_refutes_is_paid_as_on_that_witness(pets, case):
    gold, reply, reward = case["gold"], case["reply"], case["reward"]
    for witnesses, paid in ((0, case["alone"]), (4, case["witnessed"])):
        # Other settings of the environment stay: a bare query is read, by the rule of the family.
        env = {**case.get("env", {}), "witnesses": witnesses}
        found = score(pets, gold, reply, reward, env=env, executor=ExecutorConfig(workers=1))
        assert [found.total, found.correct] == [pytest.approx(paid[0], abs=1e-6), paid[1]]
    blamed = [reply[one.start : one.end].split()[0] for one in found.credit if one.value < 0]
    assert blamed == case.get("blamed", [])
