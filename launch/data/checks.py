"""Data sets checked on all cores: gold queries that teach something wrong are counted and listed,
and what is dear to compute about questions is kept in the cache that every command looks into.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from launch.cli import progress_bar
from launch.config import JobConfig
from launch.data.prompts import Prompts
from minirl.exchange import UserError
from rewards.execution import gold_result
from sqlenv.cache import shared_cache
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.sources import Checked, Pool, issues_of
from sqlenv.envs.single_turn import witnesses_of
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents
from sqlenv.types import Example, describe_failure
from sqlenv.witness.store import open_store

_BATCH = 2_048  # questions of a set that are in memory


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
    with Executor(job.executor, shared_cache()) as executor:
        inspect = _inspector(job, executor)
        for name, pool in pools.items():
            issues, done = Counter[str](), 0
            rest = (example for _, example in pool.draw())
            with progress_bar(f"checking {name}") as update:
                while batch := [*islice(rest, _BATCH)]:
                    # Questions of one database follow one another: it is opened once.
                    batch.sort(key=lambda one: one.database)
                    for checked in executor.map(inspect, batch):
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


def _inspector(job: JobConfig, executor: Executor) -> Callable[[Example], Checked]:
    """Make what looks at a question, and leaves what it finds in the cache."""
    prompts, witnesses = Prompts(job.prompt, job.env), open_store(job.env)

    def inspect(example: Example) -> Checked:
        try:
            check_contents(example.database)
        except UserError as error:
            return Checked(example, ("unreadable database",), str(error))
        prompts.matches(example)
        if not example.gold_sql:
            return Checked(example, ("blank",))
        if witnesses is not None:
            witnesses_of(example, witnesses)
        result = gold_result(executor, example)
        return Checked(example, issues_of(result), describe_failure(result))

    return inspect


def _line(checked: Checked) -> str:
    one, found = checked.example, {"issues": checked.issues, "note": checked.note}
    asked = {"id": one.id, "question_id": one.question_id, "db_id": one.db_id}
    return json.dumps(asked | found | {"gold_sql": one.gold_sql}, ensure_ascii=False)
