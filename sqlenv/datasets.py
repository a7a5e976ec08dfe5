"""The questions of a run: read, checked, and sampled by seed from one data set or several."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Protocol

from sqlenv.config import DataConfig, Layout, SourceConfig
from sqlenv.dialects import NAMES, carry_over
from sqlenv.errors import UserError
from sqlenv.layouts import (
    FORMS,
    Form,
    Location,
    Record,
    is_file,
    locate,
    read_descriptions,
    read_records,
)
from sqlenv.records import Question, check, question_kind
from sqlenv.schema import Descriptions
from sqlenv.types import Example, Result, SqlError, Table

MISSING_DATABASE = "missing database"
BLANK_GOLD = "blank gold"
UNPARSED_GOLD = "gold without parse"
FAILING_GOLD = "failing gold"
EMPTY_GOLD = "empty gold"
OTHER_ENGINE = "not for SQLite"
NOT_CARRIED = "not carried over to SQLite"

_SPARE_SHARE = 0.25
"""Candidates of a sampled source beyond the wanted number, since golds may fail."""
_SPARE_LEAST = 64
_BATCH = 256
"""Gold queries at a time, since their results are held together."""
_NAMED_FAILURES = 3


class GoldRunner(Protocol):
    """The part of the executor that checks gold queries."""

    def gold_many(self, queries: Sequence[tuple[Path, str]], /) -> Sequence[Result]:
        """Run (database, query) pairs; results come in the same order, and may be cached."""
        ...


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What was found in one source.

    Attributes:
        read: Records in the files.
        checked: Gold queries that were executed.
        kept: Questions that the run uses.
        found: How many questions have each flaw, dropped or not.
        failures: The first gold queries that fail or cannot be carried over, and why.
    """

    name: str
    files: tuple[Path, ...]
    read: int
    checked: int
    kept: int
    found: Mapping[str, int]
    failures: tuple[str, ...]

    def line(self) -> str:
        """Say it in a line."""
        flaws = "".join(f", {count:,} {flaw}" for flaw, count in sorted(self.found.items()))
        checks = f", {self.checked:,} golds executed" if self.checked else ""
        failures = f" ({'; '.join(self.failures)})" if self.failures else ""
        return f"{self.name}: {self.kept:,} of {self.read:,} questions{checks}{flaws}{failures}"


@dataclass(frozen=True, slots=True)
class DataReport:
    """What was found in all sources.

    Attributes:
        wanted: `DataConfig.total`.
        fingerprint: Hash of the chosen questions and gold queries, the same on every machine.
    """

    sources: tuple[SourceReport, ...]
    wanted: int | None
    fingerprint: str

    @property
    def kept(self) -> int:
        """Count the questions that the run uses."""
        return sum(source.kept for source in self.sources)

    def lines(self) -> list[str]:
        """Say it in a line a source, and one more when there are too few questions."""
        lines = [source.line() for source in self.sources]
        if self.wanted and self.kept < self.wanted:
            lines.append(f"only {self.kept:,} of the {self.wanted:,} questions asked for")
        return lines


@dataclass(frozen=True, slots=True)
class LoadedData:
    """The questions of a run.

    Attributes:
        examples: In the order of the sources and of their files.
        descriptions: What columns hold, by database, for `read_schema`.
    """

    examples: tuple[Example, ...]
    report: DataReport
    descriptions: Mapping[Path, Descriptions]


def load(
    config: DataConfig, *, executor: GoldRunner | None = None, section: str = ""
) -> LoadedData:
    """Read, check and sample the questions of a run; the same settings give the same questions.

    Files are streamed and at most the sample is held in memory. With a `total`, each source gives
    its share by weight, and sources that run short are made up for by the others.

    Args:
        config: Sources, mixture and what to leave out.
        executor: Runs the gold queries that come into the choice; None trusts them all.
        section: What a job's config calls these settings, such as `data.train`, for messages.

    Raises:
        UserError: A source is not as its layout says, or no question is left.
    """
    key = f"{section}.drop_missing_database".lstrip(".")
    advice = f"set {key}=true to leave such questions out"
    pools = [_Pool(source, locate(source), config, executor, advice) for source in config.sources]
    for pool in pools:
        _open(pool)
    _fill(pools, config.total)
    chosen = [example for pool in pools for _, example in sorted(pool.kept, key=itemgetter(0))]
    reports = tuple(pool.report() for pool in pools)
    if not chosen:
        raise UserError(f"no question is left; {'; '.join(r.line() for r in reports)}")
    names = Counter(example.id for example in chosen)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(f"the same questions come twice in sources, the first is {twice[0]}")
    descriptions: dict[Path, Descriptions] = {}
    for pool in pools:
        used = {example.db_id: example.database for _, example in pool.kept}
        descriptions |= read_descriptions(pool.location, pool.source, used)
    report = DataReport(reports, config.total, fingerprint(chosen))
    return LoadedData(tuple(chosen), report, descriptions)


def read_all(source: SourceConfig) -> tuple[Example, ...]:
    """Read every question of a source in the order of its files, whatever its gold query.

    Raises:
        UserError: The source is not as its layout says, a database is not there, or there is no
            question for SQLite.
    """
    advice = "take such questions out of the file"
    pool = _Pool(source, locate(source), DataConfig(sources=(source,)), None, advice)
    pool.drops = {OTHER_ENGINE}
    if examples := tuple(pool.questions()):
        return examples
    raise UserError(f"no question is left; {pool.report().line()}")


_Candidate = tuple[int, Example]
"""Position among the source's questions, and the question."""


@dataclass(slots=True)
class _Pool:
    """One source: candidates in the order of the draw, and those that were kept."""

    source: SourceConfig
    location: Location
    config: DataConfig
    executor: GoldRunner | None
    advice: str  # what to do about a missing database, but unpacking it
    drops: set[str] = field(init=False)  # flaws that leave a question out
    found: Counter[str] = field(default_factory=Counter)
    waiting: deque[_Candidate] = field(default_factory=deque)
    kept: list[_Candidate] = field(default_factory=list)
    read: int = 0
    checked: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drops = {MISSING_DATABASE, OTHER_ENGINE, NOT_CARRIED}
        self.drops |= {BLANK_GOLD, FAILING_GOLD} if self.config.drop_failing_gold else set()
        self.drops |= {EMPTY_GOLD} if self.config.drop_empty_gold else set()

    @property
    def name(self) -> str:
        return f"{self.source.layout}/{self.source.file or self.source.split}"

    @property
    def spent(self) -> bool:
        return not self.waiting or len(self.kept) == self.source.limit

    def questions(self) -> Iterator[Example]:
        """Stream the questions that have a database, and a gold query where one is needed."""
        database_of = cache(self.location.database)
        for file in self.location.files:
            for index, record in enumerate(read_records(file)):
                self.read += 1
                example, flaws = _example(self.source, file, index, record, database_of)
                if not flaws and isinstance(refused := _gold(example), SqlError):
                    flaws = [NOT_CARRIED]
                    self._note(example, refused.message)
                self.found.update(flaws)
                if MISSING_DATABASE in flaws and not self.config.drop_missing_database:
                    raise UserError(f"{_no_database(self.location, example)}, or {self.advice}")
                if not self.drops.intersection(flaws):
                    yield example

    def draw(self, count: int) -> None:
        """Keep `count` more questions, or as many as there are."""
        wanted = len(self.kept) + count
        wanted = min(wanted, self.source.limit or wanted)
        while self.waiting and len(self.kept) < wanted:
            size = min(wanted - len(self.kept), len(self.waiting), _BATCH)
            self.kept += self._checked([self.waiting.popleft() for _ in range(size)])

    def report(self) -> SourceReport:
        return SourceReport(
            name=self.name,
            files=self.location.files,
            read=self.read,
            checked=self.checked,
            kept=len(self.kept),
            found=dict(self.found),
            failures=tuple(self.failures),
        )

    def _checked(self, batch: Sequence[_Candidate]) -> Iterator[_Candidate]:
        """Run the gold queries of some candidates and pass on those that may stay."""
        if self.executor is None:
            return iter(batch)
        queries = [(example.database, str(_gold(example))) for _, example in batch]
        results = iter(self.executor.gold_many([pair for pair in queries if pair[1]]))
        flaws = [
            self._flaw(example, next(results)) if example.gold_sql else "" for _, example in batch
        ]
        return (
            candidate
            for candidate, flaw in zip(batch, flaws, strict=True)
            if flaw not in self.drops
        )

    def _flaw(self, example: Example, result: Result) -> str:
        self.checked += 1
        if isinstance(result, Table) and result.rows:
            return ""
        flaw = EMPTY_GOLD if isinstance(result, Table) else FAILING_GOLD
        self.found[flaw] += 1
        if flaw == FAILING_GOLD:
            words = result.message if isinstance(result, SqlError) else type(result).__name__
            self._note(example, words)
        return flaw

    def _note(self, example: Example, words: str) -> None:
        if len(self.failures) < _NAMED_FAILURES:
            self.failures.append(f"{example.id}: {words}")


def _open(pool: _Pool) -> None:
    """Read a source: all of it in file order, or a sample in the order of the draw."""
    wanted = min(pool.source.limit or math.inf, pool.config.total or math.inf)
    if wanted == math.inf:
        pool.waiting.extend(enumerate(pool.questions()))
        return
    spare = 0 if pool.executor is None else max(_SPARE_LEAST, int(wanted * _SPARE_SHARE))
    # One random number a question, the smallest win: one pass, and a larger sample contains a
    # smaller one.
    rng = Random(f"{pool.config.seed} {pool.name}")
    numbered = ((rng.random(), *pair) for pair in enumerate(pool.questions()))
    drawn = heapq.nsmallest(int(wanted) + spare, numbered)
    pool.waiting.extend((position, example) for _, position, example in drawn)


def _fill(pools: Sequence[_Pool], total: int | None) -> None:
    """Draw from all pools by weight until there are enough or none has more."""
    if total is None:
        for pool in pools:
            pool.draw(len(pool.waiting))
        return
    while missing := total - sum(len(pool.kept) for pool in pools):
        open_pools = [pool for pool in pools if not pool.spent]
        if not open_pools:
            return
        shares = _shares(missing, [pool.source.weight for pool in open_pools])
        for pool, share in zip(open_pools, shares, strict=True):
            pool.draw(share)


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Split a whole number by weight, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _gold(example: Example) -> str | SqlError:
    """Write the gold query for SQLite."""
    return carry_over(example.gold_sql, example.dialect)


def _example(
    source: SourceConfig,
    file: Path,
    index: int,
    record: Record,
    database_of: Callable[[str], Path | None],
) -> tuple[Example, list[str]]:
    """Read a record, and name its flaws."""
    layout: Layout = source.layout
    form = FORMS[layout]
    kind = question_kind(question=form.question, gold=form.gold, evidence=form.evidence)
    asked = check(
        kind,
        record,
        where=f"{file}: record {index}",
        advice=f"correct it if the layout is really {layout}",
    )
    name = asked.instance_id or f"{file.stem}/{index}"
    database, gold = database_of(asked.db_id), (asked.gold or "").strip()
    dialect = NAMES.get((asked.dialect or source.dialect).lower())
    is_local = asked.instance_id is None or name.startswith("local")
    other_engine = not (is_local and dialect)
    flaws = {
        OTHER_ENGINE: other_engine,
        MISSING_DATABASE: database is None and not other_engine,
        BLANK_GOLD: not gold,
        UNPARSED_GOLD: asked.parsed is None,
    }
    example = Example(
        id=f"{layout}/{name}",
        question=asked.question.strip(),
        db_id=asked.db_id,
        database=database or Path(asked.db_id),
        gold_sql=gold,
        evidence=_evidence(form, file.parent, asked),
        difficulty=asked.difficulty or asked.sql_complexity or asked.parsed or "",
        dialect=dialect or "sqlite",
        source=layout,
    )
    return example, [flaw for flaw, present in flaws.items() if present]


def _evidence(form: Form, folder: Path, asked: Question) -> str:
    """Read the external knowledge; Spider 2 names a file that holds it."""
    text = (asked.evidence or "").strip()
    document = folder / form.documents / text
    if form.documents and text and is_file(document):
        return document.read_text(encoding="utf-8", errors="replace").strip()
    return text


def _no_database(location: Location, example: Example) -> str:
    expected = location.databases[0] / example.db_id / f"{example.db_id}.sqlite"
    return f"{expected} is not there, but question {example.id} needs it; unpack it"


def fingerprint(examples: Sequence[Example]) -> str:
    """Hash questions and gold queries: the same on every machine, whatever the paths."""
    digest = hashlib.sha256()
    for e in examples:
        other = [e.dialect] if e.dialect != "sqlite" else []
        fields = [e.id, e.db_id, e.question, e.evidence, e.gold_sql, *other]
        digest.update(json.dumps(fields).encode())
    return digest.hexdigest()[:16]
