"""Work on questions in processes, each with an executor of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

from sqlenv.config import ExecutorConfig

Job = TypeVar("Job")
JobResult = TypeVar("JobResult")
Make = Callable[[ExecutorConfig], AbstractContextManager[Callable[[Job], JobResult]]]

_ALONE = 64  # jobs up to here are done before other processes would have started


@contextmanager
def process_pool(
    make: Make[Job, JobResult], config: ExecutorConfig, *, most: int
) -> Generator[Callable[[Sequence[Job]], Iterator[JobResult]]]:
    """Start `config.threads` processes that do jobs, lot by lot; answers of a lot come in order.

    `make` is called once in each process with the settings of its executor, which has one worker;
    it gives what does one job. `most` are the jobs of all lots, of which few are done here.
    """
    alone = config.model_copy(update={"workers": 1})
    if most <= _ALONE or config.threads < 2:
        with make(alone) as work:
            yield partial(map, work)
        return
    # Processes are started anew, not forked: nothing of this one is needed.
    others, context = active_children(), get_context("spawn")
    with ProcessPoolExecutor(config.threads, context, _begin, (make, alone)) as pool:
        try:
            yield partial(pool.map, _do, chunksize=16)
        except BaseException:
            # What is under way may take minutes, and nobody waits for it any more.
            for process in active_children():
                if process not in others:
                    process.kill()
            raise


_works: list[Callable[[Any], Any]] = []
_contexts: list[AbstractContextManager[Any]] = []
"""Stay open as long as the process lives."""


def _begin(make: Make[Any, Any], config: ExecutorConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interruption is the parent's business
    Thread(target=_end_with_parent, daemon=True).start()
    _contexts.append(make(config))
    _works.append(_contexts[0].__enter__())


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(job: Any) -> Any:
    return _works[0](job)
