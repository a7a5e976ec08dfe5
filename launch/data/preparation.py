"""Data sets checked on all cores: what is wrong with their questions, and what is dear to compute
about them, which goes to the cache that every command looks into.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np

from exchange import UserError
from launch.cli import progress_bar
from launch.config import JobConfig
from launch.data.contamination import OverlapIndex
from launch.data.gold_checks import check_gold
from launch.data.prompts import Prompts, read_tokenizer
from launch.evaluation.process_pool import process_pool
from launch.tables import show_table
from sqlenv.cache import shared_cache
from sqlenv.config import DataConfig, ExecutorConfig, SourceConfig
from sqlenv.data.descriptions import read_descriptions
from sqlenv.data.index import first_times
from sqlenv.data.sources import Checked, Pool
from sqlenv.envs.single_turn import witnesses_of
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents
from sqlenv.schema.reading import Descriptions
from sqlenv.types import Example
from sqlenv.witness.store import open_store

UNREADABLE = "unreadable database"
_TOGETHER = 32  # questions in one message to a process
_BATCH = 2_048  # questions of a set that are in memory
_NAMED = 3


Inspected = tuple[Checked, int, int | None]
"""A question that was looked at, its value matches, and the tokens of its prompt if counted."""


@dataclass(slots=True)
class SetReport:
    """What was found in a data set: counts, and the first questions by what is wrong with them."""

    pool: Pool
    databases: int
    issues: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    with_matches: int = 0
    lengths: list[int] = field(default_factory=list)

    def add(self, checked: Checked, matches: int, tokens: int | None) -> None:
        """Count a question."""
        self.with_matches += matches > 0
        self.lengths += [] if tokens is None else [tokens]
        for issue in checked.issues:
            note = f" ({checked.note})" if issue in ("failing", UNREADABLE) else ""
            self.name(issue, f"{checked.example.id}{note}")

    def name(self, issue: str, example: str) -> None:
        """Count an issue, and keep the first questions that have it."""
        self.issues[issue] += 1
        if len(named := self.examples.setdefault(issue, [])) < _NAMED:
            named.append(example)


def prepare(
    job: JobConfig,
    sources: Mapping[str, SourceConfig],
    write: Callable[[str], object],
    tokenizer: Path | None = None,
) -> Iterator[str]:
    """Check all questions of data sets by what a job asks for, and warm the cache; write golds to
    look at, a line each, and yield what is to be told.
    """
    reports: dict[str, SetReport] = {}
    overlaps = OverlapIndex()
    # Sets to measure by come before those to learn from: `OverlapIndex` wants it.
    for name in sorted(sources, key=lambda name: sources[name].split == "train"):
        with progress_bar(f"reading {name}"):
            pool = Pool(sources[name], _everything(job, sources[name]))
            reports[name] = SetReport(pool, len(pool.count_by_database()))
    _count_duplicates(reports)
    pools = [report.pool for report in reports.values()]
    total = sum(len(pool.index) for pool in pools)
    work = partial(open_inspector, job, tokenizer, _descriptions(pools) if tokenizer else {})
    with process_pool(work, job.executor, most=total, chunk=_TOGETHER) as do:
        for name, report in reports.items():
            is_learned = sources[name].split == "train"
            add = overlaps.learn if is_learned else overlaps.measure
            for checked, matches, tokens in _inspected(name, report.pool, do):
                report.add(checked, matches, tokens)
                add(name, checked.example)
                if {*checked.issues} - {"scalar"}:
                    write(_line(checked))
    in_order = {name: reports[name] for name in sources}
    _show_counts(in_order, job)
    yield from _remarks(in_order)
    found = [f"contamination: {one.line()}" for one in overlaps.overlaps()]
    yield from found or ["contamination: none found"]


def _everything(job: JobConfig, source: SourceConfig) -> DataConfig:
    """Ask for every question that has a database, but those that the job does not learn from."""
    excluded = job.data.train.exclude_databases if source.split == "train" else ()
    return DataConfig(
        sources=(source,), exclude=(), exclude_databases=excluded, drop_missing_database=True
    )


def _count_duplicates(reports: Mapping[str, SetReport]) -> None:
    """Count questions that came before about the same database, in the set or in another one."""
    seen: list[np.ndarray] = []
    for report in reports.values():
        index = report.pool.index
        for position in np.flatnonzero(~first_times(index.rows["text"], seen)).tolist():
            file, number = index.place(position)
            report.name("duplicate", f"{index.layout}/{file.stem}/{number}")


def _descriptions(pools: Iterable[Pool]) -> dict[Path, Descriptions]:
    """Read what data sets say of the columns of their databases."""
    found: dict[Path, Descriptions] = {}
    for pool in pools:
        names = {kind.db_id for kind in pool.index.kinds}
        paths = {name: path for name in names if (path := pool.location.database(name))}
        found |= read_descriptions(pool.location, pool.source, paths)
    return found


def _inspected(
    name: str, pool: Pool, do: Callable[[Sequence[Example]], Iterator[Inspected]]
) -> Iterator[Inspected]:
    """Have the questions of a set looked at, a batch in memory at a time."""
    done, rest = 0, (example for _, example in pool.draw())
    with progress_bar(f"checking {name}") as update:
        while batch := [*islice(rest, _BATCH)]:
            # Questions of one database follow one another: it is opened once.
            yield from do(sorted(batch, key=lambda one: one.database))
            done += len(batch)
            update(done, len(pool.index), "")


@contextmanager
def open_inspector(
    job: JobConfig,
    tokenizer: Path | None,
    descriptions: Mapping[Path, Descriptions],
    config: ExecutorConfig,
) -> Generator[Callable[[Example], Inspected]]:
    """Make what looks at a question, in each process of the pool."""
    disk = shared_cache()
    prompts = Prompts(job.prompt, job.env)
    prompts.describe(descriptions)
    encode = None
    if tokenizer is not None:
        encode = read_tokenizer(job, tokenizer).encode_chat
    witnesses = open_store(job.env)

    @lru_cache(maxsize=4_096)
    def problem(database: Path) -> str:
        try:
            check_contents(database)
        except UserError as error:
            return str(error)
        return ""

    def inspect(example: Example) -> Inspected:
        if why := problem(example.database):
            return Checked(example, (UNREADABLE,), why), 0, None
        checked = Checked(example, ("blank",))
        if example.gold_sql:
            checked = check_gold(example, plain, disk)
            if witnesses is not None:
                witnesses_of(example, witnesses)
        tokens = len(encode(prompts.training(example))) if encode else None
        return checked, len(prompts.matches(example)), tokens

    with Executor(config, disk) as plain:
        yield inspect


def _line(c: Checked) -> str:
    asked = {"id": c.example.id, "question_id": c.example.question_id, "db_id": c.example.db_id}
    found = {"issues": c.issues, "note": c.note, "gold_sql": c.example.gold_sql}
    accepts = {"accepts": c.correction} if c.correction else {}
    return json.dumps({**asked, **found, **accepts}, ensure_ascii=False)


def _show_counts(reports: Mapping[str, SetReport], job: JobConfig) -> None:
    titles = ["set", "questions", "databases", "left out", "golds", "with value matches"]
    titles += ["prompt tokens: median / 95 % / longest"] * any(r.lengths for r in reports.values())
    rows = []
    for name, one in reports.items():
        pool = one.pool
        left = Counter({issue: n for issue, n in pool.found.items() if issue in pool.drops})
        counts = f"{pool.kept:,} of {len(pool.index):,}", f"{one.databases:,}"
        row = [name, *counts, _counts(left), _counts(one.issues), f"{one.with_matches:,}"]
        limit = job.sampler if pool.source.split == "train" else job.evaluation_sampler
        rows.append([*row, _lengths(one.lengths, limit.max_prompt_tokens)][: len(titles)])
    show_table("Questions", [titles, *rows])


def _lengths(lengths: Sequence[int], limit: int) -> str:
    """Describe the lengths of prompts, and how many are over the job's limit."""
    if not lengths:
        return "-"
    median, p95, longest = np.percentile(lengths, [50, 95, 100], method="inverted_cdf")
    over = sum(length > limit for length in lengths)
    return f"{median:,} / {p95:,} / {longest:,}" + f"; {over:,} over {limit:,}" * bool(over)


def _counts(issues: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {issue}" for issue, count in sorted(issues.items()))


def _remarks(reports: Mapping[str, SetReport]) -> Iterator[str]:
    """Name examples of what is wrong."""
    for name, one in reports.items():
        for issue, examples in sorted(one.examples.items()):
            if issue != "scalar":
                yield f"{name}: {one.issues[issue]:,} {issue}, such as {'; '.join(examples)}"
