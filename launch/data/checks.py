"""Data sets checked on all cores: gold queries that teach something wrong are counted and listed,
and what is dear to compute about questions is kept in the cache that every command looks into.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

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


def check_sets(
    job: JobConfig, sources: Iterable[SourceConfig], write: Callable[[str], object]
) -> Iterator[str]:
    """Check all questions of data sets by what a job asks for, and warm the cache; write golds to
    look at, a line each, and yield what is to be told.
    """
    prompts, witnesses = Prompts(job.prompt, job.env), open_store(job.env)
    with Executor(job.executor, shared_cache()) as executor:

        def inspect(example: Example) -> Checked:
            try:
                check_contents(example.database)
            except UserError as error:
                return Checked(example, ("unreadable database",), str(error))
            prompts.matches(example)
            if witnesses is not None:
                witnesses_of(example, witnesses)
            result = gold_result(executor, example)
            return Checked(example, issues_of(result), describe_failure(result))

        def check(examples: Sequence[Example]) -> Iterator[Checked]:
            for checked in executor.map(inspect, examples):
                if {*checked.issues} - {"scalar"}:
                    write(_line(checked))
                yield checked

        with progress_bar("reading"):
            pools = [Pool(source, _everything(job, source), check) for source in sources]
        for pool in pools:
            with progress_bar(f"checking {pool.name}") as update:
                for done, (_, example) in enumerate(pool.draw(), 1):
                    if not example.gold_sql:  # which nothing checks
                        prompts.matches(example)
                    update(done, pool.total, "")
            yield pool.line()


def _everything(job: JobConfig, source: SourceConfig) -> DataConfig:
    """Ask for every question that has a database, but those that the job does not learn from."""
    excluded = job.data.train.exclude_databases if source.split == "train" else ()
    return DataConfig(
        sources=(source,), exclude=(), exclude_databases=excluded, drop_missing_database=True
    )


def _line(checked: Checked) -> str:
    one, found = checked.example, {"issues": checked.issues, "note": checked.note}
    asked = {"id": one.id, "question_id": one.question_id, "db_id": one.db_id}
    return json.dumps(asked | found | {"gold_sql": one.gold_sql}, ensure_ascii=False)
