"""Worker processes that answer queries, and what happens when one dies.

Workers are started as programs (`python -m sqlenv.executor.worker`), never forked: the parent runs
JAX's threads. A worker has a socket for questions and answers, and standard input, which closes
when the parent ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import islice

from sqlenv.config import ExecutorConfig
from sqlenv.errors import UserError
from sqlenv.executor.channel import Answer, Channel, Encoded, decode
from sqlenv.executor.worker import OUT_OF_MEMORY, USER_ERROR, Question
from sqlenv.types import Result, SqlError, TimedOut, TooLarge

CRASHED = SqlError("the query crashed SQLite")

_COMMAND = (sys.executable, "-P", "-m", "sqlenv.executor.worker")
_START_S = 60.0
# On top of twice the time-out: answers wait that long in a worker, and a message takes a moment.
_GRACE_S = 0.1
# Of a message that are not rows.
_OTHER_BYTES = 10_000_000
# What is under way moves a hundred times as fast.
_BYTES_A_SECOND = 20e6
# Questions in one message: enough to hide its cost, few enough to keep all workers busy to the end.
_MESSAGE_QUESTIONS = 16
# Messages to choose the next one from.
_NEXT_MESSAGES = 64


class Worker:
    """One process, and the questions that it has not answered yet."""

    def __init__(self, config: ExecutorConfig):
        self._silence_s = 2 * config.timeout_s + _GRACE_S
        ours, theirs = socket.socketpair()
        ours.settimeout(0)  # it never waits
        # The memory of rows is more than their text.
        most_bytes = _MESSAGE_QUESTIONS * config.max_bytes + _OTHER_BYTES
        self.channel = Channel(ours, most_bytes=most_bytes)
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno()), config.model_dump_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the parent's business
            )
        self._is_ready = self._is_talking = self.is_stuck = False
        self.asked: deque[int] = deque()
        self.database: object = None
        """Of the question that came last: its connection is open."""
        self.deadline = 0.0

    def ask(self, numbers: Sequence[int], questions: Sequence[Question]) -> None:
        """Send some of the questions; at most one call at a time."""
        self.asked.extend(numbers)
        self.database = questions[numbers[-1]][0]
        self._await()
        # It died, or hangs: `receive` or the deadline will tell.
        with contextlib.suppress(OSError):
            self.channel.send([questions[i] for i in numbers], timeout_s=self._silence_s)

    def receive(self) -> list[tuple[int, Answer | UserError]] | None:
        """Take numbered answers without waiting, none of them as long as a message is not whole.

        None when the worker is dead, sends no answers, or stops in the middle of a message.
        """
        try:
            encoded = self.channel.receive()
            if encoded is None:
                self.is_stuck = self._is_late()
                return None if self.is_stuck else []
            answers = [_read(encoded) for encoded in encoded]
        except (EOFError, OSError, ValueError, TypeError, LookupError):
            return None
        if len(answers) > len(self.asked):
            return None
        self._is_ready, self._is_talking = True, False
        self._await()
        return [(self.asked.popleft(), answer) for answer in answers]

    def _is_late(self) -> bool:
        """Say whether a message is late; from its start on it has a time by its length."""
        if self.channel.expected_bytes and not self._is_talking:
            self._is_talking = True
            took_s = _GRACE_S + self.channel.expected_bytes / _BYTES_A_SECOND
            self.deadline = max(self.deadline, time.monotonic() + took_s)
        return time.monotonic() >= self.deadline

    def failure_result(self, *, overdue: bool) -> Result:
        """End a worker that failed at its only question, and say what that makes of it."""
        status = self.kill()
        if not self._is_ready or (status > 0 and status != OUT_OF_MEMORY):
            raise RuntimeError("a query worker failed; its own words are on standard error")
        if status == OUT_OF_MEMORY:
            return TooLarge("memory")
        return TimedOut("wall") if overdue else CRASHED

    def has_ended(self) -> bool:
        """Say whether the process is gone."""
        return self._process.poll() is not None

    def kill(self) -> int:
        """End the process at once; give its exit status, negative for a signal."""
        self.channel.close()
        with self._process as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0)
            process.kill()
        return process.returncode

    def _await(self) -> None:
        self.deadline = time.monotonic() + (self._silence_s if self._is_ready else _START_S)


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
        """Answer questions in order, with as many workers as are free.

        A worker that dies with one question is that question's result; of several it does not say
        whose fault it is: they are asked again one by one.
        """
        answers: dict[int, Answer | UserError] = {}
        waiting = deque(_messages(questions, self._config.workers))
        busy: list[Worker] = []
        try:
            while waiting or busy:
                while waiting and (worker := self._hire(block=not busy)):
                    busy.append(worker)
                    worker.ask(_choose(waiting, worker, busy, questions), questions)
                for worker, spoke in _next_events(busy):
                    message = worker.receive() if spoke else None
                    if message is not None:
                        answers.update(message)
                    elif len(worker.asked) > 1:
                        waiting.extend([number] for number in worker.asked)
                    else:
                        overdue = not spoke or worker.is_stuck
                        answers[worker.asked[0]] = worker.failure_result(overdue=overdue)
                    if message is None or not worker.asked:
                        busy.remove(worker)
                        self._dismiss(worker, reuse=message is not None)
        finally:
            for worker in busy:  # an exception: late answers must not reach the next caller
                self._dismiss(worker, reuse=False)
        return [_result(answers[number]) for number in range(len(questions))]

    def _hire(self, *, block: bool) -> Worker | None:
        if not self.close.alive:
            raise RuntimeError("this executor is closed")
        try:
            worker = self._idle.get(block)
        except queue.Empty:
            return None
        try:
            if worker and worker.has_ended():  # while it had nothing to do: no query's fault
                worker.kill()
                worker = None
            return worker or Worker(self._config)
        except BaseException:
            self._idle.put(None)
            raise

    def _dismiss(self, worker: Worker, *, reuse: bool) -> None:
        if not reuse:
            worker.kill()
        self._idle.put(worker if reuse else None)


def _close(idle: queue.LifoQueue[Worker | None]) -> None:
    while not idle.empty():
        worker = idle.get()
        if worker:
            worker.kill()


def _messages(questions: Sequence[Question], workers: int) -> list[list[int]]:
    """Divide questions, one database's together so that its connection is reused."""
    order = sorted(range(len(questions)), key=lambda number: questions[number][0])
    length = min(-(-len(order) // (4 * workers)), _MESSAGE_QUESTIONS)
    return [order[start : start + length] for start in range(0, len(order), length or 1)]


def _choose(
    waiting: deque[list[int]], worker: Worker, busy: Sequence[Worker], questions: Sequence[Question]
) -> list[int]:
    """Take a message off those that wait, if possible of a database that only this worker has."""
    elsewhere = {other.database for other in busy if other is not worker}

    def fit(message: list[int]) -> tuple[bool, bool]:
        database = questions[message[0]][0]
        return database == worker.database, database not in elsewhere

    chosen = max(islice(waiting, _NEXT_MESSAGES), key=fit)
    waiting.remove(chosen)
    return chosen


def _next_events(busy: list[Worker]) -> list[tuple[Worker, bool]]:
    """Wait for messages and deadlines; True marks workers that sent something or ended."""
    timeout_s = min(worker.deadline for worker in busy) - time.monotonic()
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            selector.register(worker.channel, selectors.EVENT_READ)
        spoke = {key.fileobj for key, _ in selector.select(max(timeout_s, 0))}
    now = time.monotonic()
    events = [(worker, worker.channel in spoke) for worker in busy]
    return [(worker, has) for worker, has in events if has or worker.deadline <= now]


def _read(encoded: Encoded) -> Answer | UserError:
    return UserError(encoded[1]) if encoded[0] == USER_ERROR else decode(encoded)


def _result(answer: Answer | UserError) -> Answer:
    if isinstance(answer, UserError):
        raise answer
    return answer


def _environment() -> dict[str, str]:
    """Make a worker import what this process imports, and give freed memory back to the system."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),  # noqa: PTH100
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
