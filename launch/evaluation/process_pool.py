"""A pool of processes for work on questions, each with an executor of its own.

Processes are started anew, not forked: nothing of the parent is needed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from sqlenv.config import ExecutorConfig

Job = TypeVar("Job")
JobResult = TypeVar("JobResult")
Make = Callable[[ExecutorConfig], AbstractContextManager[Callable[[Job], JobResult]]]

_ALONE = 64  # jobs up to here are done before other processes would have started
_CHUNK = 16  # jobs in one message


@contextmanager
def process_pool(
    make: Make[Job, JobResult], config: ExecutorConfig, *, most: int, chunk: int = _CHUNK
) -> Generator[Callable[[Sequence[Job]], Iterator[JobResult]]]:
    """Start `config.threads` processes that do jobs, lot by lot; answers of a lot come in order.

    `make` is called once in each process with the settings of its executor, which has one worker;
    it gives what does one job, as long as its context is open. `most` are the jobs of all lots
    together, of which few are done in this process, and `chunk` those in one message.
    """
    alone = config.model_copy(update={"workers": 1})
    size = min(config.threads, -(-most // chunk))
    if most <= _ALONE * chunk // _CHUNK or size < 2:
        with make(alone) as work:
            yield lambda jobs: map(work, jobs)
        return
    context = multiprocessing.get_context("spawn")
    # Children end when the other end of this pipe closes, also where this process is killed.
    theirs, ours = context.Pipe(duplex=False)
    with ours, theirs, ProcessPoolExecutor(size, context, _start, (make, alone, theirs)) as pool:

        def do(jobs: Sequence[Job]) -> Iterator[JobResult]:
            chunks = [jobs[at : at + chunk] for at in range(0, len(jobs), chunk)]
            # Started here, with this mask: an interruption is the parent's business.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return chain.from_iterable(pool.map(_do, chunks))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            yield do
        except BaseException:
            # What is under way may take minutes, and nobody waits for it any more.
            ours.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_work: list[Callable[[Any], Any]] = []
_open = ExitStack()
"""Stays open as long as the process lives."""


def _start(make: Make[Any, Any], config: ExecutorConfig, parent: Connection) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _work.append(_open.enter_context(make(config)))


def _end_with(parent: Connection) -> None:
    parent.poll(None)
    os._exit(1)


def _do(jobs: Sequence[Any]) -> list[Any]:
    return [_work[0](job) for job in jobs]
