import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest

from minirl.exchange import UserError
from sqlenv.cache import DiskCache
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor, allowed, gold
from sqlenv.types import Denied, Result, SqlError, Table, TimedOut, TooLarge
from tests.worlds import ENDLESS, MEMORY_BOMB, make_file


def make_executor(cache: Path | None = None, **settings: Any) -> Executor:
    disk = DiskCache(cache) if cache else None
    return Executor(ExecutorConfig(workers=1, **settings), disk)


def count_runs(executor: Executor) -> list[str]:
    """Note each query that the executor really runs."""
    ran: list[str] = []
    execute = executor.execute

    def noting(database: Path, sql: str, **limits: Any) -> Result:
        ran.append(sql)
        return execute(database, sql, **limits)

    executor.execute = noting
    return ran


@pytest.mark.parametrize(
    ("sql", "result"),
    [
        (
            "SELECT NULL, 1, 2.0, 1e999, -9223372036854775808, x'00ff', 'é中' || char(0)",
            (None, 1, 2.0, float("inf"), -9223372036854775808, b"\x00\xff", "é中\0"),
        ),
        ("SELECT * FROM city WHERE 0", None),
        ("SELECT datetime('now')", ("2031-05-17 09:26:53",)),
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
    for settings in ({"max_rows": 10}, {"max_steps": 5000}, {"now": None}):
        with make_executor(cache, **settings) as executor:
            ran = count_runs(executor)
            executor.gold(database, sql)
            assert ran == [sql]
    make_file(database, "DELETE FROM city")
    with make_executor(cache) as executor:
        assert executor.gold(database, sql) == Table(("count(*)",), ((0,),))


def test_a_release_that_allows_more_runs_what_the_one_before_refused(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> Result:
        with make_executor(tmp_path / "cache") as executor:
            return executor.gold(database, "SELECT abs(-1)")

    with monkeypatch.context() as before:
        before.setattr(allowed, "_FUNCTIONS", allowed._FUNCTIONS - {"abs"})
        assert ask() == Denied("function abs")
    assert isinstance(ask(), Table)
    # What else may change in how queries run.
    with make_executor(tmp_path / "cache") as executor:
        ran = count_runs(executor)
        executor.gold(database, "SELECT abs(-1)")
        assert ran == []
    monkeypatch.setattr(gold, "VERSION", gold.VERSION + 1)
    with make_executor(tmp_path / "cache") as executor:
        ran = count_runs(executor)
        executor.gold(database, "SELECT abs(-1)")
        assert ran == ["SELECT abs(-1)"]


@pytest.mark.parametrize(
    ("sql", "settings", "runs"),
    [
        (ENDLESS, {"timeout_s": 0.1, "max_steps": 2**31 - 1}, [1, 1, 2]),
        (MEMORY_BOMB, {"heap_bytes": 8_000_000}, [1, 1, 2]),
        ("SELECT date('now')", {"now": None}, [1, 2, 3]),
        ("SELECT random()", {}, [1, 2, 3]),
    ],
)
def test_results_of_the_moment_are_not_kept_or_for_a_while(
    database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sql: str,
    settings: Any,
    runs: list[int],
) -> None:
    with make_executor(tmp_path / "cache", **settings) as executor:
        ran, clock = count_runs(executor), time.monotonic
        for later_s, count in zip((0, gold.TRANSIENT_S / 2, gold.TRANSIENT_S), runs, strict=True):
            monkeypatch.setattr(gold.time, "monotonic", lambda later_s=later_s: clock() + later_s)
            executor.gold(database, sql)
            assert len(ran) == count
    assert not list(DiskCache(tmp_path / "cache")._cache)


def test_what_is_no_result_on_disk_is_written_again(database: Path, tmp_path: Path) -> None:
    sql = "SELECT x'00'"
    narrow = ["Table", {"columns": ["a"], "rows": [[1, 2]]}]
    wrong = [narrow, [], "text", 5, ["Path", {}], ["Denied", {"who": 1}], ["Table", {"rows": []}]]
    for value in wrong:
        with make_executor(tmp_path / "cache") as executor:
            assert executor.gold(database, sql) == Table(("x'00'",), ((b"\0",),))
        disk = DiskCache(tmp_path / "cache")
        [key] = disk._cache
        kept = json.loads(disk.get(key))
        assert kept == ["Table", {**kept[1], "columns": ["x'00'"], "rows": [[{"hex": "00"}]]}]
        disk[key] = value if value in ([], 5) else json.dumps(value)
        disk.close()
    with make_executor(tmp_path / "cache") as executor:
        assert executor.gold(database, sql) == Table(("x'00'",), ((b"\0",),))


def test_a_damaged_cache_is_named(database: Path, tmp_path: Path) -> None:
    with make_executor(tmp_path / "cache") as executor:
        executor.gold(database, "SELECT 1")
    (tmp_path / "cache" / "cache.db").write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="cache: damaged"):
        make_executor(tmp_path / "cache")


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


def test_golds_in_memory_are_bounded_in_bytes(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of 1,000 numbers counts as some 100 kB, and ten of these have room."""
    monkeypatch.setattr("sqlenv.executor.gold._MEMORY_BYTES", 1_200_000)
    queries = [(database, f"SELECT n, {number} FROM number") for number in range(12)]
    with make_executor() as executor:
        ran = count_runs(executor)
        for query in queries:
            executor.gold(*query)
        executor.gold(*queries[11])
        assert len(ran) == 12
        executor.gold(*queries[0])  # forgotten with all that came before the last ones
        executor.gold(*queries[0])
        assert len(ran) == 13


def test_a_full_disk_is_the_users_to_mend(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_arguments: Any, **_keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("diskcache.Cache.set", fill)
    with (
        make_executor(tmp_path / "cache") as executor,
        pytest.raises(UserError, match="No space left on device"),
    ):
        executor.gold(database, "SELECT 1")
