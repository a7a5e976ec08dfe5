"""Data sets checked: gold queries that teach something wrong (they fail, return nothing, or do not
decide their own result); on all cores, with what is dear to compute about questions.

Every gold query runs, then on tables that are read from their ends, then with rows that tie in its
ORDER BY put in either order. A result that changes is not decided by the query, and a right
prediction can look wrong. What was found is in the cache that every command looks into.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

import apsw

from launch.cli import progress_bar
from launch.config import JobConfig
from launch.data.prompts import Prompts
from minirl.exchange import UserError
from rewards.expo.differences import differences
from sqlenv.cache import DiskCache, content_key, shared_cache
from sqlenv.config import DataConfig, ExecutorConfig, SourceConfig
from sqlenv.data.sources import Check, Checked, Pool, by_running, issues_of
from sqlenv.dialects import transpile
from sqlenv.envs.single_turn import witnesses_of
from sqlenv.evaluators.equality import is_ordered
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents, fingerprint
from sqlenv.executor.gold import LIMITS, TRANSIENT
from sqlenv.types import Example, Result, SqlError, Table, describe_failure
from sqlenv.witness.draw import ties_broken
from sqlenv.witness.store import open_store

_VERSION = 5
"""Of the rules below."""
_RERUN = frozenset({"varying", "tied"})
UNREADABLE = "unreadable database"
_BATCH = 2_048  # questions of a set that are in memory
_ALONE = 64  # jobs up to here are done before other processes would have started

Job = TypeVar("Job")
JobResult = TypeVar("JobResult")
Make = Callable[[ExecutorConfig], AbstractContextManager[Callable[[Job], JobResult]]]


def check_for(data: DataConfig, executor: Executor | None) -> Check | None:
    """Make the check that tells what `data.exclude` names; None without an executor."""
    if executor is None or _RERUN.isdisjoint(data.exclude):
        return by_running(executor)
    return partial(executor.map, partial(check_gold, plain=executor, disk=shared_cache()))


def check_gold(example: Example, plain: Executor, disk: DiskCache) -> Checked:
    """Run a gold query in all ways, if what comes of it is not known yet.

    The note is SQLite's message, or how results change: `varies` (with the clock or by chance),
    `row_order` (with the order in which tables are read), `ties` (with rows that ORDER BY leaves
    open).
    """
    facts = (fingerprint(example.database), example.gold_sql, example.dialect)
    limits = plain.config.model_dump(mode="json", include=LIMITS)
    key = content_key("gold check", *facts, _VERSION, apsw.sqlite_lib_version(), limits)
    if (known := disk.get(key)) is None:
        known, is_final = _check(example, plain)
        if is_final:
            disk[key] = known
    issues, note = known
    return Checked(example, tuple(issues), note)


def _check(example: Example, plain: Executor) -> tuple[tuple[tuple[str, ...], str], bool]:
    """Return the issues of a gold query and a note, and whether a machine with less to do would
    find the same.
    """
    sql = transpile(example.gold_sql, example.dialect)
    first = sql if isinstance(sql, SqlError) else plain.gold(example.database, sql)
    if not isinstance(sql, str) or not isinstance(first, Table):
        return (issues_of(first), f"fails: {describe_failure(first)}"), first not in TRANSIENT
    note = _change(example, sql, first, plain)
    changed = ("tied" if note.startswith("ties") else "varying",) * bool(note)
    return ((*issues_of(first), *changed), note), True


def _change(example: Example, sql: str, first: Table, plain: Executor) -> str:
    """Say how a result changes when its query runs again in some way; mostly, not at all."""
    if first.nondeterministic:
        return "varies: depends on the clock or on chance"
    backward = plain.execute(example.database, sql, reverse_unordered=True)
    if changed := _difference(first, backward, in_order=is_ordered(sql)):
        return f"row_order: {changed}"
    match [plain.execute(example.database, variant) for variant in ties_broken(sql)]:
        case [Table() as upwards, Table() as downwards]:
            ties = _difference(upwards, downwards, in_order=is_ordered(sql))
            return f"ties: {ties}" if ties else ""
        case _:  # no ORDER BY, or one that its columns cannot be added to
            return ""


def _difference(first: Table, second: Result, *, in_order: bool = True) -> str:
    """Name how a result differs from the first one; empty where it does not.

    Floats are compared to 6 decimals: a sum in another order is the same sum.
    """
    if not isinstance(second, Table):
        return describe_failure(second)
    found = differences(first, second)
    return " ".join(sorted(found if in_order else found - {"row_order"}))


def check_sets(
    job: JobConfig, sources: Mapping[str, SourceConfig], write: Callable[[str], object]
) -> Iterator[str]:
    """Check all questions of data sets by what a job asks for, and warm the cache; write golds to
    look at, a line each, and yield what is to be told.
    """
    pools: dict[str, Pool] = {}
    for name in sources:
        with progress_bar(f"reading {name}"):
            pools[name] = Pool(sources[name], _everything(job, sources[name]))
    most = sum(pool.total for pool in pools.values())
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
                    update(done, pool.total, "")
            told = ", ".join(f"{count:,} {issue}" for issue, count in sorted(issues.items()))
            yield f"{name}: {done:,} of {pool.total:,} questions checked: {told or 'all well'}"


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

    def inspect(example: Example) -> Checked:
        try:
            check_contents(example.database)
        except UserError as error:
            return Checked(example, (UNREADABLE,), str(error))
        prompts.matches(example)
        if not example.gold_sql:
            return Checked(example, ("blank",))
        if witnesses is not None:
            witnesses_of(example, witnesses)
        return check_gold(example, plain, disk)

    with Executor(config, disk) as plain:
        yield inspect


def _line(checked: Checked) -> str:
    one, found = checked.example, {"issues": checked.issues, "note": checked.note}
    asked = {"id": one.id, "question_id": one.question_id, "db_id": one.db_id}
    return json.dumps(asked | found | {"gold_sql": one.gold_sql}, ensure_ascii=False)


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
