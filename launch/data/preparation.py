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
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from exchange import UserError
from launch.cli import progress_bar
from launch.config import JobConfig
from launch.data.contamination import OverlapIndex
from launch.data.gold_checks import check_golds, reversed_of
from launch.data.prompts import Prompts
from launch.evaluation.process_pool import process_pool
from launch.tables import show_table
from sqlenv.cache import shared_cache
from sqlenv.config import DataConfig, ExecutorConfig, SourceConfig
from sqlenv.data.descriptions import read_descriptions
from sqlenv.data.sources import Checked, Pool
from sqlenv.envs.single_turn import witnesses_of
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents
from sqlenv.types import Example
from sqlenv.witness.store import WitnessStore

_T = TypeVar("_T")

UNREADABLE = "unreadable database"
_TOGETHER = 32  # questions that one process checks together
_BATCH = 2_048  # questions of a set that are in memory
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Request:
    """Data sets by name, and the job whose prompts and limits they are checked with."""

    job: JobConfig
    sources: Mapping[str, SourceConfig]
    tokenizer: Path | None = None


@dataclass(frozen=True, slots=True)
class Inspected:
    """A question that was looked at: its value matches, and the tokens of its prompt if counted."""

    checked: Checked
    matches: int = 0
    tokens: int | None = None


@dataclass(slots=True)
class SetReport:
    """What was found in a data set: counts, and the first questions by what is wrong with them."""

    pool: Pool
    issues: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    databases: set[Path] = field(default_factory=set)
    with_matches: int = 0
    lengths: list[int] = field(default_factory=list)

    def add(self, one: Inspected) -> None:
        """Count a question."""
        example = one.checked.example
        self.databases.add(example.database)
        self.with_matches += bool(one.matches)
        self.lengths += [] if one.tokens is None else [one.tokens]
        for issue in one.checked.issues:
            note = f" ({one.checked.note})" if issue in ("failing", UNREADABLE) else ""
            self.name(issue, f"{example.id}{note}")

    def name(self, issue: str, example: str) -> None:
        """Count an issue, and keep the first questions that have it."""
        self.issues[issue] += 1
        if len(named := self.examples.setdefault(issue, [])) < _NAMED:
            named.append(example)


def prepare(request: Request, write: Callable[[str], object]) -> Iterator[str]:
    """Check all questions and warm the cache; write golds to look at, a line each, and yield what
    is to be told.
    """
    reports: dict[str, SetReport] = {}
    overlaps = OverlapIndex()
    # Sets to measure by come before those to learn from: `OverlapIndex` wants it.
    order = sorted(request.sources, key=lambda name: request.sources[name].split == "train")
    for name in order:
        with progress_bar(f"reading {name}"):
            reports[name] = SetReport(Pool(request.sources[name], _everything(request, name)))
    _count_duplicates(reports)
    total = sum(report.pool.report.records for report in reports.values())
    work = partial(open_inspector, request)
    limits = request.job.executor
    with process_pool(work, limits, most=-(-total // _TOGETHER), chunk=1) as do:
        for name, report in reports.items():
            is_learned = request.sources[name].split == "train"
            add = overlaps.learn if is_learned else overlaps.measure
            for one in _inspected(name, report.pool, do):
                report.add(one)
                add(name, one.checked.example)
                if {*one.checked.issues} - {"scalar"}:
                    write(_line(one.checked))
    in_order = {name: reports[name] for name in request.sources}
    _show_counts(in_order, request)
    yield from _remarks(in_order)
    found = [f"contamination: {one.line()}" for one in overlaps.overlaps()]
    yield from found or ["contamination: none found"]


def _everything(request: Request, name: str) -> DataConfig:
    """Ask for every question that has a database, but those that the job does not learn from."""
    source = request.sources[name]
    excluded = request.job.data.train.exclude_databases if source.split == "train" else ()
    return DataConfig(
        sources=(source,), exclude=(), exclude_databases=excluded, drop_missing_database=True
    )


def _count_duplicates(reports: Mapping[str, SetReport]) -> None:
    """Count questions that came before about the same database, in the set or in another one."""
    seen = np.array([], np.uint64)
    for report in reports.values():
        for index in report.pool.indexes:
            texts, first = np.unique(index.rows["text"], return_index=True)
            is_new = np.zeros(len(index), bool)
            is_new[first[~np.isin(texts, seen)]] = True
            for number in np.flatnonzero(~is_new).tolist():
                report.name("duplicate", f"{index.layout}/{index.file.stem}/{number}")
            seen = np.union1d(seen, texts)


def _inspected(
    name: str, pool: Pool, do: Callable[[Sequence[tuple[str, Sequence[Example]]]], Iterable]
) -> Iterator[Inspected]:
    """Have the questions of a set looked at, a batch in memory at a time."""
    done = 0
    with progress_bar(f"checking {name}") as update:
        for batch in _batches(pool.stream(_BATCH), _BATCH):
            # Questions of one database follow one another: it is opened once.
            examples = sorted((one.example for one in batch), key=lambda one: one.database)
            lots = [(name, lot) for lot in _batches(examples, _TOGETHER)]
            for inspected in chain.from_iterable(do(lots)):
                done += 1
                yield inspected
            update(done, pool.report.records, "")


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


@contextmanager
def open_inspector(
    request: Request, config: ExecutorConfig
) -> Generator[Callable[[tuple[str, Sequence[Example]]], list[Inspected]]]:
    """Make what looks at some questions of a data set, in each process of the pool."""
    job, disk = request.job, shared_cache()
    prompts = Prompts(job.prompt, job.env)
    count = _counter(request, prompts)
    rule, most = job.env.match, job.env.witnesses
    witnesses = WitnessStore(disk, match=rule, count=most) if most else None

    @lru_cache(maxsize=4_096)
    def problem(database: Path) -> str:
        try:
            check_contents(database)
        except UserError as error:
            return str(error)
        return ""

    def inspect(lot: tuple[str, Sequence[Example]]) -> list[Inspected]:
        name, examples = lot
        good = [one for one in examples if not problem(one.database)]
        asked = [one for one in good if one.gold_sql]
        found = check_golds(asked, plain, backwards, disk)
        known = dict(zip(asked, found, strict=True))
        if witnesses is not None:
            for one in asked:
                witnesses_of(one, witnesses)
        return [
            Inspected(Checked(one, (UNREADABLE,), problem(one.database)))
            if problem(one.database)
            else Inspected(
                known.get(one) or Checked(one, ("blank",)),
                len(prompts.matches(one)),
                count(name, one),
            )
            for one in examples
        ]

    with Executor(config, disk) as plain, Executor(reversed_of(config)) as backwards:
        yield inspect


def _counter(request: Request, prompts: Prompts) -> Callable[[str, Example], int | None]:
    """Make what counts the tokens of prompts, as a run does."""
    if request.tokenizer is None:
        return lambda _name, _example: None
    # Of the learner's extra, and seconds to import.
    from minirl.model.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(request.tokenizer)

    @lru_cache
    def describe(name: str) -> None:
        """Use what a data set says of its databases."""
        pool = Pool(request.sources[name], _everything(request, name))
        names = {kind.db_id for index in pool.indexes for kind in index.kinds}
        paths = {db_id: path for db_id in names if (path := pool.location.database(db_id))}
        prompts.describe(read_descriptions(pool.location, pool.source, paths))

    def count(name: str, example: Example) -> int:
        describe(name)
        return len(tokenizer.encode_chat(prompts.training(example)))

    return count


def _line(c: Checked) -> str:
    asked = {"id": c.example.id, "question_id": c.example.question_id, "db_id": c.example.db_id}
    found = {"issues": c.issues, "note": c.note, "gold_sql": c.example.gold_sql}
    accepts = {"accepts": c.correction} if c.correction else {}
    return json.dumps({**asked, **found, **accepts}, ensure_ascii=False)


def _show_counts(reports: Mapping[str, SetReport], request: Request) -> None:
    titles = ["set", "questions", "databases", "left out", "golds", "with value matches"]
    titles += ["prompt tokens: median / 95 % / longest"] * bool(request.tokenizer)
    rows = []
    for name, one in reports.items():
        report = one.pool.report
        left = Counter({issue: n for issue, n in report.found.items() if issue in one.pool.drops})
        counts = f"{report.kept:,} of {report.records:,}", f"{len(one.databases):,}"
        row = [name, *counts, _counts(left), _counts(one.issues), f"{one.with_matches:,}"]
        limit = request.job.sampler if request.sources[name].split == "train" else None
        limit = limit or request.job.evaluation_sampler
        rows.append([*row, *[_lengths(one.lengths, limit.max_prompt_tokens)] * (len(titles) - 6)])
    show_table("Questions", [titles, *rows])


def _lengths(lengths: Sequence[int], limit: int) -> str:
    """Describe the lengths of prompts, and how many are over the job's limit."""
    if not lengths:
        return "-"
    ordered = sorted(lengths)
    median, p95 = (ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 95))
    over = sum(length > limit for length in ordered)
    return f"{median:,} / {p95:,} / {ordered[-1]:,}" + f"; {over:,} over {limit:,}" * bool(over)


def _counts(issues: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {issue}" for issue, count in sorted(issues.items()))


def _remarks(reports: Mapping[str, SetReport]) -> Iterator[str]:
    """Name examples of what is wrong."""
    for name, one in reports.items():
        for issue, examples in sorted(one.examples.items()):
            if issue != "scalar":
                yield f"{name}: {one.issues[issue]:,} {issue}, such as {'; '.join(examples)}"
