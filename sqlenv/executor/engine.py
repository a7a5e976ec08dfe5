"""Queries inside this process: connections kept open, deadlines, the heap limit."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import apsw

from sqlenv.evaluators.comparators import Case, CaseVerdict, QueryRuns, judge_case
from sqlenv.evaluators.votes import VoteBy, ballot
from sqlenv.executor.database import Identity, heap_limit, identify, is_heap_crowded
from sqlenv.executor.guard import Guard, refuse_text
from sqlenv.types import Result, TimedOut, TooLarge

if TYPE_CHECKING:
    from sqlenv.config import ExecutorConfig

# How often an overdue query is interrupted again: one interrupt can fall between two statements.
NAG_S = 0.05

# Idle connections that a process keeps open; 0.3 to 2 MB and one file descriptor each.
_MOST_IDLE = 64
_OUT_OF_HEAP = TooLarge("memory")
# After these, and after a bug of ours, a connection is not used again.
_SPOILING = (TimedOut, TooLarge, type(None))

DatabaseQuery = tuple[Path, str]
"""A database and a query."""
_Running = dict[int, tuple[Guard, float]]
"""Of each thread that runs a query, the connection and when its time is over."""
T = TypeVar("T")


class _Process:
    """What the engines of a process share, since SQLite's heap is the process's.

    Attributes:
        engines: All that are there.
        idle: Connections that nobody uses, each with its engine's number and what is open; the one
            used last at the end.
    """

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.idle: list[tuple[int, Identity, Guard]] = []
        # An engine that nobody needs any more is closed wherever a thread happens to be.
        self.lock = threading.RLock()
        self._turn = threading.Lock()

    def take(self, engine: int, identity: Identity) -> Guard | None:
        """Take an idle connection of an engine, if there is one to this database."""
        with self.lock:
            for one in reversed(self.idle.copy()):
                if one[:2] == (engine, identity):
                    self.idle.remove(one)
                    return one[2]
        return None

    def keep(self, engine: int, identity: Identity, guard: Guard) -> None:
        """Keep a connection; where there are too many the oldest go, whosever they are."""
        with self.lock:
            self.idle.append((engine, identity, guard))
            while self.idle and (len(self.idle) > _MOST_IDLE or is_heap_crowded()):
                self.idle.pop(0)[2].close()

    def close_idle(self, *engines: int) -> None:
        """Close the idle connections of engines."""
        with self.lock:
            for one in [one for one in self.idle if one[0] in engines]:
                self.idle.remove(one)
                one[2].close()

    @contextmanager
    def alone(self) -> Generator[None]:
        """Wait until no engine runs a query, and let none begin; with no idle connection."""
        with self._turn, ExitStack() as rooms:
            with self.lock:
                engines = list(self.engines)
            for engine in engines:
                rooms.enter_context(engine.room(engine.places))
            self.close_idle(*(engine.number for engine in engines))
            yield


_process = _Process()
_numbers = count()  # of engines
os.register_at_fork(after_in_child=lambda: _process.__init__())  # another's locks and connections


class Engine:
    """Runs queries in the calling threads, of `workers` at a time.

    Running out of heap can be a neighbour's fault, since the limit is the process's. Such a query
    is asked once more, alone in the process, before anyone is scored on it.
    """

    def __init__(self, config: ExecutorConfig):
        self._config = config
        self.number = next(_numbers)
        self.places = config.workers
        self._free = threading.Semaphore(self.places)
        self._entry = threading.Lock()  # whoever waits for places is served before who comes later
        self._lock = threading.Lock()
        self._running: _Running = {}
        stop = threading.Event()
        limits = ExitStack()
        limits.enter_context(heap_limit(config.heap_bytes))
        limits.callback(_process.close_idle, self.number)
        limits.callback(stop.set)
        self._stop = weakref.finalize(self, limits.close)
        watched = (self._lock, self._running, stop, config.timeout_s)
        threading.Thread(target=_watch, args=watched, name="sqlenv-watchdog", daemon=True).start()
        with _process.lock:
            _process.engines.add(self)

    def run(self, method: Callable[..., T], *arguments: object) -> T:
        """Call a method of an engine here; `Processes.run` does so in another process."""
        if not self._stop.alive:
            raise RuntimeError("this executor is closed")
        return method(self, *arguments)

    def execute(self, database: Path, sql: str, max_steps: int | None = None) -> Result:
        """Run one query of any text."""
        if refused := refuse_text(sql):
            return refused
        max_steps = max_steps or self._config.max_steps
        with self.room(1):
            result = self._attempt(database, sql, max_steps)
        if result != _OUT_OF_HEAP:
            return result
        with _process.alone():
            return self._attempt(database, sql, max_steps)

    def execute_many(self, queries: Sequence[DatabaseQuery]) -> list[Result]:
        """Run queries one after another."""
        return [self.execute(*query) for query in queries]

    def votes(self, queries: Sequence[DatabaseQuery], by: VoteBy) -> list[str | None]:
        """Give the votes of queries, of which no rows are kept."""
        return [ballot(self.execute(*query), by) for query in queries]

    def judge(self, cases: Sequence[Case], names: Sequence[str]) -> list[CaseVerdict]:
        """Ask comparators about cases."""
        runs = QueryRuns(self.execute)
        return [judge_case(case, names, runs) for case in cases]

    def cancel(self, threads: Iterable[int]) -> None:
        """Interrupt what threads are running."""
        with self._lock:
            for guard, _ in filter(None, map(self._running.get, threads)):
                guard.interrupt()

    def close(self) -> None:
        """Close the idle connections and end the watchdog."""
        self._stop()

    @contextmanager
    def room(self, places: int) -> Generator[None]:
        """Wait until so many more queries may run."""
        with self._entry:
            for _ in range(places):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(places)

    def _attempt(self, database: Path, sql: str, max_steps: int) -> Result:
        identity = identify(database)
        deadline_s = time.monotonic() + self._config.timeout_s
        thread = threading.get_ident()
        guard, result = None, None
        try:
            guard = _process.take(self.number, identity) or Guard(database, self._config)
            with self._lock:
                self._running[thread] = guard, deadline_s
            result = guard.run(sql, max_steps)
        except (apsw.NoMemError, MemoryError):  # while the connection was opened
            result = _OUT_OF_HEAP
        finally:
            with self._lock:
                self._running.pop(thread, None)
            if guard and (isinstance(result, _SPOILING) or not self._stop.alive):
                guard.close()
            elif guard:
                _process.keep(self.number, identity, guard)
        return result


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
