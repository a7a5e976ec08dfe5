"""Queries inside this process: connections kept open, deadlines, the heap limit."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import apsw

from sqlenv.evaluators.comparators import Case, Judgement, Runs, judge_case
from sqlenv.evaluators.votes import VoteBy, ballot
from sqlenv.executor.database import Identity, heap_limit, identify
from sqlenv.executor.guard import Guard, refuse_text
from sqlenv.types import Result, TimedOut, TooLarge

if TYPE_CHECKING:
    from sqlenv.config import ExecutorConfig

# How often an overdue query is interrupted again: one interrupt can fall between two statements.
NAG_S = 0.05

_MOST_IDLE = 64  # idle connections kept open; 0.3 to 2 MB and one file descriptor each
_OUT_OF_HEAP = TooLarge("memory")
# After these, and after a bug of ours, a connection is not used again.
_SPOILING = (TimedOut, TooLarge, type(None))

Location = tuple[Path, str]
"""A database and a query."""
_Running = dict[int, tuple[Guard, float]]
"""Of each thread that runs a query, the connection and when its time is over."""
P = ParamSpec("P")
T = TypeVar("T")


class Engine:
    """Runs queries in the calling threads, of `workers` at a time.

    Running out of heap can be a neighbour's fault, since the limit is the process's. Such a query
    is asked once more, alone and with no idle connection, before anyone is scored on it.
    """

    def __init__(self, config: ExecutorConfig):
        self._config = config
        self._places = threading.Semaphore(config.workers)
        self._entry = threading.Lock()  # whoever waits for places is served before who comes later
        self._lock = threading.Lock()
        self._idle: list[tuple[Identity, Guard]] = []  # the one used last at the end
        self._running: _Running = {}
        self._started = 0
        stop = threading.Event()
        limits = ExitStack()
        limits.enter_context(heap_limit(config.heap_bytes))
        limits.callback(stop.set)
        self._stop = weakref.finalize(self, limits.close)
        watched = (self._lock, self._running, stop, config.timeout_s)
        threading.Thread(target=_watch, args=watched, name="sqlenv-watchdog", daemon=True).start()

    def run(self, method: Callable[..., T], *arguments: object) -> T:
        """Call a method of an engine here; `Processes.run` does so in another process."""
        if not self._stop.alive:
            raise RuntimeError("this executor is closed")
        return method(self, *arguments)

    def execute(self, database: Path, sql: str, max_steps: int | None = None) -> Result:
        """Run one query of any text."""
        if refused := refuse_text(sql, max_sql_chars=self._config.max_sql_chars):
            return refused
        max_steps = max_steps or self._config.max_steps
        with self._room(1):
            result, was_alone = self._attempt(database, sql, max_steps)
        if result != _OUT_OF_HEAP or was_alone:
            return result
        with self._room(self._config.workers):
            self._close_idle(keep=0)
            return self._attempt(database, sql, max_steps)[0]

    def execute_many(self, queries: Sequence[Location]) -> list[Result]:
        """Run queries one after another."""
        return [self.execute(*query) for query in queries]

    def votes(self, queries: Sequence[Location], by: VoteBy) -> list[str | None]:
        """Give the votes of queries, of which no rows are kept."""
        return [ballot(self.execute(*query), by) for query in queries]

    def judge(self, cases: Sequence[Case], names: Sequence[str]) -> list[Judgement]:
        """Ask comparators about cases."""
        runs = Runs(self.execute, stopwatch=self._seconds)
        return [judge_case(case, names, runs) for case in cases]

    def cancel(self, threads: Iterable[int]) -> None:
        """Interrupt what threads are running."""
        with self._lock:
            for guard, _ in filter(None, map(self._running.get, threads)):
                guard.interrupt()

    def close(self) -> None:
        """Close the idle connections and end the watchdog."""
        self._stop()
        self._close_idle(keep=0)

    def _seconds(self, database: Path, sql: str) -> float:
        """Measure a query on a connection of its own, which is opened and closed meanwhile."""
        self._close_idle(keep=0)
        start_s = time.perf_counter()
        self.execute(database, sql)
        self._close_idle(keep=0)
        return time.perf_counter() - start_s

    @contextmanager
    def _room(self, places: int) -> Generator[None]:
        with self._entry:
            for _ in range(places):
                self._places.acquire()
        try:
            yield
        finally:
            self._places.release(places)

    def _attempt(self, database: Path, sql: str, max_steps: int) -> tuple[Result, bool]:
        """Run once; also say whether nothing else held memory meanwhile."""
        identity = identify(database)
        deadline_s = time.monotonic() + self._config.timeout_s
        thread = threading.get_ident()
        guard, result = None, None
        with self._lock:
            self._started += 1
            start, was_alone = self._started, not self._running
        try:
            guard = self._take(identity) or Guard(database, self._config)
            with self._lock:
                self._running[thread] = guard, deadline_s
            result = guard.run(sql, max_steps)
        except (apsw.NoMemError, MemoryError):  # while the connection was opened
            result = _OUT_OF_HEAP
        finally:
            with self._lock:
                self._running.pop(thread, None)
                was_alone &= self._started == start and not self._idle
            if guard and isinstance(result, _SPOILING):
                guard.close()
            elif guard:
                self._keep(identity, guard)
        return result, was_alone

    def _take(self, identity: Identity) -> Guard | None:
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] == identity:
                    return self._idle.pop(place)[1]
        return None

    def _keep(self, identity: Identity, guard: Guard) -> None:
        with self._lock:
            self._idle.append((identity, guard))
        self._close_idle(keep=_MOST_IDLE if self._stop.alive else 0)

    def _close_idle(self, *, keep: int) -> None:
        with self._lock:
            while len(self._idle) > keep:
                self._idle.pop(0)[1].close()


def _watch(
    lock: threading.Lock, running: _Running, stop: threading.Event, timeout_s: float
) -> None:
    """Interrupt the queries that are overdue, until told to stop."""
    # Nobody wakes this thread: all queries have the same time-out, so one that starts while it
    # sleeps is not due before it wakes. The lock keeps an interrupt from the connection's next one.
    sleep_s = timeout_s
    while not stop.wait(sleep_s):
        now_s = time.monotonic()
        sleep_s = timeout_s
        with lock:
            for guard, deadline_s in running.values():
                if deadline_s <= now_s:
                    guard.interrupt()
                sleep_s = min(sleep_s, max(deadline_s - now_s, NAG_S))
