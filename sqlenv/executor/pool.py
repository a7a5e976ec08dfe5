"""Worker processes that answer queries, and what happens when one dies.

Workers are started as programs (`python -m sqlenv.executor.worker`), never forked: the parent runs
JAX's threads. A worker has a socket for questions and answers, and standard input, which closes
when the parent ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from sqlenv.config import ExecutorConfig
from sqlenv.errors import UserError
from sqlenv.executor.channel import Answer, Channel, decode
from sqlenv.executor.worker import OUT_OF_MEMORY, USER_ERROR, Question
from sqlenv.types import Result, SqlError, TimedOut, TooLarge

CRASHED = SqlError("the query crashed SQLite")

_COMMAND = (sys.executable, "-P", "-m", "sqlenv.executor.worker")
_START_S = 60.0
# On top of twice the time-out: answers wait that long in a worker, and a message takes a moment.
_GRACE_S = 0.1
# Of a message that are not rows.
_OTHER_BYTES = 10_000_000
# How often a thread that waits for a worker looks whether its job still needs one.
_LOOK_S = 0.05
# Questions in one message: enough to hide its cost, few enough to keep all workers busy to the end.
_MESSAGE_QUESTIONS = 16
# Messages to choose the next one from.
_NEXT_MESSAGES = 64
# Of a worker that died, hangs, or sends what are no answers.
_FAILURES = (EOFError, OSError, ValueError, TypeError, LookupError)


class Worker:
    """One process, which answers one message of questions at a time."""

    def __init__(self, config: ExecutorConfig):
        self._silence_s = 2 * config.timeout_s + _GRACE_S
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_START_S)
        # The memory of rows is more than their text.
        most_bytes = _MESSAGE_QUESTIONS * config.max_bytes + _OTHER_BYTES
        self._channel = Channel(self._socket, most_bytes=most_bytes)
        with theirs:
            self.process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno()), config.model_dump_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the parent's business
            )
        self._is_ready = False
        self.database: object = None
        """Of the questions that came last: its connection is open."""

    def ask(self, questions: Sequence[Question]) -> None:
        """Send questions; before the first ones the process has to have started."""
        if not self._is_ready:
            self._channel.receive()
            self._is_ready = True
            # Each of its answers comes within this; a message in parts, each part.
            self._socket.settimeout(self._silence_s)
        self._channel.send(questions)

    def receive(self) -> list[Answer | UserError]:
        """Wait for some of the answers; raises one of `_FAILURES` where none come."""
        return [
            UserError(encoded[1]) if encoded[0] == USER_ERROR else decode(encoded)
            for encoded in self._channel.receive()
        ]

    def failure_result(self, *, overdue: bool) -> Result:
        """End a worker that failed at its only question, and say what that makes of it."""
        status = self.kill()
        if not self._is_ready or (status > 0 and status != OUT_OF_MEMORY):
            raise RuntimeError("a query worker failed; its own words are on standard error")
        if status == OUT_OF_MEMORY:
            return TooLarge("memory")
        return TimedOut("wall") if overdue else CRASHED

    def kill(self) -> int:
        """End the process at once; give its exit status, negative for a signal."""
        self._channel.close()
        with self.process as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0)
            process.kill()
        return process.returncode


class WorkerPool:
    """Worker processes, started when first needed and replaced when they die. Thread-safe."""

    def __init__(self, config: ExecutorConfig):
        self._config = config
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(config.workers):
            self._idle.put(None)
        self.close = weakref.finalize(self, _close, self._idle)

    def start(self) -> None:
        """Start the workers that are idle now, rather than when they are first needed."""
        idle = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        for worker in idle:
            self._idle.put(worker or Worker(self._config))

    def run(self, questions: Sequence[Question]) -> list[Answer]:
        """Answer questions in order, with as many workers as are free: a thread waits for each."""
        job = _Job(questions, self._config.workers)
        count = min(len(job.waiting), self._config.workers)
        if count <= 1:
            self._serve(job)
            return job.results()
        with ThreadPoolExecutor(count, thread_name_prefix="sqlenv") as threads:
            try:
                for served in [threads.submit(self._serve, job) for _ in range(count)]:
                    served.result()
            except BaseException:
                job.give_up()
                raise
        return job.results()

    def _serve(self, job: _Job) -> None:
        """Ask the questions of a job as long as some wait."""
        while job.waiting:
            try:
                worker = self._hire()
            except queue.Empty:
                continue
            reuse = False
            try:
                reuse = job.ask(worker)
            finally:  # after an exception late answers must not reach the next caller
                if not reuse:
                    worker.kill()
                self._idle.put(worker if reuse else None)

    def _hire(self) -> Worker:
        if not self.close.alive:
            raise RuntimeError("this executor is closed")
        worker = self._idle.get(timeout=_LOOK_S)
        try:
            if worker and worker.process.poll() is not None:
                worker.kill()  # it ended while it had nothing to do: no query's fault
                worker = None
            return worker or Worker(self._config)
        except BaseException:
            self._idle.put(None)
            raise


class _Job:
    """Questions of one caller, which several threads ask.

    A worker that dies with one question is that question's result; of several it does not say whose
    fault it is: they are asked again one by one.
    """

    def __init__(self, questions: Sequence[Question], workers: int):
        self._questions = questions
        self._answers: dict[int, Answer | UserError] = {}
        self._lock = threading.Lock()
        self._busy: list[Worker] = []
        # One database's together, so that its connection is reused.
        order = sorted(range(len(questions)), key=lambda number: questions[number][0])
        length = min(-(-len(order) // (4 * workers)), _MESSAGE_QUESTIONS) or 1
        self.waiting = deque(order[at : at + length] for at in range(0, len(order), length))

    def ask(self, worker: Worker) -> bool:
        """Ask a worker some questions; say whether it can be asked more."""
        asked = self._choose(worker)
        try:
            if asked:
                worker.ask([self._questions[number] for number in asked])
            while asked:
                for answer in worker.receive():
                    self._answers[asked.popleft()] = answer
        except _FAILURES as error:
            if len(asked) == 1:
                overdue = isinstance(error, TimeoutError)
                self._answers[asked[0]] = worker.failure_result(overdue=overdue)
            else:
                with self._lock:  # others look through those that wait
                    self.waiting.extend([number] for number in asked)
            return False
        finally:
            with self._lock:
                self._busy.remove(worker)
        return True

    def _choose(self, worker: Worker) -> deque[int]:
        """Take a message off those that wait, if possible of a database that only this worker has.

        Empty where another thread took the last.
        """
        with self._lock:
            elsewhere = {other.database for other in self._busy}
            self._busy.append(worker)

            def fit(message: list[int]) -> tuple[bool, bool]:
                database = self._questions[message[0]][0]
                return database == worker.database, database not in elsewhere

            chosen = max(islice(self.waiting, _NEXT_MESSAGES), key=fit, default=[])
            if chosen:
                self.waiting.remove(chosen)
                worker.database = self._questions[chosen[0]][0]
            return deque(chosen)

    def give_up(self) -> None:
        """Let no thread wait for an answer, nor ask again what a worker ended here was asked."""
        with self._lock:
            self.waiting = deque(maxlen=0)
            for worker in self._busy:
                worker.process.kill()

    def results(self) -> list[Answer]:
        """Give the answers in the questions' order."""
        answers = []
        for _, answer in sorted(self._answers.items()):
            if isinstance(answer, UserError):
                raise answer
            answers.append(answer)
        return answers


def _close(idle: queue.LifoQueue[Worker | None]) -> None:
    while not idle.empty():
        worker = idle.get()
        if worker:
            worker.kill()


def _environment() -> dict[str, str]:
    """Make a worker import what this process imports, and give freed memory back to the system."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),  # noqa: PTH100
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
