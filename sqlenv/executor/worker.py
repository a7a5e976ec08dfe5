"""The child's side of `pool.py`: `python -m sqlenv.executor.worker FD CONFIG` answers questions.

Only the standard library, msgpack and APSW are imported here: a worker starts in 0.06 s and never
loads pydantic, JAX nor the program that uses it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from sqlenv.errors import UserError
from sqlenv.evaluators.comparators import Runs
from sqlenv.executor.channel import Channel
from sqlenv.executor.engine import Answer, Engine, Question
from sqlenv.types import Result

if TYPE_CHECKING:
    from sqlenv.config import ExecutorConfig

OUT_OF_MEMORY = 77  # exit status

# Answers are sent together, since a message costs more than a tiny query; none waits longer.
_GATHER_S = 0.02
# Address space that is not SQLite's heap: Python, stacks, and a result in its forms on the way out.
_OTHER_BYTES = 1_000_000_000


def main() -> None:
    """Answer lists of questions from the parent, in order, until it closes its end."""
    descriptor, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # The settings were checked where they come from; their class would take longest to import.
    if settings["now"]:
        settings["now"] = datetime.fromisoformat(settings["now"])
    config = cast("ExecutorConfig", SimpleNamespace(**settings))
    _limit_memory(config)
    # Results are many small tuples, which the collector would look through again and again.
    gc.set_threshold(50_000)
    engine = Engine(config)
    channel = Channel(socket.socket(fileno=descriptor))
    channel.send([])  # ready
    while True:
        try:
            questions = channel.receive()
        except (EOFError, ConnectionResetError):
            return
        _answer(channel, engine, questions)


def _answer(channel: Channel, engine: Engine, questions: Sequence[Question]) -> None:
    answers: list[Answer] = []
    last_s = time.monotonic()

    def send(*, at_once: bool) -> None:
        nonlocal last_s
        if at_once or time.monotonic() - last_s > _GATHER_S:
            channel.send(answers)
            answers.clear()
            last_s = time.monotonic()

    def ask(database: Path, sql: str) -> Result:
        result = engine.ask(database, sql)
        send(at_once=False)  # a case of many slow queries is not overdue
        return result

    runs = Runs(ask, stopwatch=engine.seconds)
    for position, question in enumerate(questions, 1):
        try:
            answers.append(engine.answer(question, runs))
        except UserError as error:
            answers.append(error)
        send(at_once=position == len(questions))


def _die_with_parent() -> None:
    """End this process when its parent ends, however that happens: then standard input closes."""
    while os.read(0, 1):
        pass
    os._exit(0)


def _limit_memory(config: ExecutorConfig) -> None:
    limit = 2 * config.heap_bytes + 8 * config.max_bytes + _OTHER_BYTES
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit; or a lower one is set
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
