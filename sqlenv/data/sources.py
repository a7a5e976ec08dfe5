"""One data set of a mixture: its questions streamed, checked, and counted by what is wrong."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data import prepared
from sqlenv.data.issues import (
    BLANK_GOLD,
    EMPTY_GOLD,
    EXCLUDED_DATABASE,
    FAILING_GOLD,
    MISSING_DATABASE,
    NOT_TRANSPILED,
    OTHER_ENGINE,
    OTHER_KIND,
    Checked,
)
from sqlenv.data.layouts import DATASETS, Location, check_open, is_file, locate, other_dataset
from sqlenv.data.records import QuestionRecord, Record, check, read_records
from sqlenv.dialects import NAMES, transpile
from sqlenv.errors import UserError
from sqlenv.evaluators.hardness import grade
from sqlenv.executor import Executor
from sqlenv.types import Example, Result, SqlError, Table

BATCH = 256
"""Questions that are checked at a time: the results of their gold queries are held together."""
_NAMED_FAILURES = 3

Check = Callable[[Sequence[Example]], Iterable[Checked]]
"""Looks at the gold queries of some questions; answers in order."""
Accept = Callable[[Example], bool]
Candidate = tuple[int, Checked]
"""Position among the source's questions, and the question; its issues are known if prepared."""


@dataclass(slots=True)
class SourceReport:
    """What was found in one source: records read, golds executed, questions kept.

    `found` counts each issue, dropped or not; `failures` are the first gold queries that fail or
    cannot be transpiled, and why.
    """

    name: str
    read: int = 0
    checked: int = 0
    kept: int = 0
    found: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Say it in a line."""
        issues = "".join(f", {count:,} {issue}" for issue, count in sorted(self.found.items()))
        checks = f", {self.checked:,} golds executed" if self.checked else ""
        failures = f" ({'; '.join(self.failures)})" if self.failures else ""
        return f"{self.name}: {self.kept:,} of {self.read:,} questions{checks}{issues}{failures}"


@dataclass(slots=True)
class Pool:
    """Candidates of one source in the order of the draw, of which some are kept.

    Attributes:
        check: Looks at gold queries; None trusts them all.
        accept: Which questions are candidates at all.
        advice: What to do about a missing database, but unpacking it.
        drops: Issues that leave a question out.
    """

    source: SourceConfig
    config: DataConfig
    check: Check | None = None
    accept: Accept = lambda _example: True
    advice: str = ""
    batch: int = BATCH
    location: Location = field(init=False)
    drops: set[str] = field(init=False)
    report: SourceReport = field(init=False)
    waiting: deque[Candidate] = field(default_factory=deque)
    kept: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.location = locate(self.source)
        self.report = SourceReport(self.name)
        self.drops = {MISSING_DATABASE, OTHER_ENGINE, NOT_TRANSPILED, OTHER_KIND, EXCLUDED_DATABASE}
        self.drops |= {BLANK_GOLD, FAILING_GOLD} if self.config.drop_failing_gold else set()
        self.drops |= {EMPTY_GOLD} if self.config.drop_empty_gold else set()

    @property
    def name(self) -> str:
        """Name the source, the same on every machine."""
        of = "-".join(self.source.levels).replace(" ", "_")
        parts = (self.source.layout, self.source.file or self.source.split, of)
        return "/".join(filter(None, parts))

    @property
    def most(self) -> int | None:
        """Say how many questions are drawn at most; None for all."""
        bounds = filter(None, (self.source.limit, self.config.total))
        return min(bounds, default=None)

    @property
    def spent(self) -> bool:
        """Tell whether there is nothing more to draw."""
        return not self.waiting or len(self.kept) == self.source.limit

    def questions(self) -> Iterator[Checked]:
        """Stream the questions that have a database, and a gold query where one is needed."""
        database_of = cache(self.location.database)
        for file in self.location.files:
            before = self.report.read
            for index, record in enumerate(read_records(file)):
                self.report.read += 1
                checked, issues = self._read_question(file, index, record, database_of)
                if checked.example.db_id in self.config.exclude_databases:
                    issues = [EXCLUDED_DATABASE]
                self.report.found.update(issues)
                if MISSING_DATABASE in issues and not self.config.drop_missing_database:
                    problem = _no_database(self.location, checked.example)
                    raise UserError(f"{problem}, or {self.advice}")
                if not self.drops.intersection(issues) and self.accept(checked.example):
                    yield checked
            if self.location.layout == "prepared":
                prepared.check_count(self.location.root, file, self.report.read - before)

    def draw(self, count: int) -> None:
        """Keep `count` more questions, or as many as there are."""
        wanted = len(self.kept) + count
        wanted = min(wanted, self.source.limit or wanted)
        while self.waiting and len(self.kept) < wanted:
            size = min(wanted - len(self.kept), len(self.waiting), self.batch)
            self.kept += self._checked([self.waiting.popleft() for _ in range(size)])

    def stream(self) -> Iterator[Checked]:
        """Yield the questions of the whole source that may stay, a batch in memory at a time."""
        questions = enumerate(self.questions())
        while batch := list(islice(questions, self.batch)):
            for _, question in self._checked(batch):
                yield question

    def _read_question(
        self, file: Path, index: int, record: Record, database_of: Callable[[str], Path | None]
    ) -> tuple[Checked, list[str]]:
        is_new = self.location.layout != "prepared"
        if is_new:
            checked, issues = _question(self.source, file, index, record, database_of)
        else:
            checked = prepared.read_question(file, index, record)
            issues = [issue for issue in checked.issues if issue == BLANK_GOLD]
        is_level = not self.source.levels or checked.example.difficulty in self.source.levels
        if not is_level or checked.style in self.source.exclude_styles:
            return checked, [OTHER_KIND]
        if is_new and not issues and isinstance(refused := gold(checked.example), SqlError):
            self._note(checked.example, refused.message)
            return checked, [NOT_TRANSPILED]
        return checked, issues

    def _checked(self, batch: Sequence[Candidate]) -> Iterator[Candidate]:
        """Look at the gold queries of some candidates, and pass on those that may stay."""
        found = self._look([candidate for _, candidate in batch])
        for (position, _), checked in zip(batch, found, strict=True):
            # Blank ones were counted as they were read.
            self.report.found.update(issue for issue in checked.issues if issue != BLANK_GOLD)
            if FAILING_GOLD in checked.issues:
                self._note(checked.example, checked.note)
            if not self.drops.intersection(checked.issues):
                self.report.kept += 1
                yield position, checked

    def _look(self, candidates: Sequence[Checked]) -> Iterable[Checked]:
        if self.check is None or self.location.layout == "prepared":
            return candidates
        self.report.checked += sum(bool(candidate.example.gold_sql) for candidate in candidates)
        found = self.check([candidate.example for candidate in candidates])
        pairs = zip(found, candidates, strict=True)
        return (replace(one, style=candidate.style) for one, candidate in pairs)

    def _note(self, example: Example, words: str) -> None:
        if len(self.report.failures) < _NAMED_FAILURES:
            self.report.failures.append(f"{example.id}: {words}")


def by_running(executor: Executor | None) -> Check | None:
    """Make a check that runs gold queries and tells those that fail or return nothing."""
    if executor is None:
        return None

    def look(examples: Sequence[Example]) -> Iterator[Checked]:
        queries = [(example.database, str(gold(example))) for example in examples]
        results = iter(executor.gold_many([pair for pair in queries if pair[1]]))
        for example in examples:
            yield _judged(example, next(results)) if example.gold_sql else Checked(example)

    return look


def _judged(example: Example, result: Result) -> Checked:
    if isinstance(result, Table):
        return Checked(example, () if result.rows else (EMPTY_GOLD,))
    words = result.message if isinstance(result, SqlError) else type(result).__name__
    return Checked(example, (FAILING_GOLD,), words)


def gold(example: Example) -> str | SqlError:
    """Write the gold query for SQLite."""
    return transpile(example.gold_sql, example.dialect)


def _question(
    source: SourceConfig,
    file: Path,
    index: int,
    record: Record,
    database_of: Callable[[str], Path | None],
) -> tuple[Checked, list[str]]:
    layout = source.layout
    spec = DATASETS[layout]
    where = f"{file}: record {index}"
    if other := other_dataset(layout, record):
        raise UserError(
            f"{where} is of {other}, not of {layout} (it has {', '.join(list(record)[:8])}); "
            f"give {layout}'s own file, or correct `layout`"
        )
    names = {"question": spec.question, "query": spec.gold, "evidence": spec.evidence}
    advice = f"correct it if the layout is really {layout}"
    asked = check(QuestionRecord, record, where=where, advice=advice, names=names)
    name = asked.instance_id or f"{file.stem}/{index}"
    database, written = database_of(asked.db_id), (asked.query or "").strip()
    dialect = NAMES.get((asked.dialect or source.dialect).lower())
    evidence = (asked.evidence or "").strip()
    document = file.parent / spec.documents / evidence
    if spec.documents and evidence and is_file(document):  # Spider 2 names a file that holds it
        evidence = document.read_text(encoding="utf-8", errors="replace").strip()
    level = grade(written) if spec.is_graded else None
    example = Example(
        id=f"{layout}/{name}",
        question=asked.question.strip(),
        db_id=asked.db_id,
        database=database or Path(asked.db_id),
        gold_sql=written,
        evidence=evidence,
        difficulty=asked.difficulty or asked.sql_complexity or level or "",
        dialect=dialect or "sqlite",
        source=layout,
    )
    is_local = asked.instance_id is None or name.startswith("local")
    if not (is_local and dialect):
        return Checked(example, style=asked.question_style or ""), [OTHER_ENGINE]
    issues = {MISSING_DATABASE: database is None, BLANK_GOLD: not written}
    found = [issue for issue, present in issues.items() if present]
    return Checked(example, style=asked.question_style or ""), found


def _no_database(location: Location, example: Example) -> str:
    for folder in location.databases:
        check_open(folder)
    expected = location.databases[0] / example.db_id / f"{example.db_id}.sqlite"
    return f"{expected} is not there, but question {example.id} needs it; unpack it"
