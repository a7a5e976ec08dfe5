"""The child's side of `processes.py`: calls the methods of an engine that it is asked to.

Only the standard library and APSW are imported here: a worker starts in 0.06 s and never loads
pydantic, JAX nor the program that uses it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from exchange import UserError
from sqlenv.executor.engine import Engine
from sqlenv.types import Result

if TYPE_CHECKING:
    from sqlenv.config import ExecutorConfig

OUT_OF_MEMORY = 77  # exit status

# On top of twice the time-out, which a query may take that is asked once more alone.
_GRACE_S = 0.1
_LOOK_S = 0.5
# Address space that is not SQLite's heap: Python, stacks, and a result in its forms on the way out.
_OTHER_BYTES = 1_000_000_000


class _TimedEngine(Engine):
    """Lets the system end this process where one query, or what is between two, takes too long."""

    def __init__(self, config: ExecutorConfig):
        super().__init__(config)
        self._limit_s = 2 * config.timeout_s + _GRACE_S

    def execute(self, database: Path, sql: str, max_steps: int | None = None) -> Result:
        self.wind()
        result = super().execute(database, sql, max_steps)
        self.wind()
        return result

    def wind(self) -> None:
        """Begin the time anew."""
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)


def main() -> None:
    """Answer requests from the parent, in order, until it closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where anything else that is said goes
    config = pickle.load(requests)
    _limit_memory(config)
    # Results are many small tuples, which the collector would look through again and again.
    gc.set_threshold(50_000)
    engine = _TimedEngine(config)
    while True:
        try:
            method, *arguments = pickle.load(requests)
        except EOFError:
            return
        engine.wind()
        try:
            answer = getattr(engine, method.__name__)(*arguments)
        except UserError as error:
            answer = error
        signal.setitimer(signal.ITIMER_REAL, 0)
        pickle.dump(answer, answers)
        answers.flush()


def _die_with(parent: int) -> None:
    """End this process when its parent ends, however that happens."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
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
