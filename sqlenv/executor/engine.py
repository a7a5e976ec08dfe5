"""Queries inside this process: connections kept open, deadlines, the heap limit."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import apsw

from sqlenv.errors import UserError
from sqlenv.evaluators.comparators import Case, Judgement, Runs, judge
from sqlenv.evaluators.votes import Ballot, VoteBy, ballot
from sqlenv.executor.database import Identity, heap_limit, identify
from sqlenv.executor.guard import Guard, refuse_text
from sqlenv.types import Result, TimedOut, TooLarge

if TYPE_CHECKING:
    from sqlenv.config import ExecutorConfig

# How often an overdue query is interrupted again: one interrupt can fall between two statements.
_NAG_S = 0.05

_MOST_IDLE = 64  # idle connections kept open; 0.3 to 2 MB and one file descriptor each
_OUT_OF_HEAP = TooLarge("memory")
# After these, and after a bug of ours, a connection is not used again.
_SPOILING = (TimedOut, TooLarge, type(None))


@dataclass(frozen=True, slots=True)
class Execution:
    """A query to run; its budget of steps where it is not the settings'.

    Its answer is the result, or with `vote_by` the vote of that, and the rows stay where it ran.
    """

    database: Path
    sql: str
    max_steps: int | None = None
    vote_by: VoteBy | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A case, and the comparators to ask about it."""

    case: Case
    names: tuple[str, ...]

    @property
    def database(self) -> Path:
        """Return the question's own database."""
        return self.case.database


Question = Execution | Trial
Answer = Result | Judgement | Ballot | UserError
"""What becomes of a question; `UserError` where its database cannot be used."""


class Engine:
    """Runs queries in the calling thread; any number of threads may call.

    Running out of heap can be a neighbour's fault, since the limit is the process's. Such a query
    is asked once more, alone and with no idle connection, before anyone is scored on it.
    """

    def __init__(self, config: ExecutorConfig):
        self._config = config
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle: OrderedDict[Identity, list[Guard]] = OrderedDict()
        self._idle_count = 0
        self._running: dict[Guard, float] = {}
        self._active = 0
        self._is_alone = False
        stop = threading.Event()
        limits = ExitStack()
        limits.enter_context(heap_limit(config.heap_bytes))
        limits.callback(stop.set)
        self._stop = weakref.finalize(self, limits.close)
        threading.Thread(
            target=_watch,
            args=(self._lock, self._running, stop, config.timeout_s),
            name="sqlenv-watchdog",
            daemon=True,
        ).start()

    def execute(self, database: Path, sql: str, max_steps: int | None = None) -> Result:
        """Run one query whose text passed `guard.refuse_text`."""
        max_steps = max_steps or self._config.max_steps
        result, was_alone = self._attempt(database, sql, max_steps)
        if was_alone or result != _OUT_OF_HEAP:
            return result
        with self._lock:
            self._changed.wait_for(lambda: not self._is_alone)
            self._is_alone = True
            self._changed.wait_for(lambda: not self._active)
        self._close_idle()
        try:
            return self._attempt(database, sql, max_steps, alone=True)[0]
        finally:
            with self._lock:
                self._is_alone = False
                self._changed.notify_all()

    def answer(self, question: Question, runs: Runs) -> Answer:
        """Answer a question; cases are judged by `runs`, which runs queries here."""
        if isinstance(question, Trial):
            return judge(question.case, question.names, runs)
        result = self.execute(question.database, question.sql, question.max_steps)
        return Ballot(ballot(result, question.vote_by)) if question.vote_by else result

    def ask(self, database: Path, sql: str) -> Result:
        """Run one query of any text."""
        refused = refuse_text(sql, max_sql_chars=self._config.max_sql_chars)
        return refused or self.execute(database, sql)

    def seconds(self, database: Path, sql: str) -> float:
        """Measure a query on a connection of its own, which is opened and closed meanwhile."""
        self._close_idle()
        start_s = time.perf_counter()
        self.ask(database, sql)
        self._close_idle()
        return time.perf_counter() - start_s

    def close(self) -> None:
        """Close the idle connections and end the watchdog."""
        self._stop()
        self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            self._evict(keep=0)

    def _attempt(
        self, database: Path, sql: str, max_steps: int, *, alone: bool = False
    ) -> tuple[Result, bool]:
        """Run once; also say whether nothing else held memory meanwhile."""
        identity = identify(database)
        with self._lock:
            while self._is_alone and not alone:
                self._changed.wait()
            self._active += 1
            idle = self._idle.get(identity)
            guard = idle.pop() if idle else None
            self._idle_count -= guard is not None
        deadline = time.monotonic() + self._config.timeout_s
        result: Result | None = None
        try:
            guard = guard or Guard(database, self._config)
            with self._lock:
                self._running[guard] = deadline
            result = guard.run(sql, max_steps)
        except (apsw.NoMemError, MemoryError):  # while the connection was opened
            result = _OUT_OF_HEAP
        finally:
            with self._lock:
                self._active -= 1
                if self._is_alone:
                    self._changed.notify_all()
                if guard:
                    self._return(identity, guard, reuse=not isinstance(result, _SPOILING))
                was_alone = not (self._active or self._idle_count)
        return result, was_alone

    def _return(self, identity: Identity, guard: Guard, *, reuse: bool) -> None:
        self._running.pop(guard, None)
        if not reuse:
            guard.close()
            return
        self._idle.setdefault(identity, []).append(guard)
        self._idle.move_to_end(identity)
        self._idle_count += 1
        self._evict(keep=_MOST_IDLE)

    def _evict(self, *, keep: int) -> None:
        while self._idle_count > keep:
            identity, guards = next(iter(self._idle.items()))
            if guards:
                guards.pop(0).close()
                self._idle_count -= 1
            if not guards:
                del self._idle[identity]


def _watch(
    lock: threading.Lock, running: dict[Guard, float], stop: threading.Event, timeout_s: float
) -> None:
    """Interrupt the queries that are overdue, until told to stop."""
    # Nobody wakes this thread: all queries have the same time-out, so one that starts while it
    # sleeps is not due before it wakes. The lock keeps an interrupt from the connection's next one.
    sleep_s = timeout_s
    while not stop.wait(sleep_s):
        now = time.monotonic()
        sleep_s = timeout_s
        with lock:
            for guard, deadline in running.items():
                if deadline <= now:
                    guard.connection.interrupt()
                sleep_s = min(sleep_s, max(deadline - now, _NAG_S))
