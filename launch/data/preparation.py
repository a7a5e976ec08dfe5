"""Data sets checked on all cores: what is wrong with their questions, and what is dear to compute
about them, which goes to the cache that every command looks into.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

from launch.cli import progress_bar
from launch.config import JobConfig
from launch.data.contamination import OverlapIndex
from launch.data.gold_checks import check_gold
from launch.data.prompts import Prompts
from launch.pool import process_pool
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


def prepare(
    job: JobConfig, sources: Mapping[str, SourceConfig], write: Callable[[str], object]
) -> Iterator[str]:
    """Check all questions of data sets by what a job asks for, and warm the cache; write golds to
    look at, a line each, and yield what is to be told.
    """
    pools: dict[str, Pool] = {}
    # Sets to measure by come before those to learn from: `OverlapIndex` wants it.
    for name in sorted(sources, key=lambda name: sources[name].split == "train"):
        with progress_bar(f"reading {name}"):
            pools[name] = Pool(sources[name], _everything(job, sources[name]))
    overlaps, most = OverlapIndex(), sum(len(pool.table) for pool in pools.values())
    with process_pool(partial(open_inspector, job), job.executor, most=most) as do:
        for name, pool in pools.items():
            add = overlaps.learn if sources[name].split == "train" else overlaps.measure
            issues, done = Counter[str](), 0
            rest = (example for _, example in pool.draw())
            with progress_bar(f"checking {name}") as update:
                while batch := [*islice(rest, _BATCH)]:
                    # Questions of one database follow one another: it is opened once.
                    for checked in do(sorted(batch, key=lambda one: one.database)):
                        add(name, checked.example)
                        issues.update(checked.issues)
                        if {*checked.issues} - {"scalar"}:
                            write(_line(checked))
                    done += len(batch)
                    update(done, len(pool.table), "")
            told = ", ".join(f"{count:,} {issue}" for issue, count in sorted(issues.items()))
            yield f"{name}: {done:,} of {len(pool.table):,} questions checked: {told or 'all well'}"
    found = [f"contamination: {one.line()}" for one in overlaps.overlaps()]
    yield from found or ["contamination: none found"]


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
