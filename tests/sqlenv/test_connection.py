"""What a connection allows and computes, and how files that somebody else made are opened."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import apsw
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sqlenv.config import OFFICIAL, ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents, reading
from sqlenv.executor.functions import add_functions, trim
from sqlenv.schema.reading import read_schema
from sqlenv.types import Denied, Table, TooLarge
from tests.sqlenv.conftest import SMALL, table_of
from tests.vectors import read_cases
from tests.worlds import TOWN, make_file

ROOT = Path(__file__).parents[2]
# Some milliseconds a row, in a call of SQLite each.
TERM = "length(replace(hex(zeroblob(45000)), '00000000001', a))"
SLOW = " + ".join([TERM] * 20)


def make(path: Path, rows: int, rule: str) -> Path:
    """Make a table of rows, then add a rule that nobody followed when they were written."""
    script = f"""
        CREATE TABLE t (a);
        WITH r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r LIMIT {rows})
        INSERT INTO t(a) SELECT 'x' FROM r;
        PRAGMA ignore_check_constraints = 1;
        ALTER TABLE t ADD COLUMN b {rule};
    """
    return make_file(path, script)


def test_constraints_are_not_evaluated_to_check_the_pages(tmp_path: Path) -> None:
    """SQLite knows none of a file that it opens read-only; else these take 15 s."""
    path = make(tmp_path / "checked.sqlite", 3000, f"CHECK ({SLOW})")
    start_s = time.thread_time()
    check_contents(path)
    assert time.thread_time() - start_s < 1


def test_an_honest_cell_is_as_long_as_its_file(tmp_path: Path) -> None:
    rows = "INSERT INTO t VALUES (replace(hex(zeroblob(500000)), '0', 'xyz'))"
    script = f"CREATE TABLE t (a TEXT, b AS (substr(a, 2, 3))); {rows}"
    path = make_file(tmp_path / "long.sqlite", script)
    [table] = read_schema(path).tables
    assert [column.examples for column in table.columns] == [(("xyz" * 14)[:40],), ("yzx",)]


def test_nothing_of_a_schema_is_trusted(database: Path) -> None:
    with reading(database) as connection:
        assert connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, -1) == 0
        assert connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, -1) == 1
        with pytest.raises(apsw.ReadOnlyError):
            connection.execute("DELETE FROM city")


def test_every_database_is_opened_here() -> None:
    """Elsewhere demo data are made, and SQLite itself is asked, without a file."""
    found = subprocess.run(
        ["grep", "-rlE", "apsw.Connection\\(|sqlite3.connect", "sqlenv", "rewards", "launch"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line for line in found.stdout.split() if line.endswith(".py")} == {
        "sqlenv/executor/allowed.py",
        "sqlenv/executor/database.py",
        # Tables of ours.
        "sqlenv/data/loading.py",
        "sqlenv/data/questions.py",
        "sqlenv/data/sources.py",
        "sqlenv/demo/databases.py",
        "sqlenv/witness/variants.py",
    }


def test_a_process_ends_with_connections_open(database: Path) -> None:
    """The clock's layer below SQLite has to outlive them."""
    code = f"""
from pathlib import Path
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
executor = Executor(ExecutorConfig(workers=1))
print(executor.execute(Path({str(database)!r}), "SELECT date('now') > '2020' FROM city").rows[0])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "(1,)\n", "")


# What a query may use, and what of it makes a result depend on the moment.


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_file(tmp_path_factory.mktemp("today") / "town.sqlite", TOWN)
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


def test_random_bytes_are_bounded(executor: Executor, database: Path) -> None:
    assert table_of(executor, database, "SELECT length(randomblob(9))").nondeterministic
    assert executor.execute(database, "SELECT randomblob(1000000000)") == TooLarge("bytes")


def test_an_r_tree_is_denied(executor: Executor, tmp_path: Path) -> None:
    path = make_file(tmp_path / "map.sqlite", "CREATE VIRTUAL TABLE box USING rtree(id, low, high)")
    assert isinstance(executor.execute(path, "SELECT id FROM box"), Denied)


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
        *("bm25", "highlight", "matchinfo", "offsets", "snippet"),
        *("fts3_tokenizer", "fts5", "fts5_get_locale", "fts5_insttoken", "fts5_locale"),
        *("fts5_source_id", "geopoly_area", "geopoly_bbox", "geopoly_blob", "geopoly_ccw"),
        *("geopoly_contains_point", "geopoly_debug", "geopoly_group_bbox", "geopoly_json"),
        *("geopoly_overlap", "geopoly_regular", "geopoly_svg", "geopoly_within", "geopoly_xform"),
        *("load_extension", "median", "optimize", "percentile", "percentile_cont"),
        *("percentile_disc", "rtreecheck", "rtreedepth", "rtreenode", "sqlite_compileoption_get"),
        *("sqlite_compileoption_used", "sqlite_log", "sqlite_source_id", "unhex"),
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
        "SELECT a FROM [my words]": Denied("table my words"),
        "WITH cte AS (SELECT 1) SELECT count(*) FROM cte": Table(("count(*)",), ((1,),)),
        "SELECT count(*) FROM json_each('[1, 2]')": Table(("count(*)",), ((2,),)),
        "SELECT * FROM inside": Denied("table inside"),
        "SELECT count(*) FROM inside": Denied("table inside"),
        "SELECT 1 FROM dbstat": Denied("table dbstat"),
        "SELECT name FROM pragma_function_list": Denied("table pragma_function_list"),
        "SELECT 1 FROM pragma_function_list": Denied("table pragma_function_list"),
    }
    assert {sql: executor.execute(path, sql) for sql in answers} == answers


# Functions in place of SQLite's own: the same answers, in a time with the length.

NAMES = ("trim", "ltrim", "rtrim")
PLAIN, OURS = apsw.Connection(":memory:"), apsw.Connection(":memory:")
add_functions(OURS)

TEXTS = st.text("0123456789abcdefABCDEFxg- é🦆\0", max_size=12)
VALUES = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS
ASCII = st.text("0aF-", max_size=6).map(str.encode)


@given(st.sampled_from(NAMES), VALUES | ASCII, VALUES | ASCII)
@example("rtrim", "ab", "a\0b")
def test_answers_are_those_of_sqlite(name, first, second):
    sql = f"SELECT {name}(?, ?), typeof({name}(?, ?))"
    bindings = (first, second, first, second)
    assert OURS.execute(sql, bindings).get == PLAIN.execute(sql, bindings).get


@pytest.mark.parametrize("letter", ["x", "é", "🦆"])
def test_no_pair_of_texts_takes_long(letter):
    text, many = letter * 300_000, "".join(map(chr, range(0x100, 0xD800))) * 7 + letter
    start_s = time.thread_time()
    assert trim(text, many) == ""
    assert time.thread_time() - start_s < 2
