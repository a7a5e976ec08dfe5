"""What a query may use, and what of it makes a result depend on the moment."""

import time
from datetime import UTC, datetime
from pathlib import Path

import apsw
import pytest

from sqlenv.config import OFFICIAL, ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Denied, Table, TooLarge
from tests.sqlenv.cases import read_cases
from tests.sqlenv.conftest import SMALL, make_database, make_file, table_of


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_database(tmp_path_factory.mktemp("today") / "town.sqlite")
    views = "AS SELECT date('now') AS day; CREATE VIEW dice AS SELECT random() AS value"
    return make_file(path, f"CREATE VIEW today {views}")


def test_what_depends_on_chance_or_a_running_clock_is_marked(today: Path) -> None:
    still = ExecutorConfig(**SMALL)
    running = still.model_copy(update={"now": None})
    for config, marked in ((still, {"chance"}), (running, {"chance", "clock"})):
        with Executor(config) as executor:
            for sql, needs in read_cases("clock or chance") * 2:
                found = table_of(executor, today, sql)
                assert found.nondeterministic == (needs in marked), sql


def test_the_clock_stands_still(executor: Executor, today: Path) -> None:
    for sql, row in read_cases("a clock that stands still"):
        assert table_of(executor, today, sql).rows == (tuple(row),), sql
        assert executor.gold(today, sql) is executor.gold(today, sql)
    # Two executors of a process have their own clocks, and one of official verdicts the time's.
    settings = executor.config.model_copy(update={"now": datetime(2001, 2, 3, tzinfo=UTC)})
    with Executor(settings) as other:
        assert other.execute(today, "SELECT date()") == Table(("date()",), (("2001-02-03",),))
        assert executor.execute(today, "SELECT date()") == Table(("date()",), (("2031-05-17",),))
    assert OFFICIAL.now is None
    with Executor(settings.model_copy(update={"now": None})) as other:
        before_s = int(time.time())
        [[now_s]] = table_of(other, today, "SELECT unixepoch()").rows
        assert before_s <= int(str(now_s)) <= time.time()


def test_chance_that_is_not_asked_does_not_count(executor: Executor, tmp_path: Path) -> None:
    path = make_file(
        tmp_path / "defaults.sqlite",
        "CREATE TABLE user (n, key DEFAULT (hex(randomblob(16))), at DEFAULT (date()));"
        "INSERT INTO user VALUES (1, 'a', 'b')",
    )
    for sql in (
        "SELECT * FROM user",
        "SELECT n FROM user WHERE key > 'A'",
        "SELECT max(at) FROM user",
    ):
        for _ in range(2):
            assert not table_of(executor, path, sql).nondeterministic, sql
    result = table_of(executor, path, "SELECT length(randomblob(n)), typeof(random()) FROM user")
    assert result == Table(("length(randomblob(n))", "typeof(random())"), ((1, "integer"),))
    assert result.nondeterministic
    assert executor.execute(path, "SELECT randomblob(1000000000)") == TooLarge("bytes")


def test_an_r_tree_can_be_read(executor: Executor, tmp_path: Path) -> None:
    script = """
        CREATE VIRTUAL TABLE "Box ""É" USING rtree(id, low, high, +name);
        INSERT INTO "Box ""É" VALUES (1, 0, 1, 'a'), (2, 5, 6, 'b');
        CREATE VIRTUAL TABLE cell USING rtree_i32(id, low, high);
        INSERT INTO cell VALUES (7, 8, 9);
    """
    path = make_file(tmp_path / "map.sqlite", script)
    for _ in range(2):
        result = executor.execute(path, 'SELECT id, name FROM "box ""É" WHERE low > 3')
        assert result == Table(("id", "name"), ((2, "b"),))
        found = table_of(executor, path, "SELECT * FROM cell, (SELECT max(low) FROM cell)")
        assert found.rows == ((7, 8, 9, 8),)
    for sql in ("DELETE FROM cell", "INSERT INTO cell VALUES (1, 2, 3)"):
        assert isinstance(executor.execute(path, sql), Denied)


def test_functions_that_are_not_listed_are_denied(executor: Executor, database: Path) -> None:
    """Whatever SQLite has beside: of each function with any number of arguments that it takes."""
    connection = apsw.Connection(":memory:")
    arities: dict[str, int] = {
        str(name): max(int(str(count)), 1 if int(str(count)) < 0 else 0)
        for name, count in connection.execute("SELECT name, narg FROM pragma_function_list")
    }
    allowed = set()
    for name, count in arities.items():
        sql = f'SELECT "{name}"({", ".join(["1"] * count)})'
        if executor.execute(database, sql) != Denied(f"function {name}"):
            allowed.add(name)
    assert "abs" in allowed
    assert set(arities) - allowed == {
        *("fts3_tokenizer", "fts5", "fts5_get_locale", "fts5_insttoken", "fts5_locale"),
        *("fts5_source_id", "geopoly_area", "geopoly_bbox", "geopoly_blob", "geopoly_ccw"),
        *("geopoly_contains_point", "geopoly_debug", "geopoly_group_bbox", "geopoly_json"),
        *("geopoly_overlap", "geopoly_regular", "geopoly_svg", "geopoly_within", "geopoly_xform"),
        *("load_extension", "median", "optimize", "percentile", "percentile_cont"),
        *("percentile_disc", "rtreecheck", "rtreedepth", "rtreenode", "sqlite_compileoption_get"),
        *("sqlite_compileoption_used", "sqlite_log", "sqlite_source_id"),
    }


def test_tables_that_are_not_the_databases_are_denied(executor: Executor, tmp_path: Path) -> None:
    # A table of its own may have any name; one of SQLite's insides keeps what it shows.
    script = """
        CREATE TABLE carray (a); CREATE TABLE pragma_mine (a); CREATE INDEX cte ON carray(a);
        CREATE VIRTUAL TABLE inside USING dbstat(main);
        CREATE VIRTUAL TABLE [my words] USING fts5(a);
    """
    path = make_file(tmp_path / "own.sqlite", script)
    answers = {
        "SELECT a FROM carray": Table(("a",), ()),
        "SELECT count(*) FROM pragma_mine": Table(("count(*)",), ((0,),)),
        "SELECT a FROM [my words]": Table(("a",), ()),
        "WITH cte AS (SELECT 1) SELECT count(*) FROM cte": Table(("count(*)",), ((1,),)),
        "SELECT count(*) FROM json_each('[1, 2]')": Table(("count(*)",), ((2,),)),
        "SELECT * FROM inside": Denied("table inside"),
        "SELECT count(*) FROM inside": Denied("table inside"),
        "SELECT 1 FROM dbstat": Denied("table dbstat"),
        "SELECT name FROM pragma_function_list": Denied("table pragma_function_list"),
        "SELECT 1 FROM pragma_function_list": Denied("table pragma_function_list"),
    }
    assert {sql: executor.execute(path, sql) for sql in answers} == answers
