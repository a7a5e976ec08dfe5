"""How files that somebody else made are opened: by whatever reads them, not only by queries."""

import re
import subprocess
import sys
import time
from pathlib import Path

import apsw
import pytest

from exchange import UserError
from sqlenv.executor.database import check_contents, reading
from sqlenv.schema.reading import Column, DatabaseSchema, TableSchema, read_schema
from sqlenv.schema.values import build_index
from tests.sqlenv.conftest import make_file

ROOT = Path(__file__).parents[2]
# Megabytes in a cell, of a file of 8 KB.
LARGE = "hex(zeroblob(50000000))"
# Some milliseconds a row, in a call of SQLite each.
TERM = "length(replace(hex(zeroblob(45000)), '00000000001', a))"
SLOW = " + ".join([TERM] * 20)
INDEXED = DatabaseSchema((TableSchema("t", (Column("b"),)),))


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


def read(path: Path) -> None:
    read_schema(path)


def profile(path: Path) -> None:
    read_schema(path, profile=True)


def index(path: Path) -> None:
    build_index(path, INDEXED, path.with_name("index.sqlite"))


@pytest.mark.parametrize("reader", [read, profile, index])
def test_a_small_file_does_not_hold_its_reader(tmp_path: Path, reader) -> None:
    path = make(tmp_path / "large.sqlite", 3, f"AS ({LARGE})")
    apsw.memory_high_water(True)
    used = apsw.memory_used()
    with pytest.raises(UserError, match="too much time or memory"):
        reader(path)
    assert apsw.memory_high_water() - used < 20_000_000


@pytest.mark.parametrize("reader", [profile, index])
def test_a_slow_file_does_not_hold_its_reader(tmp_path: Path, reader, monkeypatch) -> None:
    """Seconds of the processor, and one more for each megabyte of the file."""
    monkeypatch.setattr("sqlenv.executor.database._READING_S", 0.5)
    path = make(tmp_path / "slow.sqlite", 5000, f"AS ({SLOW})")
    start_s = time.thread_time()
    with pytest.raises(UserError, match=re.escape(str(path))) as raised:
        reader(path)
    assert 0.4 < time.thread_time() - start_s < 2.5
    assert "\n" not in str(raised.value)


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
