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
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

from sqlenv.config import ExecutorConfig
from sqlenv.errors import UserError
from sqlenv.executor.channel import ANSWERS, Channel
from sqlenv.executor.engine import Answer, Execution, Question
from sqlenv.executor.worker import OUT_OF_MEMORY
from sqlenv.types import Result, SqlError, TimedOut, TooLarge

CRASHED = SqlError("the query crashed SQLite")

_COMMAND = (sys.executable, "-P", "-m", "sqlenv.executor.worker")
_START_S = 60.0
# On top of twice the time-out: answers wait that long in a worker, and a message takes a moment.
_GRACE_S = 0.1
# An interpreter that has closed its end takes a moment to leave its status.
_LEAVE_S = 2.0
# Of a message that are not rows.
_OTHER_BYTES = 10_000_000
# How often a thread that waits for a worker looks whether its job still needs one.
_LOOK_S = 0.05
# Questions in one message: enough to hide its cost, few enough to keep all workers busy to the end.
_MESSAGE_QUESTIONS = 16
# What a query may take before it counts as slow: some 20 to 50 ms.
_QUICK_STEPS = 5_000_000
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

    def ask(self, questions: Sequence[Question]) -> None:
        """Send questions; before the first ones the process has to have started."""
        if not self._is_ready:
            self._channel.receive()
            self._is_ready = True
            # Each of its answers comes within this; a message in parts, each part.
            self._socket.settimeout(self._silence_s)
        self._channel.send(questions)

    def receive(self) -> list[Answer]:
        """Wait for some of the answers; raises one of `_FAILURES` where none come."""
        answers = self._channel.receive()
        if not all(isinstance(answer, ANSWERS) for answer in answers):
            raise TypeError("no answers")
        return answers

    def failure_result(self, error: Exception) -> Result:
        """End a worker that failed at its only question, and say what that makes of it."""
        has_left = isinstance(error, EOFError | ConnectionError)
        status = self.kill(wait_s=_LEAVE_S if has_left else 0.0)
        if not self._is_ready or (status > 0 and status != OUT_OF_MEMORY):
            raise RuntimeError("a query worker failed; its own words are on standard error")
        if status == OUT_OF_MEMORY:
            return TooLarge("memory")
        return TimedOut("wall") if isinstance(error, TimeoutError) else CRASHED

    def kill(self, *, wait_s: float = 0.0) -> int:
        """End the process, if it does not end itself; its exit status, negative for a signal."""
        self._channel.close()
        with self.process as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
            process.kill()
        return process.returncode


class WorkerPool:
    """Worker processes, started when first needed and replaced when they die. Thread-safe.

    All single queries have few steps at first, and those that need more run again: of slow ones
    there is one less at a time than there are workers.
    """

    def __init__(self, config: ExecutorConfig):
        self._config = config
        self._slow = threading.Semaphore(config.workers - 1) if config.workers > 1 else None
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
        if self._slow and len(questions) == 1 and isinstance(query := questions[0], Execution):
            steps = query.max_steps or self._config.max_steps
            if steps > _QUICK_STEPS and not query.vote_by:
                answers = self._run([replace(query, max_steps=_QUICK_STEPS)])
                if answers != [TimedOut("steps")]:
                    return answers
                with self._slow:
                    return self._run(questions)
        return self._run(questions)

    def _run(self, questions: Sequence[Question]) -> list[Answer]:
        workers = self._config.workers
        # One database's together, so that its connection is reused.
        order = sorted(range(len(questions)), key=lambda number: str(questions[number].database))
        length = min(-(-len(order) // (4 * workers)), _MESSAGE_QUESTIONS) or 1
        messages = [order[at : at + length] for at in range(0, len(order), length)]
        # Each thread has messages of its own first: few databases are opened by two workers.
        share = -(-len(messages) // workers) or 1
        shares = [iter(messages[at : at + share]) for at in range(0, len(messages), share)]
        answers: dict[int, Answer] = {}
        job = _Job()

        def serve(number: int) -> None:
            for message in chain(*shares[number:], *shares[:number]):
                asked = [questions[number] for number in message]
                answers.update(zip(message, self._ask(asked, job), strict=True))

        if len(shares) <= 1:
            serve(0)
        else:
            with ThreadPoolExecutor(len(shares)) as threads:
                try:
                    for serving in [threads.submit(serve, each) for each in range(len(shares))]:
                        serving.result()
                except BaseException:
                    job.give_up()
                    raise
        for _, answer in sorted(answers.items()):
            if isinstance(answer, UserError):
                raise answer
        return [answers[number] for number in range(len(questions))]

    def _ask(self, questions: Sequence[Question], job: _Job) -> list[Answer]:
        """Ask a worker questions, together.

        A worker that dies with one question is that question's answer; of several it does not say
        whose fault it is: they are asked again one by one.
        """
        answers: list[Answer] = []
        worker = self._hire(job)
        reuse = False
        try:
            worker.ask(questions)
            while len(answers) < len(questions):
                answers += worker.receive()
            reuse = len(answers) == len(questions)
        except _FAILURES as error:
            if len(questions) == len(answers) + 1:
                answers.append(worker.failure_result(error))
        finally:  # after an exception late answers must not reach the next caller
            job.busy.discard(worker)
            if not reuse:
                worker.kill()
            self._idle.put(worker if reuse else None)
        for question in questions[len(answers) :]:
            answers += self._ask([question], job)
        return answers[: len(questions)]

    def _hire(self, job: _Job) -> Worker:
        """Wait for a worker that is free."""
        while self.close.alive:
            job.check()
            with contextlib.suppress(queue.Empty):
                return self._take(self._idle.get(timeout=_LOOK_S), job)
        raise RuntimeError("this executor is closed")

    def _take(self, worker: Worker | None, job: _Job) -> Worker:
        try:
            if worker and worker.process.poll() is not None:
                worker.kill()  # it ended while it had nothing to do: no query's fault
                worker = None
            worker = worker or Worker(self._config)
            job.add(worker)
        except BaseException:
            self._idle.put(worker)
            raise
        return worker


class _Job:
    """The workers that one caller's questions keep busy, until they are given up."""

    def __init__(self) -> None:
        self.busy: set[Worker] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def add(self, worker: Worker) -> None:
        """Note a worker that is going to be asked."""
        with self._lock:
            self.check()
            self.busy.add(worker)

    def check(self) -> None:
        """Raise where nobody wants the answers any more."""
        if self._is_over:
            raise CancelledError

    def give_up(self) -> None:
        """Let no thread wait for an answer, nor ask again what a worker ended here was asked."""
        with self._lock:
            self._is_over = True
            for worker in self.busy.copy():
                worker.process.kill()


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
