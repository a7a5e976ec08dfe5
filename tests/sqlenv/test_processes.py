"""Worker processes that die, hang, or outlive their parent."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import Case
from sqlenv.executor import Executor, processes
from sqlenv.executor.engine import Engine
from sqlenv.executor.processes import CRASHED, Processes
from sqlenv.types import Table, TimedOut, TooLarge
from tests.sqlenv import hostile
from tests.sqlenv.conftest import ENDLESS

_of_others: set[int] = set()


@pytest.fixture(autouse=True)
def workers_of_other_tests() -> None:
    """Executors that other tests of this process have open keep their workers."""
    _of_others.clear()
    _of_others.update(hostile.list_workers(os.getpid()))


def list_workers(parent: int) -> list[int]:
    """List the living workers of a process that were not there when the test began."""
    return [pid for pid in hostile.list_workers(parent) if pid not in _of_others]


ROOT = Path(__file__).parents[2]
ONE = Table(("1",), ((1,),))


def has_worked(process: int) -> bool:
    """Say whether a process used more processor time than its start takes."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return False
    return int(fields[11]) / os.sysconf("SC_CLK_TCK") > 0.5


def wait_until(done: Callable[[], bool], *, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def executor(database: Path) -> Iterator[Executor]:
    config = ExecutorConfig(isolation="process", workers=1, timeout_s=20, max_steps=2**31 - 1)
    with Executor(config) as made:
        assert made.execute(database, "SELECT 1") == ONE
        yield made


def test_a_worker_that_ends_while_idle_is_replaced(executor: Executor, database: Path) -> None:
    [worker] = list_workers(os.getpid())
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # ended, and still the parent's to reap
    assert executor.execute(database, "SELECT 1") == ONE


def crash_twice() -> None:
    """End a worker that is busy, and the one that does its work again."""
    killed: set[int] = set()
    while len(killed) < 2:  # with the others, and alone
        for worker in set(filter(has_worked, list_workers(os.getpid()))) - killed:
            os.kill(worker, signal.SIGSEGV)
            killed.add(worker)
        time.sleep(0.02)


def test_a_crash_is_blamed_on_one_query_of_many(executor: Executor, database: Path) -> None:
    queries = [(database, "SELECT 1"), (database, ENDLESS), (database, "SELECT 1 -- again")]
    queries += [(database, f"SELECT {number}") for number in range(60)]
    thread = threading.Thread(target=crash_twice)
    thread.start()
    results = executor.execute_many(queries)
    thread.join()
    assert results[1] == CRASHED
    assert all(isinstance(result, Table) for result in results[:1] + results[2:])
    assert results[0] == ONE


def test_a_crash_while_judging_is_one_wrong_case_of_many(
    executor: Executor, database: Path
) -> None:
    sqls = ["SELECT 1", ENDLESS, *["SELECT 2 - 1"] * 10]  # of which three are asked together
    cases = [Case(sql, "SELECT 1", database) for sql in sqls]
    thread = threading.Thread(target=crash_twice)
    thread.start()
    judged = executor.judge(cases, ["set"])
    thread.join()
    assert [one.scores["set"] for one in judged] == [1, 0, *[1] * 10]
    assert judged[1].predicted == "error"


def test_a_call_that_nothing_interrupts_ends_with_its_worker(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system does that after twice the time-out: here nothing in the worker does before."""
    config = ExecutorConfig(isolation="process", workers=1, timeout_s=1, max_steps=2**31 - 1)
    environment = processes._environment()
    monkeypatch.setattr(processes, "_COMMAND", (sys.executable, "-c", WITHOUT_WATCHDOG))
    monkeypatch.setattr(processes, "_environment", lambda: environment)
    with Executor(config) as executor:
        assert executor.execute(database, "SELECT 1") == ONE
        start_s = time.monotonic()
        assert executor.execute(database, ENDLESS) == TimedOut("wall")
        assert 1.9 < time.monotonic() - start_s < 20
        assert executor.execute(database, "SELECT 1") == ONE


WITHOUT_WATCHDOG = """
from sqlenv.executor import engine, worker
engine._watch = lambda *watched: None
worker.main()
"""


def test_running_out_of_address_space_is_a_value(database: Path) -> None:
    config = ExecutorConfig(
        isolation="process", workers=1, max_bytes=2_000_000_000, max_value_bytes=1_000_000
    )
    with Executor(config) as executor:
        assert executor.execute(database, "SELECT 1") == ONE
        [worker] = list_workers(os.getpid())
        resource.prlimit(worker, resource.RLIMIT_AS, (150_000_000, 150_000_000))
        result = executor.execute(database, "SELECT hex(zeroblob(400000)) FROM number")
        assert result == TooLarge("memory")
        assert executor.execute(database, "SELECT 1") == ONE


def test_no_worker_is_left_after_close(database: Path) -> None:
    with Executor(ExecutorConfig(isolation="process", workers=2)) as executor:
        executor.start()  # both; else one may have answered all before the other is there
        executor.execute_many([(database, f"SELECT {number}") for number in range(100)])
        assert len(list_workers(os.getpid())) == 2
    assert list_workers(os.getpid()) == []


PARENT = """
import sys, threading
from pathlib import Path
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
assert __name__ == "__main__", "imported again by a worker"
limits = ExecutorConfig(isolation="process", workers=2, timeout_s=60, max_steps=2**31 - 1)
executor = Executor(limits)
for sql in sys.argv[2:]:
    threading.Thread(target=executor.execute, args=(Path(sys.argv[1]), sql), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def test_workers_end_with_their_parent_however_it_ends(database: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, script, database, ENDLESS, "SELECT 1"]
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as parent:
        wait_until(lambda: len(list_workers(parent.pid)) == 2)
        time.sleep(0.5)
        workers = list_workers(parent.pid)
        assert len(workers) == 2
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_workers_leave_ctrl_c_to_their_parent(executor: Executor, database: Path) -> None:
    [worker] = list_workers(os.getpid())
    os.kill(worker, signal.SIGINT)
    assert executor.execute(database, "SELECT 1") == ONE
    assert list_workers(os.getpid()) == [worker]
    assert os.getpgid(worker) != os.getpgid(0)


def test_a_worker_imports_no_learner() -> None:
    code = "import sys, sqlenv.executor.worker; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert not {"jax", "numpy", "transformers", "sqlglot", "pydantic"} & set(modules)


def test_a_worker_that_cannot_start_is_not_the_querys_fault(
    database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Also where the project is installed: this package comes before the installed one.
    (tmp_path / "broken" / "sqlenv").mkdir(parents=True)
    (tmp_path / "broken" / "sqlenv" / "__init__.py").write_text("raise ImportError('sqlenv')")
    broken = {"PYTHONPATH": str(tmp_path / "broken")}
    monkeypatch.setattr(processes, "_environment", lambda: broken)
    with (
        Executor(ExecutorConfig(isolation="process", workers=1)) as executor,
        pytest.raises(RuntimeError, match="worker failed"),
    ):
        executor.execute(database, "SELECT 1")
    assert "sqlenv" in capfd.readouterr().err


def test_a_mistake_of_ours_in_a_worker_is_no_answer(
    database: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workers = Processes(ExecutorConfig(workers=1))
    no_text: Any = 5
    with pytest.raises(RuntimeError, match="worker failed"):
        workers.run(Engine.execute, database, no_text)
    assert "TypeError" in capfd.readouterr().err
    assert workers.run(Engine.execute, database, "SELECT 1") == ONE
    workers.close()


def test_an_executor_does_not_survive_a_fork(
    executor: Executor, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in the child
    with pytest.raises(RuntimeError, match="fork"):
        executor.execute(database, "SELECT 1")


def test_a_path_is_relative_to_its_callers_folder(
    executor: Executor, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(database.parent)  # of which the worker hears nothing
    assert executor.execute(Path(database.name), "SELECT 1") == ONE


def test_slow_queries_leave_a_worker_to_the_others(database: Path) -> None:
    config = ExecutorConfig(isolation="process", workers=2, timeout_s=60, max_steps=2**31 - 1)
    with Executor(config) as executor, ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(executor.execute, database, ENDLESS) for _ in range(2)]
        wait_until(lambda: any(map(has_worked, list_workers(os.getpid()))))
        assert [executor.execute(database, "SELECT 1") for _ in range(5)] == [ONE] * 5
        assert not any(one.done() for one in slow)
        while not all(one.done() for one in slow):
            for worker in filter(has_worked, list_workers(os.getpid())):
                os.kill(worker, signal.SIGKILL)
            time.sleep(0.05)
        assert {one.result() for one in slow} == {CRASHED}
