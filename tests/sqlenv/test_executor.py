"""The executor's promises, kept."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import apsw
import pytest

from minirl.exchange import UserError
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.votes import votes
from sqlenv.executor import Executor
from sqlenv.executor.database import check_database
from sqlenv.types import Denied, Result, SqlError, Table, TimedOut, TooLarge
from tests.sqlenv.conftest import SMALL, table_of
from tests.sqlenv.hostile import Measured, read_hostile
from tests.worlds import ENDLESS, MEMORY_BOMB, make_file

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
LATE = "TimedOut wall"
# The settings' own limits but for fewer steps, which end the endless ones soon.
USUAL: dict[str, Any] = {"timeout_s": 8, "max_steps": 5_000_000}
CASES = read_hostile()


def run_hostile(folder: Path, cases: str, **limits: float) -> list[Measured]:
    """Run the statements in a process of its own, whose memory is nobody else's."""
    command = [sys.executable, "-m", "tests.sqlenv.hostile", folder, json.dumps(limits)]
    ran = subprocess.run(
        [*command, cases], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert not ran.returncode, ran.stderr
    return [Measured(**json.loads(line)) for line in ran.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("limits", "most_bytes"),
    [
        (SMALL | {"workers": 1, "max_steps": 300_000, "max_value_bytes": 50_000}, 60_000_000),
        pytest.param(USUAL, 200_000_000, marks=pytest.mark.nightly),
    ],
    ids=["small", "usual"],
)
def test_hostile_statements_end_as_named(
    tmp_path: Path, limits: dict[str, Any], most_bytes: int
) -> None:
    """Each also leaves every byte and the next query's answer as they were: see `measure`."""
    ran = run_hostile(tmp_path, "all", **limits)
    assert len(ran) == len(CASES) > 500
    for case, found in zip(CASES, ran, strict=True):
        seen = (case.what, case.sql[:200], found)
        # Small limits are reached first, but by what is denied.
        is_limited = limits is not USUAL and found.ends.startswith(("TooLarge", "TimedOut steps"))
        assert found.ends in case.ends or (is_limited and "Denied" not in str(case.ends)), seen
        assert str(tmp_path) not in found.text, seen
        assert found.grown_bytes < most_bytes, seen
        # What cannot be interrupted is over in 2 s, so twice a time limit of 2 s and more is kept.
        is_long = limits is USUAL and case.is_endless
        assert found.seconds < (2 * limits["timeout_s"] if is_long else 2), seen


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("which", "timeout_s"), [("endless", 0.5), ("sorting", 2)])
def test_time_ends_statements_within_twice_the_limit(
    which: str, timeout_s: float, tmp_path: Path
) -> None:
    """A sort is one call, of 2 s where it fills the memory: it needs a limit as long."""
    cases = [case for case in CASES if case.is_among(which)]
    ran = run_hostile(tmp_path, which, timeout_s=timeout_s, max_steps=2**31 - 1)
    for case, found in zip(cases, ran, strict=True):
        assert not found.ends.startswith(("Denied", "SqlError")), (case.sql[:200], found)
        assert found.seconds < 2 * timeout_s, (case.sql[:200], found)
        assert found.grown_bytes < 200_000_000, (case.sql[:200], found)
    # Sorts fill the memory first; of the others a few do so, or would end.
    assert which == "sorting" or sum(found.ends == LATE for found in ran) > len(ran) // 2


@pytest.mark.parametrize(
    ("sql", "result"),
    [
        ("SELECT 1; SELECT 2", Denied("several statements")),
        ("PRAGMA hard_heap_limit = 1", Denied("PRAGMA")),
        ("DROP TABLE city", Denied("schema change")),
        ("DELETE FROM city", Denied("DELETE")),
        ("SELECT load_extension('x')", Denied("function load_extension")),
        ("EXPLAIN SELECT 1", Denied("EXPLAIN")),
        ("SELECT ?", Denied("parameters")),
        ("SELECT 'é', nope FROM city", SqlError("no such column: nope", offset=13)),
        ("", SqlError("the query is empty")),
        ("-- nothing", SqlError("the query is empty")),
        ("x" * 100_001, TooLarge("sql")),
        (ENDLESS, TimedOut("steps")),
        ("SELECT a.n FROM number a, number b", TooLarge("rows")),
        ("SELECT zeroblob(99000) FROM number", TooLarge("bytes")),
        (MEMORY_BOMB, TooLarge("memory")),
    ],
)
def test_why_there_is_no_table(
    executor: Executor, database: Path, sql: str, result: Result
) -> None:
    assert executor.execute(database, sql) == result


def test_a_path_may_be_text(executor: Executor, database: Path) -> None:
    path: Any = str(database)
    assert executor.execute(path, "SELECT 1") == Table(("1",), ((1,),))


def test_many_in_order_with_each_distinct_query_once(executor: Executor, database: Path) -> None:
    queries = [(database, f"SELECT {n % 50}, random()") for n in range(200)]
    queries += [(database, ENDLESS), (database, "SELECT"), (database, "")]
    results = executor.execute_many(queries)
    tables = [result for result in results if isinstance(result, Table)]
    assert [table.rows[0][0] for table in tables] == [n % 50 for n in range(200)]
    assert tables[0] == tables[50]
    assert [type(result) for result in results[200:]] == [TimedOut, SqlError, SqlError]
    assert executor.execute_many([]) == []


def test_the_step_budget_stops_at_the_same_place(database: Path) -> None:
    queries = [(database, ENDLESS.replace("FROM r)", f"FROM r LIMIT {n})")) for n in range(1, 99)]
    with Executor(ExecutorConfig(**SMALL | {"max_steps": 700})) as executor:
        answers = executor.execute_many(queries)
        assert executor.execute_many(queries) == answers
    finished = [isinstance(answer, Table) for answer in answers]
    assert finished == sorted(finished, reverse=True)
    assert 5 < sum(finished) < 95


def test_wall_time_ends_a_query_and_the_next_one_is_not_hurt(database: Path) -> None:
    config = ExecutorConfig(workers=1, timeout_s=1, max_steps=2**31 - 1)
    with Executor(config) as executor:
        assert isinstance(executor.execute(database, "SELECT 1"), Table)
        start_s = time.monotonic()
        assert executor.execute(database, ENDLESS) == TimedOut("wall")
        # All its steps would take minutes; on a busy machine it hears late that its time is over.
        assert 0.9 < time.monotonic() - start_s < 20
        assert executor.execute(database, "SELECT 1") == Table(("1",), ((1,),))


def test_an_interrupted_batch_is_given_up_at_once(database: Path) -> None:
    config = ExecutorConfig(workers=2, timeout_s=15, max_steps=2**31 - 1)
    stop = (threading.main_thread().ident or 0, signal.SIGINT)
    # A shell ignores Ctrl-C for what it runs in the background, and so would the tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Executor(config) as executor:
            threading.Timer(1, signal.pthread_kill, stop).start()
            start_s = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                executor.execute_many([(database, f"{ENDLESS} -- {n}") for n in range(100)])
            assert time.monotonic() - start_s < 10
            assert executor.execute(database, "SELECT 1") == Table(("1",), ((1,),))
    finally:
        signal.signal(signal.SIGINT, before)


def test_wide_rows_are_sorted(tmp_path: Path) -> None:
    """SQLite bounds a sorter's record, here of 45,000 characters, as it bounds a value."""
    columns = ", ".join(f"c{number}" for number in range(300))
    cells = ", ".join(["printf('%.*c', 150, char(96 + n))"] * 300)
    path = make_file(
        tmp_path / "wide.sqlite",
        f"CREATE TABLE wide ({columns}); CREATE TABLE one (n); INSERT INTO one VALUES (1), (2);"
        f"INSERT INTO wide SELECT {cells} FROM one",
    )
    with Executor(ExecutorConfig(workers=1)) as executor:
        for sql, letters in (
            ("SELECT * FROM wide ORDER BY c7 DESC", "ba"),
            ("SELECT DISTINCT * FROM wide -- all", "ab"),
            ("SELECT * FROM wide UNION SELECT * FROM wide ORDER BY 3;", "ab"),
            ("SELECT *, CAST(x'ff' AS TEXT) FROM wide ORDER BY 1 DESC", "ba"),
        ):
            result = table_of(executor, path, sql)
            assert result.columns[:2] == ("c0", "c1")
            assert [row[299] for row in result.rows] == [letter * 150 for letter in letters], sql
        # One value may not be as long as that, nor may a statement hide behind.
        long = "SELECT *, (SELECT hex(zeroblob(40000))) FROM wide ORDER BY 1"
        assert executor.execute(path, long) == TooLarge("bytes")
        both = "SELECT * FROM wide ORDER BY 1; DELETE FROM wide"
        assert isinstance(executor.execute(path, both), Denied)


def test_the_clock_of_an_idle_executor(database: Path) -> None:
    """A query that starts between two looks of the watchdog gets its full time."""
    config = ExecutorConfig(timeout_s=0.3, max_steps=2**31 - 1)
    with Executor(config) as executor:
        executor.execute(database, "SELECT 1")
        for pause_s in (0.05, 0.2):
            time.sleep(pause_s)
            start_s = time.monotonic()
            assert executor.execute(database, ENDLESS) == TimedOut("wall")
            assert time.monotonic() - start_s > 0.25


def test_hostile_neighbours_do_not_change_answers(database: Path) -> None:
    # A time that only the endless one needs, also where others keep the machine busy.
    limits: dict[str, Any] = SMALL | {"timeout_s": 3, "max_steps": 2**31 - 1}
    # A few megabytes of the heap.
    innocent = "SELECT count(*) FROM (SELECT DISTINCT a.n, b.n FROM number a, number b LIMIT 20000)"
    with Executor(ExecutorConfig(**limits)) as executor:
        executor.execute(database, "SELECT 1")
        jobs = [(ENDLESS, 1), (MEMORY_BOMB, 3), (MEMORY_BOMB, 3), (innocent, 6), ("SELECT 7", 300)]
        with ThreadPoolExecutor(len(jobs)) as threads:
            ran = threads.map(
                lambda job: [executor.execute(database, job[0]) for _ in range(job[1])], jobs
            )
            results = [result for some in ran for result in some]
    counts = {result: results.count(result) for result in results}
    assert counts == {
        TimedOut("wall"): 1,
        TooLarge("memory"): 6,
        Table(("count(*)",), ((20000,),)): 6,
        Table(("7",), ((7,),)): 300,
    }


def test_what_threads_have_freed_goes_back_before_a_query_runs_alone(database, monkeypatch) -> None:
    """Of 32 threads that ran out of heap, glibc keeps a gigabyte."""
    trims: list[None] = []
    monkeypatch.setattr("sqlenv.executor.executor.trim", lambda: trims.append(None))
    with Executor(ExecutorConfig(**SMALL)) as executor:
        executor.execute(database, "SELECT 1")
        assert not trims
        assert executor.execute(database, MEMORY_BOMB) == TooLarge("memory")
    assert len(trims) == 1


def test_text_that_is_not_valid(executor: Executor, database: Path) -> None:
    ends = ("", ";", " ; ;\n;", " -- c;;", " /* open", ";; /* open", "; ;-- c")
    for start, end in product(("", ";;", "; /* a */ ;\n-- b\n;"), ends):
        sql = f"{start}SELECT id, label, data, data AS data FROM broken ORDER BY id DESC{end}"
        assert executor.execute(database, sql) == Table(
            ("id", "label", "data", "data"),
            ((3, None, "e", "e"), (2, "good", 2.5, 2.5), (1, "AB", b"\xff", b"\xff")),
        )
    labels, ids = (database, "SELECT label FROM broken"), (database, "SELECT id FROM broken")
    found = votes(executor, [labels, ids], "set")
    assert [vote is None for vote in found] == [True, False]


def test_few_functions_are_between_a_query_and_its_rows(database: Path, monkeypatch) -> None:
    calls: list[str] = []

    def weigh(_rows: Any) -> int:
        stack = traceback.extract_stack()
        calls[:] = [f"{Path(one.filename).stem}:{one.name}" for one in stack[:-1]]
        return 0

    monkeypatch.setattr("sqlenv.executor.connection.weigh", weigh)
    with Executor(ExecutorConfig(workers=1)) as executor:
        table_of(executor, database, "SELECT n FROM number")
    assert calls[calls.index("executor:execute") :] == [
        *("executor:execute", "executor:_attempt", "connection:run", "connection:_fetch"),
    ]


def test_a_disk_that_fails_is_no_fault_of_a_query(database: Path, monkeypatch) -> None:
    """The connection is open, and the file is still listed: a page of it cannot be read."""
    with Executor(ExecutorConfig()) as executor:
        assert isinstance(executor.execute(database, "SELECT name FROM city"), Table)
        with monkeypatch.context() as patch:

            def fetch(*_arguments: object) -> None:
                raise apsw.IOError("disk I/O error")

            patch.setattr("sqlenv.executor.connection.Connection._fetch", fetch)
            with pytest.raises(UserError, match=r"cannot read it \(disk I/O error"):
                executor.execute(database, "SELECT name FROM city")
        assert isinstance(executor.execute(database, "SELECT name FROM city"), Table)


def test_a_damaged_page_is_no_fault_of_a_query(executor: Executor, tmp_path: Path) -> None:
    """The header and the schema are whole: what reads the other pages finds out, nothing else."""
    path = make_file(
        tmp_path / "damaged.sqlite",
        "CREATE TABLE t AS WITH r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r LIMIT 9999) "
        "SELECT i FROM r; CREATE TABLE whole AS SELECT 7 AS n",
    )
    content = bytearray(path.read_bytes())
    content[4096 + 8 : 8192] = b"\xff" * 4088
    path.write_bytes(content)
    assert table_of(executor, path, "SELECT n FROM whole").rows == ((7,),)
    with pytest.raises(UserError, match=r"damaged.sqlite: SQLite cannot read it \(.*malformed"):
        executor.execute(path, "SELECT count(*) FROM t")


def test_no_more_idle_connections_than_allowed(tmp_path: Path, database: Path, monkeypatch) -> None:
    monkeypatch.setattr("sqlenv.executor.executor._MOST_IDLE", 3)
    paths = [tmp_path / f"{number}.sqlite" for number in range(12)]
    for path in paths:
        path.write_bytes(database.read_bytes())
    with Executor(ExecutorConfig(**SMALL)) as executor:
        for path in paths * 2:
            table_of(executor, path, "SELECT 1 FROM city")
        assert count_open(tmp_path) == 3
    assert count_open(tmp_path) == 0


def count_open(folder: Path) -> int:
    descriptors = Path("/proc/self/fd")
    return sum(str(folder) in os.path.realpath(link) for link in descriptors.iterdir())


def test_a_closed_executor_says_so(database: Path) -> None:
    with Executor(ExecutorConfig(**SMALL)) as executor:
        executor.close()
    with pytest.raises(RuntimeError):
        executor.execute_many([(database, "SELECT 1"), (database, "SELECT 2")])


def test_a_database_left_in_wal_mode_is_read_without_files_beside_it(
    executor: Executor, database: Path
) -> None:
    make_file(database, "PRAGMA journal_mode = wal")
    table_of(executor, database, "SELECT * FROM city")
    assert [path.name for path in database.parent.iterdir()] == [database.name]


@pytest.mark.parametrize(
    ("content", "sibling", "message"),
    [
        (None, "", "no such file"),
        (b"", "", "is empty"),
        (b"not a database at all", "", "not a SQLite database"),
        (b"SQLite format 3\0" + b"\xff" * 4096, "", "SQLite cannot read it"),
        ("cut", "", "SQLite cannot read it"),
        ("copy", "-wal", "unfinished writes"),
        ("copy", "-journal", "unfinished writes"),
    ],
)
def test_a_database_that_cannot_be_used_is_the_users_mistake(
    executor: Executor, database: Path, tmp_path: Path, content: Any, sibling: str, message: str
) -> None:
    path = tmp_path / "bad.sqlite"
    if content in ("copy", "cut"):
        content = database.read_bytes()[: 8192 if content == "cut" else None]
    if content is not None:
        path.write_bytes(content)
    if sibling:
        path.with_name(path.name + sibling).write_bytes(b"x")
    with pytest.raises(UserError, match=message) as raised:
        executor.execute(path, "SELECT 1")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(path))
    with pytest.raises(UserError, match=message):
        executor.execute_many([(database, "SELECT 1"), (path, "SELECT 1")])
    if message != "SQLite cannot read it":
        with pytest.raises(UserError, match=message):
            check_database(path)
    assert isinstance(executor.execute(database, "SELECT 1"), Table)


def test_a_query_can_have_a_budget_of_its_own(executor, database):
    counting = "SELECT count(*) FROM number AS a, number AS b WHERE a.n = b.n + 1"
    assert executor.execute(database, counting, max_steps=1000) == TimedOut("steps")
    # The next query on the same connection has the settings' budget again.
    assert executor.execute(database, "SELECT count(*) FROM number") == Table(
        ("count(*)",), ((1000,),)
    )
    assert executor.execute(database, ENDLESS, max_steps=1000) == TimedOut("steps")


def test_a_budget_beyond_what_sqlite_counts_is_counted_in_lots(database, monkeypatch):
    """Official programs know no steps; one lot of 2,147 million is 8 to 20 seconds."""
    monkeypatch.setattr("sqlenv.executor.connection._MOST_STRIDE", 1000)
    config = ExecutorConfig(workers=1)
    counting = (
        "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 500) SELECT count(*) FROM r"
    )
    with Executor(config) as executor:
        assert executor.execute(database, counting, max_steps=1000) == TimedOut("steps")
        assert executor.execute(database, counting, max_steps=10**15) == Table(
            ("count(*)",), ((500,),)
        )
        assert executor.execute(database, ENDLESS, max_steps=50_000) == TimedOut("steps")


def test_long_values_come_as_they_are_among_short_ones(executor, database):
    """Rows are read many at a time as long as values are short, and few at a time else."""
    values = "iif(n = 500, hex(zeroblob(n * 90)), n)"
    rows = table_of(executor, database, f"SELECT {values} FROM number ORDER BY n").rows
    assert [row[0] for row in rows[498:502]] == [499, "0" * 90_000, 501, 502]
    assert len(rows) == 1000


def test_a_long_value_is_computed_once(executor, database):
    """Whether it is text is asked of the same value, also of one by chance."""
    values = "SELECT iif(random() % 2, hex(zeroblob(9000)), n) FROM number LIMIT 40"
    kinds = {type(row[0]) for row in table_of(executor, database, values).rows}
    assert kinds == {str, int}


@pytest.mark.parametrize(
    "call", ["instr(x, y)", "length(replace(x, y, 'z'))", "x LIKE z", "x GLOB z"]
)
def test_slow_calls_without_a_loop_take_no_longer_the_more_there_are(database, call) -> None:
    """Nothing looks at the time between them."""
    x, y = "printf('%.390000c', 'a') AS x", "printf('%.190000c', 'a') || 'b' AS y"
    z = "'_%' || printf('%.900c', 'a') || 'b' AS z"
    calls = " + ".join([f"({call})"] * 300)
    config = ExecutorConfig(workers=1, timeout_s=60)
    with Executor(config) as executor:
        start_s = time.thread_time()
        result = executor.execute(database, f"SELECT {calls} FROM (SELECT {x}, {y}, {z})")
        assert result == TooLarge("bytes")
        assert time.thread_time() - start_s < 2
        few = f"SELECT {' + '.join(['(x LIKE y)'] * 300)} FROM (SELECT 'aa' AS x, '%a' AS y)"
        table_of(executor, database, few)


def test_text_of_a_utf16_database(tmp_path: Path) -> None:
    path = make_file(
        tmp_path / "wide.sqlite",
        "PRAGMA encoding = 'UTF-16le'; CREATE TABLE t (a TEXT);"
        "INSERT INTO t VALUES ('né'), (CAST(x'410000d84200' AS TEXT))",
    )
    with Executor(ExecutorConfig(**SMALL)) as executor:
        first, [second] = table_of(executor, path, "SELECT a FROM t").rows
    assert first == ("né",)
    assert str(second).startswith("A")


def test_the_heap_limit_ends_with_its_executor() -> None:
    before = apsw.hard_heap_limit(-1)
    with Executor(ExecutorConfig(heap_bytes=300_000_000)):
        with Executor(ExecutorConfig(heap_bytes=200_000_000)):
            assert apsw.hard_heap_limit(-1) == 300_000_000
        assert apsw.hard_heap_limit(-1) == 300_000_000
    assert apsw.hard_heap_limit(-1) == before


def test_a_file_that_was_replaced_is_read_anew(database: Path) -> None:
    with Executor(ExecutorConfig(**SMALL)) as executor:
        executor.execute(database, "SELECT count(*) FROM city")
        make_file(database, "DELETE FROM city")
        assert executor.execute(database, "SELECT count(*) FROM city") == Table(
            ("count(*)",), ((0,),)
        )
