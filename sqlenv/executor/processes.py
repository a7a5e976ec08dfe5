"""Queries in worker processes, so that one which crashes SQLite takes down nothing else.

Workers are programs (`python -m sqlenv.executor.worker`) that read requests from standard input and
answer on standard output, pickled. They are no sandbox: what a worker says is believed.

The standard library's own pool would fail all queries under way where one worker dies, and import
the main module in each of them, with a trainer's all of JAX.
"""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from exchange import UserError
from sqlenv.config import ExecutorConfig
from sqlenv.executor.worker import OUT_OF_MEMORY
from sqlenv.types import Result, SqlError, TimedOut, TooLarge

CRASHED = SqlError("the query crashed SQLite")

_COMMAND = (sys.executable, "-P", "-m", "sqlenv.executor.worker")
_DEATHS = (EOFError, OSError, pickle.UnpicklingError)
# A process that has closed its end takes a moment to leave its status.
_LEAVE_S = 2.0
T = TypeVar("T")


class _Pickler(pickle.Pickler):
    """Writes paths as they are seen from here: a worker stays in the folder where it started."""

    dispatch_table = copyreg.dispatch_table | {
        type(Path()): lambda path: (Path, (os.path.abspath(path),))  # noqa: PTH100
    }


class Worker:
    """One process, which answers one request at a time."""

    def __init__(self, config: ExecutorConfig):
        self.process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is the parent's business
        )
        with contextlib.suppress(OSError):  # it ended, as the first request will show
            self._send(SimpleNamespace(**config.model_dump()))

    def ask(self, request: tuple[object, ...]) -> Any:
        """Send a request and wait for its answer; one of `_DEATHS` where the process ended."""
        self._send(request)
        assert self.process.stdout
        return pickle.load(self.process.stdout)

    def end(self, *, wait_s: float = 0.0) -> int:
        """End the process, if it does not end itself; its exit status, negative for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        self.process.kill()
        with contextlib.suppress(OSError), self.process:
            pass  # closes the pipes and waits
        return self.process.returncode

    def _send(self, value: object) -> None:
        assert self.process.stdin
        _Pickler(self.process.stdin).dump(value)
        self.process.stdin.flush()


class Processes:
    """What `Engine` does, in worker processes: started when first needed, replaced when they die.

    What a worker died of is the answer to the request that it had.
    """

    def __init__(self, config: ExecutorConfig):
        self._config = config
        self._lock = threading.Lock()
        self._busy: dict[int, Worker] = {}  # by the thread that waits for its answer
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(config.workers):
            self._idle.put(None)
        self.close = weakref.finalize(self, _close, self._idle)

    def start(self) -> None:
        """Start the workers that are idle now, rather than when they are first needed."""
        for worker in [self._idle.get_nowait() for _ in range(self._idle.qsize())]:
            self._idle.put(worker or Worker(self._config))

    def run(self, method: Callable[..., T], *arguments: object) -> T | Result:
        """Call a method of a worker's engine."""
        worker = self._hire()
        is_free = False
        try:
            answer = worker.ask((method, *arguments))
            is_free = self.close.alive
        except _DEATHS:
            return _result_of(worker.end(wait_s=_LEAVE_S))
        finally:  # after an exception a late answer must not reach the next caller
            with self._lock:
                del self._busy[threading.get_ident()]
            if not is_free:
                worker.end()
            self._idle.put(worker if is_free else None)
        if isinstance(answer, UserError):
            raise answer
        return answer

    def cancel(self, threads: Iterable[int]) -> None:
        """End the workers that threads wait for."""
        with self._lock:
            for worker in filter(None, map(self._busy.get, threads)):
                worker.process.kill()

    def _hire(self) -> Worker:
        """Wait for a worker that is free."""
        worker = self._idle.get()
        try:
            if not self.close.alive:
                raise RuntimeError("this executor is closed")
            if worker and worker.process.poll() is not None:
                worker.end()  # it ended while it had nothing to do: no query's fault
                worker = None
            worker = worker or Worker(self._config)
            with self._lock:
                self._busy[threading.get_ident()] = worker
        except BaseException:
            self._idle.put(worker)
            raise
        return worker


def _close(idle: queue.LifoQueue[Worker | None]) -> None:
    for worker in [idle.get_nowait() for _ in range(idle.qsize())]:
        if worker:
            worker.end()
        idle.put(None)


def _result_of(status: int) -> Result:
    """Say what the exit status of a worker makes of its request."""
    if status == -signal.SIGALRM:
        return TimedOut("wall")
    if status == OUT_OF_MEMORY:
        return TooLarge("memory")
    if status >= 0:
        raise RuntimeError("a query worker failed; its own words are on standard error")
    return CRASHED


def _environment() -> dict[str, str]:
    """Make a worker import what this process imports, and give freed memory back to the system."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),  # noqa: PTH100
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
