"""What a witness refutes is judged on that witness, by every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewards import score
from rewards.adapters.skyrl import SqlEnv
from rewards.adapters.trl import SqlReward
from rewards.adapters.verl import compute_score
from sqlenv.config import ExecutorConfig

# One cat lives here, of three years.
GOLD = "SELECT SUM(age) FROM pet WHERE kind = 'cat'"
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
def database(make_database) -> Path:
    return make_database(
        [
            "CREATE TABLE pet (id INTEGER PRIMARY KEY, kind TEXT, age INTEGER)",
            "INSERT INTO pet VALUES (1, 'cat', 3), (2, 'dog', 1), (3, 'dog', 2), (4, 'fish', 1)",
        ]
    )


def single_turn(witnesses: int, match: str = "set") -> dict[str, Any]:
    return {"kind": "single_turn", "wrapping": "any", "match": match, "witnesses": witnesses}


@pytest.mark.parametrize(("reward", "right", "wrong"), FAMILIES, ids=lambda one: json.dumps(one))
def test_no_family_pays_for_luck(database, reward, right, wrong):
    def paid(sql: str, witnesses: int) -> tuple[float, bool]:
        env = single_turn(witnesses)
        found = score(database, GOLD, sql, reward, env=env, executor=EXECUTOR)
        return found.total, found.correct

    assert paid(GOLD, 4) == paid(LUCKY, 0) == (pytest.approx(right), True)
    assert paid(LUCKY, 4) == (pytest.approx(wrong), False)


@pytest.mark.parametrize(("reward", "total"), [("paverl", 10 / 2), ("astra", 0.8 * 1 / (2 * 2))])
def test_columns_are_paid_as_on_the_witness_that_refutes(database, reward, total):
    """One of two columns is right there: EX_f is 1/2, M of CSMR 1."""
    gold, lucky = (f"SELECT kind, {one}(age) FROM pet WHERE kind = 'cat'" for one in ("SUM", "MAX"))
    found = score(database, gold, lucky, reward, env=single_turn(4), executor=EXECUTOR)
    assert (found.total, found.correct) == (pytest.approx(total), False)


@pytest.mark.parametrize(
    ("gold", "lucky", "blamed"),
    [
        ("SELECT age FROM pet WHERE kind = 'cat'", "SELECT age FROM pet WHERE id = 1", "WHERE"),
        (GOLD, LUCKY, "SELECT"),
    ],
)
def test_expo_blames_the_clause_that_is_wrong_on_the_witness(database, gold, lucky, blamed):
    """On the question's own database the results are equal: nothing there tells the clauses."""
    env = single_turn(4, match="bag_ordered")
    found = score(database, gold, lucky, "expo", env=env, executor=EXECUTOR)
    credit = {lucky[one.start : one.end].split()[0]: one.value for one in found.credit}
    assert credit == {"SELECT": 0.5, "FROM": 0.5, "WHERE": 0.5} | {blamed: -0.5}


def test_a_lucky_call_earns_nothing_either(database):
    """Its repetition as the answer is no step of its own (`final_step=dedup`)."""

    def paid(witnesses: int) -> float:
        called = json.dumps({"name": "run_sql_remote", "arguments": {"query": LUCKY}})
        replies = [f"<tool_call>{called}</tool_call>", f"```sql\n{LUCKY}\n```"]
        env = {"kind": "agentic", "witnesses": witnesses}
        return score(database, GOLD, replies, "astra", env=env, executor=EXECUTOR).total

    assert paid(0) == 1
    assert paid(4) == 0


def test_adapters_ask_the_witnesses_of_their_settings(database):
    settings = {"reward": {"kind": "execution"}, "env": single_turn(4), "executor": EXECUTOR}
    row = {"database": str(database), "gold_sql": GOLD}
    for sql, right in ((GOLD, 1), (LUCKY, 0)):
        assert SqlReward(settings)([sql], database=[str(database)], gold_sql=[GOLD]) == [right]
        assert compute_score("", sql, GOLD, row, settings=settings)["score"] == right
        skyrl = SqlEnv(settings, {**row, "reward_spec": {"ground_truth": GOLD}})
        assert skyrl.step(sql)["reward"] == right
