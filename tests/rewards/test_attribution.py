"""Who is to blame for a wrong result: attributes, computed outputs, the arms of table 5."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.compose import build_reward
from rewards.config import ExpoConfig
from rewards.expo.attributes import COMPUTED, is_computed, with_attributes
from rewards.expo.names import row_values
from rewards.expo.reward import ClauseVerdict, ExpoReward
from sqlenv.config import ExecutorConfig
from sqlenv.envs.single_turn import judge
from sqlenv.executor import Executor
from sqlenv.types import Episode, Example, Table

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "expo_blame.json").read_text())
WRONG = "SELECT name FROM emp WHERE sal > 40"
FAILING = "SELECT name FROM emp WHERE nope > 40"


@pytest.fixture(scope="module")
def executor():
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        yield executor


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("databases") / "a.sqlite"
    with sqlite3.connect(path) as connection:
        for statement in VECTORS["database"]:
            connection.execute(statement)
    connection.close()
    return path


@pytest.fixture(scope="module")
def ask(database, executor):
    """Judge one query by a reward of some settings."""

    def verdict(pred: str, gold: str, **settings) -> tuple[ExpoReward, Episode, ClauseVerdict]:
        example = Example("1", "?", "a", database, gold)
        attempt = judge(example, f"<sql>{pred}</sql>", executor, match="bag_ordered")
        reward = build_reward(
            ExpoConfig(**settings),
            columns_of=lambda _: {"emp": ["eid", "name", "dept_id", "sal", "age"]},
            executor=executor,
            wrapping="sql_tag",
        )
        assert isinstance(reward, ExpoReward)
        return reward, Episode(example, (attempt,)), reward.judge(example, attempt)

    return verdict


def blamed_texts(verdict: ClauseVerdict, sql: str) -> list[str]:
    return [verdict.clauses[number].text(sql) for number in sorted(verdict.blamed)]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["id"])
def test_vectors(case, ask):
    sql = case["pred"]
    _, _, verdict = ask(sql, case["gold"], **case.get("settings", {}))
    assert verdict.case == "incorrect"
    assert verdict.differences == set(case["differences"])
    found = blamed_texts(verdict, sql)
    assert len(found) == len(case["blamed"])
    assert all(map(str.startswith, found, case["blamed"]))


@pytest.mark.parametrize(
    "case",
    [case for case in VECTORS["cases"] if case["pred"].startswith("SELECT")],
    ids=lambda case: case["id"],
)
def test_aliases_of_outputs_change_nothing(case, ask):
    renamed = re.sub(
        r"^SELECT (.*?)( AS \w+)?(?=, | FROM)", r"SELECT \1 AS renamed", case["pred"], count=1
    )
    assert renamed != case["pred"]
    settings = case.get("settings", {})
    _, _, first = ask(case["pred"], case["gold"], **settings)
    _, _, second = ask(renamed, case["gold"], **settings)
    assert (first.blamed, first.differences) == (second.blamed, second.differences)


A = "SELECT name AS n, sal + 1 AS s, age a FROM emp"


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT name, e.sal FROM emp e", ["name", "sal"]),
        ('SELECT (e."Name") AS x, (sal) y, `AGE` FROM emp e', ["name", "sal", "age"]),
        ("SELECT DISTINCT name n, main.emp.sal AS s FROM emp", ["name", "sal"]),
        ("SELECT count(*), -sal, NOT sal, 7, NULL, 'x' FROM emp", [COMPUTED] * 6),
        (
            "SELECT CASE WHEN sal THEN 1 END, sal IS NULL, sal COLLATE nocase FROM emp",
            [COMPUTED] * 3,
        ),
        ("SELECT sal ISNULL, sum(sal) OVER w, (SELECT 1) FROM emp WINDOW w AS ()", [COMPUTED] * 3),
        ("SELECT d.*, name AS n FROM emp, dept d", ["id", "dname", "city", "name"]),
        ("SELECT v AS x, *, v y FROM one", ["v", "v", "v"]),
        ("SELECT *, 1 AS name, o.* FROM one o", ["v", "name", "v"]),
        (f"SELECT n, s, a FROM ({A})", ["name", COMPUTED, "age"]),
        (f"SELECT q.n AS k, 1 + s FROM ({A}) AS q", ["name", COMPUTED]),
        (f"SELECT * FROM ({A}) q", ["name", COMPUTED, "age"]),
        (f"SELECT q.*, o.v FROM one o, ({A}) q", ["name", COMPUTED, "age", "v"]),
        (f"WITH c AS ({A}) SELECT n AS z FROM c WHERE s > 1", ["name"]),
        (f"WITH c AS ({A}), d AS (SELECT * FROM c) SELECT d.n FROM d", ["name"]),
        (f"WITH c(x, y, z) AS ({A}) SELECT z, x FROM c", ["age", "name"]),
        (
            "WITH RECURSIVE r(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM r WHERE k < 3) "
            "SELECT k FROM r",
            [COMPUTED],
        ),
        ("SELECT name AS n FROM emp UNION SELECT city FROM dept", ["name"]),
        ("SELECT n FROM (SELECT name AS n FROM emp UNION SELECT city FROM dept)", ["name"]),
        ("VALUES (1, 2)", ["column1", "column2"]),
    ],
)
def test_attributes(sql, expected, database, executor):
    result = executor.execute(database, sql)
    assert isinstance(result, Table)
    named = with_attributes(sql, result)
    assert list(named.columns) == expected
    assert named.rows == result.rows


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT count(*), max(sal) AS m FROM emp", True),
        ("SELECT sal + 1 FROM emp UNION SELECT 7", True),
        ("SELECT sal + 1 FROM emp UNION SELECT sal FROM emp", False),
        ("SELECT count(*), name FROM emp", False),
        ("SELECT * FROM emp", False),
        ("SELECT sum(sal) OVER w FROM emp WINDOW w AS (ORDER BY name)", True),
        # What a subquery computes is not computed by SELECT.
        ("SELECT c FROM (SELECT count(*) AS c FROM emp)", False),
        ("", False),
    ],
)
def test_queries_that_compute_all_their_outputs(sql, expected):
    assert is_computed(sql) is expected


WORDS = (
    "select distinct name AS n , ( ) * . e sal + 'x' \"q\" not null case end over w from emp join "
    "with c union values window where group by -- /* [a] ` 7"
)


@given(st.lists(st.sampled_from(WORDS.split())).map(" ".join), st.lists(st.sampled_from("nsvé")))
def test_attributes_of_any_text_are_as_many_as_the_columns(sql, names):
    table = Table(tuple(names), ())
    assert len(with_attributes(sql, table).columns) == len(names)
    assert is_computed(sql) in (True, False)
    assert all(sql[start] == "(" for start in row_values(sql))


def test_many_operands_take_little_time(ask):
    """A text longer than those that are remembered is read once, not once for every operand."""
    start = time.thread_time()
    pred = " UNION ".join(["SELECT name AS n FROM emp WHERE n > 'a'"] * 300)
    _, _, verdict = ask(pred, "SELECT 2")
    assert verdict.case == "incorrect"
    assert time.thread_time() - start < 3


def test_uniform_rewards_by_setting(ask):
    """The middle of both rewards without a value, at every way to switch clauses off."""
    gold = "SELECT name FROM emp WHERE sal > 20"
    for off in ({"gap_scale": 0.0}, {"clause_level": "error"}):
        reward, _, verdict = ask(WRONG, gold, **off)
        assert reward.clause_rewards(verdict) == [0.0, 0.0, 0.0]
        reward, episode, verdict = ask(WRONG, gold, incorrect_uniform=-0.5, **off)
        assert reward.clause_rewards(verdict) == [-0.5, -0.5, -0.5]
        assert {span.value for span in reward(episode).spans} == {-0.5}
    for off in ({"gap_scale": 0.0}, {"clause_level": "incorrect"}):
        reward, _, verdict = ask(FAILING, gold, **off)
        assert reward.clause_rewards(verdict) == [-1.0, -1.0, -1.0]
        reward, _, verdict = ask(FAILING, gold, error_uniform=-1.5, **off)
        assert reward.clause_rewards(verdict) == [-1.5, -1.5, -1.5]
    # Where clauses are told apart the value is of no effect.
    reward, _, verdict = ask(WRONG, gold, incorrect_uniform=-0.5)
    assert reward.clause_rewards(verdict) == [0.5, 0.5, -0.5]
