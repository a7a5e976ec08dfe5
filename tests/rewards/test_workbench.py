"""One prediction beside its gold query, by every family: alone, by luck, and on witnesses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from rewards import score
from rewards.adapters.skyrl import SqlEnv
from rewards.adapters.trl import SqlReward
from rewards.adapters.verl import compute_score
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
    # Environments, and so all training, say the same.
    for at, mode in enumerate(MODES):
        config = AnswerConfig(match=mode, numbers=numbers)
        reply = f"<sql>{case['pred']}</sql>"
        assert (
            judge_reply(example(shifts, case["gold"]), reply, executor, config).correct
            == found["ex"][at]
        )
    official = AnswerConfig(match="bird_ex", numbers=numbers)
    by_bird = judge_reply(
        example(shifts, case["gold"]), f"<sql>{case['pred']}</sql>", executor, official
    )
    assert by_bird.correct == case["exact"]["ex"][0]


@pytest.mark.parametrize("case", CASES["pairs"], ids=lambda case: case["name"])
def test_records(bench, database, case):
    record = bench.score(example(database, case["gold"]), case["pred"])
    assert record.pop("seconds") >= 0
    message = record.pop("message", "")
    assert bool(message) == (record["status"] != "ok")
    assert list(record) == ["status", "ex", "progress", "expo", "paverl", "astra"]
    rewards = [[each["clause"], each["reward"]] for each in record["expo"]["rewards"]]
    expected: dict[str, Any] = case["record"]
    assert record["status"] == expected["status"]
    assert [int(record["ex"][mode]) for mode in MODES] == expected["ex"]
    assert record["progress"]["tags"] == expected["tags"]
    assert record["progress"]["struct"] == pytest.approx(expected["struct"])
    assert record["expo"]["case"] == expected["case"]
    assert record["expo"]["diff_types"] == expected["diff_types"]
    assert record["expo"]["error_clauses"] == expected["error_clauses"]
    assert rewards == expected["rewards"]
    assert list(record["paverl"].values()) == pytest.approx(expected["paverl"])
    assert record["astra"] == {"csmr": pytest.approx(expected["csmr"])}


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

# One cat lives here, of three years.
SUM = "SELECT SUM(age) FROM pet WHERE kind = 'cat'"
LUCKY = "SELECT age FROM pet WHERE kind = 'cat'"
EXECUTOR = ExecutorConfig(workers=1)
FAMILIES = [
    # The settings of a reward; what it pays for the gold query, and for one that has no right row.
    ({"kind": "execution"}, 1, 0),
    ({"kind": "one_shot"}, 2.5, 0.5),
    ({"kind": "progressive"}, 2.25, 0.25),
    ({"kind": "paverl"}, 10, 0.5),
    ({"kind": "paverl", "payoff": "binary"}, 10, 0.5),
    ({"kind": "paverl", "ex_f": "code"}, 10, 0.5),
    ({"kind": "astra"}, 1, 0),
    ({"kind": "astra", "aggregate": "last"}, 1, 0),
    ({"kind": "astra", "step_score": "binary"}, 1, 0),
]


@pytest.fixture(scope="module")
def pets(make_database) -> Path:
    return make_database(
        [
            "CREATE TABLE pet (id INTEGER PRIMARY KEY, kind TEXT, age INTEGER)",
            "INSERT INTO pet VALUES (1, 'cat', 3), (2, 'dog', 1), (3, 'dog', 2), (4, 'fish', 1)",
        ]
    )


def single_turn(witnesses: int, match: str = "set") -> dict[str, Any]:
    return {"kind": "single_turn", "wrapping": "any", "match": match, "witnesses": witnesses}


@pytest.mark.parametrize(("reward", "right", "wrong"), FAMILIES, ids=lambda one: json.dumps(one))
def test_no_family_pays_for_what_a_witness_refutes(pets, reward, right, wrong):
    def paid(sql: str, witnesses: int) -> tuple[float, bool]:
        env = single_turn(witnesses)
        found = score(pets, SUM, sql, reward, env=env, executor=EXECUTOR)
        return found.total, found.correct

    assert paid(SUM, 4) == paid(LUCKY, 0) == (pytest.approx(right), True)
    assert paid(LUCKY, 4) == (pytest.approx(wrong), False)


@pytest.mark.parametrize(("reward", "total"), [("paverl", 10 / 2), ("astra", 0.8 * 1 / (2 * 2))])
def test_columns_are_paid_as_on_the_witness_that_refutes(pets, reward, total):
    """One of two columns is right there: EX_f is 1/2, M of CSMR 1."""
    gold, lucky = (f"SELECT kind, {one}(age) FROM pet WHERE kind = 'cat'" for one in ("SUM", "MAX"))
    found = score(pets, gold, lucky, reward, env=single_turn(4), executor=EXECUTOR)
    assert (found.total, found.correct) == (pytest.approx(total), False)


@pytest.mark.parametrize(
    ("gold", "lucky", "blamed"),
    [
        ("SELECT age FROM pet WHERE kind = 'cat'", "SELECT age FROM pet WHERE id = 1", "WHERE"),
        (SUM, LUCKY, "SELECT"),
    ],
)
def test_expo_blames_the_clause_that_is_wrong_on_the_witness(pets, gold, lucky, blamed):
    """On the question's own database the results are equal: nothing there tells the clauses."""
    env = single_turn(4, match="bag_ordered")
    found = score(pets, gold, lucky, "expo", env=env, executor=EXECUTOR)
    credit = {lucky[one.start : one.end].split()[0]: one.value for one in found.credit}
    assert credit == {"SELECT": 0.5, "FROM": 0.5, "WHERE": 0.5} | {blamed: -0.5}


def test_a_lucky_call_earns_nothing_either(pets):
    """Its repetition as the answer is no step of its own (docs/papers.md, scored steps)."""

    def paid(witnesses: int) -> float:
        called = json.dumps({"name": "run_sql_remote", "arguments": {"query": LUCKY}})
        replies = [f"<tool_call>{called}</tool_call>", f"```sql\n{LUCKY}\n```"]
        env = {"kind": "agentic", "witnesses": witnesses}
        return score(pets, SUM, replies, "astra", env=env, executor=EXECUTOR).total

    assert paid(0) == 1
    assert paid(4) == 0


def test_settings_of_the_environment_leave_the_others_as_they_are(pets):
    """Witnesses alone: a bare query is still read, by the rule of the family."""
    twice = f"{SUM} UNION ALL {SUM}"
    for env, right in (({}, True), ({"witnesses": 4}, False), ({"match": "bag"}, True)):
        assert score(pets, SUM, LUCKY, "execution", env=env, executor=EXECUTOR).correct == right
    for reward, right in (("execution", True), ("expo", False)):
        env = {"witnesses": 4}
        assert score(pets, SUM, twice, reward, env=env, executor=EXECUTOR).correct == right


def test_adapters_ask_the_witnesses_of_their_settings(pets):
    settings = {"reward": {"kind": "execution"}, "env": single_turn(4), "executor": EXECUTOR}
    row = {"database": str(pets), "gold_sql": SUM}
    for sql, right in ((SUM, 1), (LUCKY, 0)):
        assert SqlReward(settings)([sql], database=[str(pets)], gold_sql=[SUM]) == [right]
        assert compute_score("", sql, SUM, row, settings=settings)["score"] == right
        skyrl = SqlEnv(settings, {**row, "reward_spec": {"ground_truth": SUM}})
        assert skyrl.step(sql)["reward"] == right
