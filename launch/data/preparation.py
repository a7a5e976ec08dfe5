"""Data sets checked on all cores: what is wrong with their questions, and what is dear to compute
about them, which goes to the cache that every command looks into.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from launch.cli import progress_bar
from launch.config import JobConfig
from launch.data.gold_checks import check_gold
from launch.data.prompts import Prompts
from minirl.exchange import UserError
from sqlenv.cache import shared_cache
from sqlenv.config import DataConfig, ExecutorConfig, SourceConfig
from sqlenv.data.sources import Checked, Pool
from sqlenv.envs.single_turn import witnesses_of
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents
from sqlenv.types import Example
from sqlenv.witness.store import open_store

UNREADABLE = "unreadable database"
_BATCH = 2_048  # questions of a set that are in memory
_ALONE = 64  # jobs up to here are done before other processes would have started

Job = TypeVar("Job")
JobResult = TypeVar("JobResult")
Make = Callable[[ExecutorConfig], AbstractContextManager[Callable[[Job], JobResult]]]


def prepare(
    job: JobConfig, sources: Mapping[str, SourceConfig], write: Callable[[str], object]
) -> Iterator[str]:
    """Check all questions of data sets by what a job asks for, and warm the cache; write golds to
    look at, a line each, and yield what is to be told.
    """
    pools: dict[str, Pool] = {}
    for name in sources:
        with progress_bar(f"reading {name}"):
            pools[name] = Pool(sources[name], _everything(job, sources[name]))
    most = sum(len(pool.table) for pool in pools.values())
    with process_pool(partial(open_inspector, job), job.executor, most=most) as do:
        for name, pool in pools.items():
            issues, done = Counter[str](), 0
            rest = (example for _, example in pool.draw())
            with progress_bar(f"checking {name}") as update:
                while batch := [*islice(rest, _BATCH)]:
                    # Questions of one database follow one another: it is opened once.
                    for checked in do(sorted(batch, key=lambda one: one.database)):
                        issues.update(checked.issues)
                        if {*checked.issues} - {"scalar"}:
                            write(_line(checked))
                    done += len(batch)
                    update(done, len(pool.table), "")
            told = ", ".join(f"{count:,} {issue}" for issue, count in sorted(issues.items()))
            yield f"{name}: {done:,} of {len(pool.table):,} questions checked: {told or 'all well'}"


def _everything(job: JobConfig, source: SourceConfig) -> DataConfig:
    """Ask for every question that has a database, but those that the job does not learn from."""
    excluded = job.data.train.exclude_databases if source.split == "train" else ()
    return DataConfig(
        sources=(source,), exclude=(), exclude_databases=excluded, drop_missing_database=True
    )


@contextmanager
def open_inspector(
    job: JobConfig, config: ExecutorConfig
) -> Generator[Callable[[Example], Checked]]:
    """Make what looks at a question, in each process of the pool."""
    disk = shared_cache()
    prompts, witnesses = Prompts(job.prompt, job.env), open_store(job.env)

    @lru_cache(maxsize=4_096)
    def problem(database: Path) -> str:
        try:
            check_contents(database)
        except UserError as error:
            return str(error)
        return ""

    def inspect(example: Example) -> Checked:
        if why := problem(example.database):
            return Checked(example, (UNREADABLE,), why)
        prompts.matches(example)
        if not example.gold_sql:
            return Checked(example, ("blank",))
        if witnesses is not None:
            witnesses_of(example, witnesses)
        return check_gold(example, plain, disk)

    with Executor(config, disk) as plain:
        yield inspect


def _line(c: Checked) -> str:
    asked = {"id": c.example.id, "question_id": c.example.question_id, "db_id": c.example.db_id}
    found = {"issues": c.issues, "note": c.note, "gold_sql": c.example.gold_sql}
    return json.dumps({**asked, **found}, ensure_ascii=False)


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
