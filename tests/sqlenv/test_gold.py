from pathlib import Path
from typing import Any

import apsw
import pytest

from sqlenv.config import ExecutorConfig
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.types import Denied, Result, SqlError, Table, TimedOut, TooLarge

ENDLESS = "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r"

MEMORY_BOMB = "SELECT count(*) FROM (SELECT DISTINCT n || hex(zeroblob(40000)) FROM number)"


def make_executor(cache: Path | None = None, **settings: Any) -> Executor:
    return Executor(ExecutorConfig(isolation="thread", workers=1, cache_dir=cache, **settings))


def count_runs(executor: Executor) -> list[str]:
    """Note each query that the executor really runs."""
    ran: list[str] = []
    execute_many = executor.execute_many

    def noting(queries: Any) -> list[Result]:
        ran.extend(sql for _, sql in queries)
        return execute_many(queries)

    executor.execute_many = noting
    return ran


def test_a_gold_query_runs_once(database: Path) -> None:
    with make_executor() as executor:
        ran = count_runs(executor)
        first = executor.gold(database, "SELECT name FROM city ORDER BY name LIMIT 1")
        assert first == Table(("name",), (("Berlin",),))
        assert executor.gold(database, "SELECT name FROM city ORDER BY name LIMIT 1") is first
        assert len(ran) == 1


@pytest.mark.parametrize(
    ("sql", "result"),
    [
        (
            "SELECT NULL, 1, 2.0, 1e999, -9223372036854775808, x'00ff', 'é中' || char(0)",
            (None, 1, 2.0, float("inf"), -9223372036854775808, b"\x00\xff", "é中\0"),
        ),
        ("SELECT * FROM city WHERE 0", None),
        ("SELECT nope", SqlError("no such column: nope", 7)),
        ("DROP TABLE city", Denied("schema change")),
        (ENDLESS, TimedOut("steps")),
        ("SELECT n FROM number", TooLarge("rows")),
    ],
)
def test_results_outlive_the_executor(
    database: Path, tmp_path: Path, sql: str, result: Any
) -> None:
    cache = tmp_path / "cache"
    with make_executor(cache, max_steps=10_000, max_rows=900) as executor:
        first = executor.gold(database, sql)
    if isinstance(result, tuple):
        assert isinstance(first, Table)
        assert first.rows == (result,)
    elif result is not None:
        assert first == result
    with make_executor(cache, max_steps=10_000, max_rows=900) as executor:
        ran = count_runs(executor)
        assert repr(executor.gold(database, sql)) == repr(first)
        assert ran == []


def test_what_else_decides_a_result_is_part_of_the_key(database: Path, tmp_path: Path) -> None:
    cache, sql = tmp_path / "cache", "SELECT count(*) FROM city"
    with make_executor(cache) as executor:
        executor.gold(database, sql)
    for settings in ({"max_rows": 10}, {"text": "replace"}):
        with make_executor(cache, **settings) as executor:
            ran = count_runs(executor)
            executor.gold(database, sql)
            assert ran == [sql]
    connection = apsw.Connection(str(database))
    connection.execute("DELETE FROM city")
    connection.close()
    with make_executor(cache) as executor:
        assert executor.gold(database, sql) == Table(("count(*)",), ((0,),))


def test_a_copy_of_the_database_has_the_same_results(database: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(database.read_bytes())
    with make_executor(tmp_path / "cache") as executor:
        executor.gold(database, "SELECT * FROM city")
        ran = count_runs(executor)
        assert isinstance(executor.gold(copy, "SELECT * FROM city"), Table)
        assert ran == []


@pytest.mark.parametrize(
    ("sql", "settings"),
    [
        (ENDLESS, {"timeout_s": 0.1, "max_steps": 2**31 - 1}),
        (MEMORY_BOMB, {"heap_bytes": 8_000_000}),
        ("SELECT date('now')", {}),
        ("SELECT random()", {}),
        ("SELECT CURRENT_TIMESTAMP", {}),
        ("SELECT Date ( )", {}),
        ("SELECT julianday()", {}),
        ("SELECT strftime('%Y')", {}),
        ("SELECT unixepoch('subsec')", {}),
        ('SELECT date("now", "-1 day")', {}),
        ("SELECT datetime('2020-01-01', 'localtime')", {}),
    ],
)
def test_results_of_the_moment_are_not_kept(
    database: Path, tmp_path: Path, sql: str, settings: Any
) -> None:
    with make_executor(tmp_path / "cache", **settings) as executor:
        ran = count_runs(executor)
        executor.gold(database, sql)
        executor.gold(database, sql)
        assert ran == [sql, sql]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "sql",
    ["SELECT date('2020-01-01')", "SELECT strftime('%Y', name) FROM city", "SELECT 'update ()'"],
)
def test_dates_that_are_given_are_kept(database: Path, tmp_path: Path, sql: str) -> None:
    with make_executor(tmp_path / "cache") as executor:
        ran = count_runs(executor)
        executor.gold(database, sql)
        executor.gold(database, sql)
        assert ran == [sql]


def test_a_damaged_file_is_written_again(database: Path, tmp_path: Path) -> None:
    cache, sql = tmp_path / "cache", "SELECT x'00'"
    for damage in ("", "{", "[]", '["Table"]', '["Unknown", 1]', '["Table", [], [[{"a": 1}]]]'):
        with make_executor(cache) as executor:
            assert executor.gold(database, sql) == Table(("x'00'",), ((b"\0",),))
        [file] = [path for path in cache.rglob("*") if path.is_file()]
        file.write_text(damage)
    with make_executor(cache) as executor:
        assert executor.gold(database, sql) == Table(("x'00'",), ((b"\0",),))


def test_a_folder_that_cannot_be_written_is_the_users_mistake(
    database: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    with (
        make_executor(tmp_path / "cache") as executor,
        pytest.raises(UserError, match="cannot keep gold results here"),
    ):
        executor.gold(database, "SELECT 1")


def test_many_gold_queries_in_order(database: Path, tmp_path: Path) -> None:
    queries = [(database, f"SELECT {number}") for number in (3, 1, 3, 2)]
    with make_executor(tmp_path / "cache") as executor:
        executor.gold(database, "SELECT 1")
        ran = count_runs(executor)
        results = executor.gold_many(queries)
        assert [result.rows for result in results if isinstance(result, Table)] == [
            ((3,),),
            ((1,),),
            ((3,),),
            ((2,),),
        ]
        assert sorted(ran) == ["SELECT 2", "SELECT 3"]
