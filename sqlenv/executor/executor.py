"""Run queries that nobody has vetted, and get values back.

`Executor.execute` waits for its turn, takes an idle connection to the database or opens one, and
runs the query there (`Connection.run`), in the calling thread.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar

import apsw

from minirl.exchange.memory import trim
from sqlenv.cache import DiskCache
from sqlenv.config import ExecutorConfig
from sqlenv.executor.connection import Connection
from sqlenv.executor.database import DatabaseQuery, Identity, heap_limit, identify
from sqlenv.executor.gold import GoldCache
from sqlenv.types import Result, RunQuery, TooLarge

# How often overdue queries are looked for, and interrupted again: one interrupt can fall between
# two statements.
_NAG_S = 0.05
# Idle connections that are kept open; 0.3 to 2 MB and one file descriptor each.
_MOST_IDLE = 64
# What a thread of `map` takes together: enough to hide the cost of that, few enough to keep all
# threads busy to the end.
_MOST_TOGETHER = 16
_OUT_OF_HEAP = TooLarge("memory")
# How long all queries may run after one that ran alone, relative to its time, and at most.
_SHARED, _SHARED_S = 4, 0.5

A = TypeVar("A")
T = TypeVar("T")


class Executor(AbstractContextManager["Executor"]):
    """Executes SQL on SQLite files, read-only and bounded. Threads may share one; forks may not.

    `workers` queries run at a time. Running out of heap can be a neighbour's fault, since SQLite's
    heap is the process's: such a query runs once more, alone in this executor, before anyone is
    scored on it; between two of these everyone runs for four times as long, at most half a second.
    Gold results outlive it where it is given a cache on disk.
    """

    def __init__(self, config: ExecutorConfig, disk: DiskCache | None = None):
        self.config = config
        self._process = os.getpid()
        self._gold = GoldCache(config, disk)
        self._free = threading.Semaphore(config.threads)
        self._alone, self._shared_until_s = threading.Lock(), 0.0
        self._askers: set[int] = set()  # threads that asked since a query ran alone
        self._lock = threading.Lock()
        self._running: dict[int, Connection] = {}  # by the thread that runs a query
        # The connection that was used last at the end.
        self._idle: list[tuple[Identity, Connection]] = []
        stop = threading.Event()
        ends = ExitStack()
        ends.enter_context(heap_limit(config.heap_bytes))
        ends.callback(_close_all, self._idle)
        ends.callback(stop.set)
        self._end = weakref.finalize(self, ends.close)
        watched = (self._lock, self._running, stop)
        threading.Thread(target=_watch, args=watched, name="sqlenv-watchdog", daemon=True).start()

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def execute(self, database: Path, sql: str, *, max_steps: int | None = None) -> Result:
        """Run one query of any text; `max_steps` is a budget in place of the settings'.

        Returns the table, or why there is none.

        Raises:
            UserError: The database cannot be used; see `check_database`.
        """
        asked = (self._check_use(database), sql, max_steps or self.config.max_steps)
        self._askers.add(threading.get_ident())
        with self._free:
            result = self._attempt(*asked)
        if result != _OUT_OF_HEAP:
            return result
        with self._alone:
            if self._askers != {threading.get_ident()}:
                time.sleep(max(0.0, self._shared_until_s - time.monotonic()))
            with ExitStack() as others:
                for _ in range(self.config.threads):
                    others.enter_context(self._free)
                start_s = time.monotonic()
                _close_all(self._idle)
                trim()  # what threads have freed, a gigabyte for 32 of them
                result = self._attempt(*asked)
            self._askers.clear()
            end_s = time.monotonic()
            self._shared_until_s = end_s + min(_SHARED * (end_s - start_s), _SHARED_S)
            return result

    def execute_many(self, queries: Sequence[DatabaseQuery]) -> list[Result]:
        """Run queries on all workers, each distinct one once; results come in their order."""
        return self._run_many(self.execute, queries)

    def map(self, function: Callable[[A], T], items: Sequence[A]) -> list[T]:
        """Call a function that runs queries here, on all workers; an exception ends all of them."""
        if len(items) <= 1:
            return [function(item) for item in items]
        workers = self.config.threads
        length = min(-(-len(items) // (4 * workers)), _MOST_TOGETHER)
        parts = [items[at : at + length] for at in range(0, len(items), length)]
        threads: set[int] = set()
        is_over = threading.Event()

        def work(part: Sequence[A]) -> list[T]:
            threads.add(threading.get_ident())
            return [function(item) for item in part if not is_over.is_set()]

        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(work, part) for part in parts]
            try:
                return [answer for future in futures for answer in future.result()]
            except BaseException:
                is_over.set()
                pool.shutdown(wait=False, cancel_futures=True)
                while not all(future.done() for future in futures):
                    with self._lock:
                        for connection in filter(None, map(self._running.get, threads)):
                            connection.interrupt()
                    time.sleep(_NAG_S)
                raise

    def gold(self, database: Path, sql: str) -> Result:
        """Give a gold query's result, computed once for this database, query and set of limits.

        Results that depend on a clock that runs or on chance are not kept, and limits of wall time
        and memory for five minutes.
        """
        return self._gold.get(self._check_use(database), sql, self.execute)

    def gold_many(self, queries: Sequence[DatabaseQuery]) -> list[Result]:
        """Give gold results in order, on all workers."""
        return self._run_many(self.gold, queries)

    def _run_many(self, run: RunQuery, queries: Sequence[DatabaseQuery]) -> list[Result]:
        distinct = list(dict.fromkeys(queries))
        results = self.map(lambda query: run(*query), distinct)
        found = dict(zip(distinct, results, strict=True))
        return [found[query] for query in queries]

    def close(self) -> None:
        """Close the idle connections and end the watchdog."""
        self._end()

    def _check_use(self, database: Path) -> Identity:
        if os.getpid() != self._process:
            raise RuntimeError("an Executor does not survive a fork: make one in the new process")
        if not self._end.alive:
            raise RuntimeError("this executor is closed")
        return identify(database)

    def _attempt(self, key: Identity, sql: str, max_steps: int) -> Result:
        connection, result = None, None
        try:
            connection = self._take(key)
            connection.deadline_s = time.monotonic() + self.config.timeout_s
            with self._lock:
                self._running[threading.get_ident()] = connection
            result = connection.run(sql, max_steps)
        except (apsw.NoMemError, MemoryError):  # while the connection was opened
            result = _OUT_OF_HEAP
        finally:
            with self._lock:
                self._running.pop(threading.get_ident(), None)
            # One that ran out of heap gives back what it has; after a bug of ours none is trusted.
            if connection and result not in (None, _OUT_OF_HEAP) and self._end.alive:
                self._keep(key, connection)
            elif connection:
                connection.close()
        return result

    def _take(self, key: Identity) -> Connection:
        with self._lock:
            for one in reversed(self._idle):
                if one[0] == key:
                    self._idle.remove(one)
                    return one[1]
        return Connection(Path(key[0]), self.config)

    def _keep(self, key: Identity, connection: Connection) -> None:
        """Keep a connection; where there are too many, or the heap is half full, the oldest go."""
        with self._lock:
            self._idle.append((key, connection))
            while self._idle and (
                len(self._idle) > _MOST_IDLE or 2 * apsw.memory_used() > self.config.heap_bytes
            ):
                self._idle.pop(0)[1].close()


def _close_all(idle: list[tuple[Identity, Connection]]) -> None:
    while idle:
        idle.pop()[1].close()


def _watch(lock: threading.Lock, running: dict[int, Connection], stop: threading.Event) -> None:
    """Interrupt the queries that are overdue, until told to stop."""
    while not stop.wait(_NAG_S):
        with lock:  # which keeps an interrupt from the connection's next query
            for connection in running.values():
                if connection.deadline_s <= time.monotonic():
                    connection.interrupt()
