"""Queries of MySQL and PostgreSQL on SQLite: what is equal there, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlenv.config import DataConfig, SingleTurnConfig, SourceConfig
from sqlenv.data.loading import load
from sqlenv.data.sources import NOT_TRANSPILED, OTHER_ENGINE, by_running
from sqlenv.dialects import transpile
from sqlenv.envs.single_turn import SingleTurn
from sqlenv.evaluators.equality import matches
from sqlenv.prompts import first_observation
from sqlenv.types import Example, SqlError, Table
from tests.sqlenv.conftest import make_file, table_of
from tests.vectors import read

CASES = read("dialects")
WORDS = [
    *("SELECT", "a", "b", "FROM", "t", "WHERE", "name", "=", "'x'", "LIKE", "'x%'", "GROUP BY"),
    *("COUNT(", ")", "(", ",", "/", "UNION", "JOIN", "ON", "/*", "*/", '"', "`", "--", "#", "\\"),
    *("CASE", "WHEN", "END", "IN", "NOT", "CAST(", "AS", "DECIMAL", "::", "int", "LIMIT", "1", "*"),
]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make_file(tmp_path / "t.sqlite", CASES["tables"])


@pytest.mark.parametrize("case", CASES["same"], ids=lambda case: case["id"])
def test_what_is_carried_over_gives_the_engines_rows(case, database, runner):
    text = transpile(case["sql"], case["dialect"])
    assert isinstance(text, str), text
    rows = [list(row) for row in table_of(runner, database, text).rows]
    assert rows == case["rows"], text


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["id"])
def test_what_is_no_query_of_sqlite_is_refused(case):
    found = transpile(case["sql"], case["dialect"])
    assert isinstance(found, SqlError)
    engine = {"mysql": "MySQL", "postgres": "PostgreSQL"}[case["dialect"]]
    assert found.message.startswith(f"not transpiled from {engine}: ")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dialect", ["mysql", "postgres"])
@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 5000,
        "SELECT # '\n" + "(" * 5000 + "'",
        "SELECT 1 /* /* */ ' */ " + "(" * 5000 + "'",
        "SELECT ARRAY[" + "(" * 5000 + "]",
        "SELECT `" + "(" * 5000 + "`",
        "SELECT '\\'" + "(" * 5000,
        "SELECT $x$'$x$" + "(" * 5000 + "'",
        "SELECT " + "NOT " * 5000 + "1",
        "SELECT '" + "a" * 1_000_000,
        "SELECT \0",
        "SELECT a" + " + a" * 2400,
        "SELECT 1" + "+1" * 3000 + " / 2",
        "SELECT CONCAT(" + "a," * 1000 + "a)",
        "SELECT 1 + 1 AS c0, " + ", ".join(f"c{n} AS c{n + 1}" for n in range(700)) + " = '1'",
    ],
    ids=range(14),
)
def test_hostile_text_is_read_in_time(text, dialect):
    found = transpile(text, dialect)
    # To MySQL the brackets of two of them are the name of a column; CONCAT is one call.
    assert isinstance(found, SqlError) or len(found) < 20 * len(text)


@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(max_size=40))
def test_no_text_raises(text):
    for dialect in ("mysql", "postgres"):
        assert isinstance(transpile(text, dialect), str | SqlError)


# In an episode.


def test_predictions_are_executed_carried_over(database, runner):
    gold = "SELECT a FROM t WHERE name = 'ADA'"
    example = Example("1", "?", "t", database, gold, dialect="mysql")
    env = SingleTurn(
        SingleTurnConfig(),
        executor=runner,
        first_prompt=lambda e: first_observation(e, "schema", style="omnisql"),
    )
    episode, prompt = env.reset(example)
    assert "MySQL" in prompt[0].content

    def attempt(sql):
        return env.step(episode, f"<sql>{sql}</sql>")[0].attempts[0]

    assert attempt('SELECT `a` FROM `t` WHERE "ada" = name').correct
    assert attempt("SELECT a FROM t WHERE name = 'ada'").sql == "SELECT a FROM t WHERE name = 'ada'"
    wrong = attempt("SELECT a FROM t WHERE name REGEXP '^a'")
    assert isinstance(wrong.result, SqlError)
    assert not wrong.correct
    # The same text means something else where case counts.
    plain = Example("1", "?", "t", database, gold)
    found = env.step(env.reset(plain)[0], f"<sql>{gold}</sql>")[0].attempts[0]
    assert found.result == Table(("a",), ())


def test_what_cannot_be_carried_over_is_counted_and_left_out(tmp_path, runner):
    folder = tmp_path / "data" / "database" / "t"
    folder.mkdir(parents=True)
    make_file(folder / "t.sqlite", CASES["tables"])
    queries = [
        ("SELECT a FROM t WHERE name = 'BO'", {}),
        ("SELECT a FROM t XOR", {}),
        ("SELECT name FROM t WHERE name ILIKE 'b%'", {"dialect": "PostgreSQL"}),
        ("SELECT a / b FROM t", {"dialect": "sqlite"}),
        ("SELECT a FROM t", {"dialect": "oracle"}),
        ("SELECT nothing FROM t", {}),
        ("SELECT a FROM t WHERE name = 'nobody'", {}),
    ]
    records = [
        {"db_id": "t", "question": f"{n}?", "query": q, **more}
        for n, (q, more) in enumerate(queries)
    ]
    (tmp_path / "data" / "dev.json").write_text(json.dumps(records))
    source = SourceConfig(layout="spider", path=tmp_path / "data", split="dev", dialect="mysql")
    loaded = load(DataConfig(sources=(source,)), check=by_running(runner))
    assert [(e.question, e.dialect) for e in loaded.examples] == [
        ("0?", "mysql"), ("2?", "postgres"), ("3?", "sqlite")
    ]  # fmt: skip
    (pool,) = loaded.pools
    assert pool.found == {
        NOT_TRANSPILED: 1, OTHER_ENGINE: 1, "failing": 1, "empty": 1, "scalar": 2
    }  # fmt: skip
    assert "dev/1: not transpiled from MySQL: " in pool.line()
    assert "1 not transpiled to SQLite" in pool.line()


def test_real_pairs_of_postgresql_and_sqlite_agree(shared, runner):
    """BIRD's mini-dev has each gold query for both engines, written by people."""
    folder = shared / "data" / "bird_dev"
    pairs = [
        json.loads((folder / f"mini_dev_{name}.json").read_text())
        for name in ("postgresql", "sqlite")
    ]
    plain = {record["question_id"]: record["SQL"] for record in pairs[1]}
    assert len(pairs[0]) == 33
    for record in pairs[0]:
        name = record["db_id"]
        database = folder / "dev_databases" / name / f"{name}.sqlite"
        text = transpile(record["SQL"], "postgres")
        assert isinstance(text, str), text
        carried, written = (
            runner.execute(database, sql) for sql in (text, plain[record["question_id"]])
        )
        assert matches(carried, written, mode="set"), text
