"""Data sets checked: gold queries that teach something wrong (they fail, return nothing, or do not
decide their own result); on all cores, with what is dear to compute about questions.

Every gold query runs, then on tables that are read from their ends, then with rows that tie in its
ORDER BY put in either order. A result that changes is not decided by the query, and a right
prediction can look wrong. What was found is in the cache that every command looks into.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

import apsw

from launch.cli import progress_bar
from launch.config import JobConfig
from launch.data.prompts import Prompts
from minirl.exchange import UserError
from rewards.expo.differences import differences
from sqlenv.cache import DiskCache, content_key, shared_cache
from sqlenv.config import DataConfig, SourceConfig
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
_BATCH = 2_048  # questions of a set that are in memory


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
    disk = shared_cache()
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
        return check_gold(example, executor, disk)

    return inspect


def _line(checked: Checked) -> str:
    one, found = checked.example, {"issues": checked.issues, "note": checked.note}
    asked = {"id": one.id, "question_id": one.question_id, "db_id": one.db_id}
    return json.dumps(asked | found | {"gold_sql": one.gold_sql}, ensure_ascii=False)
