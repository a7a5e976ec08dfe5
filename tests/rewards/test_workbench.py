"""One prediction beside its gold query, by every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from rewards.workbench import MODES, Workbench
from sqlenv.config import AnswerConfig, ExecutorConfig
from sqlenv.envs.single_turn import judge_reply
from sqlenv.executor import Executor
from sqlenv.types import Example, Numbers
from tests.databases import make_file
from tests.vectors import read

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
    record = bench.score(example(shifts, case["gold"]), case["pred"]).record()
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
    record = bench.score(example(database, case["gold"]), case["pred"]).record()
    assert record.pop("seconds") >= 0
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
    record = bench.score(example(database, GOLD), sql).record()
    assert not any(record["ex"].values())
    assert record["paverl"]["reward"] <= 0.5
    assert 0 <= record["astra"]["csmr"] < 1
    assert 0 <= record["progress"]["struct"] <= 1
    assert 0 <= record["progress"]["lex"] <= 1
    assert all(-1.5 <= each["reward"] <= 0.5 for each in record["expo"]["rewards"])
    json.loads(json.dumps(record))


def test_a_failing_gold_matches_nothing(bench, database):
    for sql in ("SELECT nope FROM emp", "SELECT name FROM emp"):
        score = bench.score(example(database, "SELECT nope FROM emp"), sql)
        assert not score.gold_ran
        assert not any(score.ex.values())
        assert score.csmr == score.ex_f == 0


def test_no_family_pays_for_luck(bench, database):
    """Each query gives the gold result, whatever chance says."""
    gold = example(database, "SELECT count(*) FROM emp")
    for sql in (
        "SELECT count(*) + 0 * random() FROM emp",
        "SELECT count(*) FROM emp WHERE typeof(random()) = 'integer'",
    ):
        score = bench.score(gold, sql)
        assert score.record()["nondeterministic"] is True
        # What comparators say of it stays theirs.
        assert set(score.ex.values()) == {True}
        assert (score.ex_f, score.ex_b, score.csmr) == (0, 0, 0)
        assert score.paverl == 0.5  # it ran
        assert score.verdict.case == "incorrect"
        assert set(score.rewards) == {-0.5}
    assert "nondeterministic" not in bench.score(gold, gold.gold_sql).record()


def test_a_database_that_changes_in_use_is_named(make_database, bench, caplog):
    asked = example(make_database([CASES["tables"]]), "SELECT count(*) FROM emp")
    before = bench.score(asked, asked.gold_sql).record()
    make_file(asked.database, "CREATE TABLE more (a)")
    assert not caplog.messages
    assert bench.score(asked, asked.gold_sql).record()["ex"] == before["ex"]
    assert caplog.messages[0].startswith(f"{asked.database}: the database changed")
