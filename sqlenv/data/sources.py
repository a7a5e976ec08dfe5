"""One data set of a mixture: its questions drawn, checked, and counted by what is wrong."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, islice
from pathlib import Path

import numpy as np

from exchange import UserError
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.corrections import Corrections, read_corrections
from sqlenv.data.index import QuestionIndex, RecordKind, index_of, level_of
from sqlenv.data.layouts import DATASETS, Location, check_open, is_file, locate
from sqlenv.data.records import QuestionRecord
from sqlenv.dialects import NAMES, transpile
from sqlenv.executor import Executor
from sqlenv.types import Example, Result, SqlError, Table, describe_failure

BATCH = 256
"""Questions that are checked at a time: the results of their gold queries are held together."""
_NAMED_FAILURES = 3

MISSING_DATABASE = "missing database"
OTHER_ENGINE = "not for SQLite"
OTHER_KIND = "of other levels or styles"
NOT_TRANSPILED = "not transpiled to SQLite"
EXCLUDED_DATABASE = "in exclude_databases"


@dataclass(frozen=True, slots=True)
class Checked:
    """A question, what is wrong with it, and why; where ties leave its gold query undecided,
    `correction` accepts every answer that they allow (`sqlenv.data.corrections`).
    """

    example: Example
    issues: tuple[str, ...] = ()
    note: str = ""
    correction: Mapping[str, str] | None = None


Check = Callable[[Sequence[Example]], Iterable[Checked]]
"""Looks at the gold queries of some questions; answers in order."""
Accept = Callable[[str], bool]
"""Tells whether questions about a database, by its name, are candidates at all."""
Candidate = tuple[int, Checked]
"""Position among the source's questions, and the question."""


@dataclass(slots=True)
class SourceReport:
    """What was found in one source: its records, golds executed, questions kept.

    `found` counts each issue, dropped or not; `failures` are the first gold queries that fail or
    cannot be transpiled, and why.
    """

    name: str
    records: int = 0
    checked: int = 0
    kept: int = 0
    found: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Say it in a line."""
        issues = "".join(f", {count:,} {issue}" for issue, count in sorted(self.found.items()))
        checks = f", {self.checked:,} golds executed" if self.checked else ""
        failures = f" ({'; '.join(self.failures)})" if self.failures else ""
        return f"{self.name}: {self.kept:,} of {self.records:,} questions{checks}{issues}{failures}"


@dataclass(slots=True)
class Pool:
    """Candidates of one source in the order of the draw, of which some are kept.

    A question has a position among all records of its source; only those drawn are read.

    Attributes:
        check: Looks at gold queries; None trusts them all.
        accept: Which databases' questions are candidates at all.
        advice: What to do about a missing database, but unpacking it.
        seen: Digests of questions that came before, in this source or another one.
        drops: Issues that leave a question out.
    """

    source: SourceConfig
    config: DataConfig
    check: Check | None = None
    accept: Accept = lambda _db_id: True
    advice: str = ""
    seen: set[int] = field(default_factory=set)
    corrections: Corrections | None = field(default=None, init=False)
    location: Location = field(init=False)
    indexes: list[QuestionIndex] = field(init=False)
    drops: set[str] = field(init=False)
    report: SourceReport = field(init=False)
    waiting: deque[int] = field(default_factory=deque)
    kept: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.location = locate(self.source)
        self.indexes = [index_of(file, self.location.layout) for file in self.location.files]
        self.report = SourceReport(self.name, sum(map(len, self.indexes)))
        self.drops = {MISSING_DATABASE, OTHER_ENGINE, NOT_TRANSPILED, OTHER_KIND, EXCLUDED_DATABASE}
        self.drops |= {*self.config.exclude}
        if self.source.corrections:
            self.corrections = read_corrections(self.source.corrections)
            everything = self._read(range(self.report.records))
            self.corrections.check(checked.example for _, checked in everything)

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

    def candidates(self) -> Iterator[tuple[int, str]]:
        """Give the positions of questions that may be used, and their databases; count the others.

        Raises:
            UserError: A database is missing, and its questions are not to be left out.
        """
        database_of = cache(self.location.database)
        first = 0
        for index in self.indexes:
            issues = [self._issues(kind, database_of) for kind in index.kinds]
            for code, count in enumerate(np.bincount(index.rows["kind"], minlength=len(issues))):
                self.report.found.update(dict.fromkeys(issues[code], int(count)))
                if MISSING_DATABASE in issues[code] and not self.config.drop_missing_database:
                    raise UserError(f"{self._no_database(index, code)}, or {self.advice}")
            pairs = zip(index.kinds, issues, strict=True)
            may = [
                self.drops.isdisjoint(found) and self.accept(kind.db_id) for kind, found in pairs
            ]
            for number in np.flatnonzero(np.array(may)[index.rows["kind"]]).tolist():
                if "duplicate" not in self.drops or self._is_new(int(index.rows["text"][number])):
                    yield first + number, index.kind(number).db_id
            first += len(index)

    def draw(self, count: int) -> None:
        """Keep `count` more questions, or as many as there are."""
        wanted = len(self.kept) + count
        wanted = min(wanted, self.source.limit or wanted)
        while self.waiting and len(self.kept) < wanted:
            size = min(wanted - len(self.kept), len(self.waiting), BATCH)
            self.kept += self._checked([self.waiting.popleft() for _ in range(size)])

    def stream(self, batch: int = BATCH) -> Iterator[Checked]:
        """Yield the questions of the whole source that may stay, a batch in memory at a time."""
        positions = (position for position, _ in self.candidates())
        while part := list(islice(positions, batch)):
            for _, question in self._checked(part):
                yield question

    def _is_new(self, text: int) -> bool:
        is_new = text not in self.seen
        self.seen.add(text)
        self.report.found["duplicate"] += not is_new
        return is_new

    def _issues(self, kind: RecordKind, database_of: Callable[[str], Path | None]) -> list[str]:
        is_level = not self.source.levels or kind.level in self.source.levels
        if kind.db_id in self.config.exclude_databases:
            return [EXCLUDED_DATABASE]
        if not is_level or kind.style in self.source.exclude_styles:
            return [OTHER_KIND]
        if not kind.is_local or (kind.dialect and kind.dialect not in NAMES):
            return [OTHER_ENGINE]
        found = {MISSING_DATABASE: database_of(kind.db_id) is None, "blank": kind.is_blank}
        return [issue for issue, is_there in found.items() if is_there]

    def _read(self, positions: Sequence[int]) -> Iterator[Candidate]:
        """Read questions, in the order of their positions."""
        ends = list(accumulate(map(len, self.indexes)))
        for index, end in zip(self.indexes, ends, strict=True):
            first = end - len(index)
            own = sorted(position for position in positions if first <= position < end)
            for number, asked in index.records(position - first for position in own):
                yield first + number, Checked(self._example(index.file, number, asked))

    def _checked(self, positions: Sequence[int]) -> Iterator[Candidate]:
        """Look at the gold queries of some candidates, and pass on those that may stay."""
        read = dict(self._read(positions))
        lay = self.corrections.lay if self.corrections else lambda example: example
        drawn = [(position, Checked(lay(read[position].example))) for position in positions]
        for number, (position, one) in enumerate(drawn):
            if one.example.dialect != "sqlite" and isinstance(
                no := gold_for_sqlite(one.example), SqlError
            ):
                drawn[number] = (position, Checked(one.example, (NOT_TRANSPILED,), no.message))
        asked = [one.example for _, one in drawn if not one.issues and one.example.gold_sql]
        found = iter(self.check(asked) if self.check else map(Checked, asked))
        self.report.checked += len(asked) if self.check else 0
        for position, one in drawn:
            is_asked = not one.issues and one.example.gold_sql
            checked = next(found) if is_asked else one
            self.report.found.update(checked.issues)
            if {NOT_TRANSPILED, "failing"}.intersection(checked.issues):
                self._refuse_correction(checked)
                self._note(checked.example, checked.note)
            if self.drops.isdisjoint(checked.issues):
                self.report.kept += 1
                yield position, checked

    def _refuse_correction(self, checked: Checked) -> None:
        """Refuse a corrected gold query that fails: nothing is corrected by it."""
        example = checked.example
        if self.corrections and example.question_id in self.corrections.by_id:
            where = self.corrections.place(example)
            raise UserError(f"{where}: its gold query fails ({checked.note}); correct it")

    def _note(self, example: Example, words: str) -> None:
        if len(self.report.failures) < _NAMED_FAILURES:
            self.report.failures.append(f"{example.id}: {words}")

    def _example(self, file: Path, number: int, asked: QuestionRecord) -> Example:
        layout = self.source.layout
        spec = DATASETS[layout]
        evidence = (asked.evidence or "").strip()
        document = file.parent / spec.documents / evidence
        if spec.documents and evidence and is_file(document):  # Spider 2 names a file that holds it
            evidence = document.read_text(encoding="utf-8", errors="replace").strip()
        name = asked.instance_id or f"{file.stem}/{number}"
        own = asked.question_id if asked.question_id is not None else asked.instance_id
        return Example(
            id=f"{layout}/{name}",
            question=asked.question.strip(),
            db_id=asked.db_id,
            database=self.location.database(asked.db_id) or Path(asked.db_id),
            gold_sql=(asked.gold_sql or "").strip(),
            evidence=evidence,
            difficulty=level_of(layout, asked),
            dialect=NAMES.get((asked.dialect or self.source.dialect).lower(), "sqlite"),
            source=layout,
            question_id=str(number if own is None else own),
            alternatives=asked.alternatives,
            grading_method=asked.grading_method or "",
        )

    def _no_database(self, index: QuestionIndex, code: int) -> str:
        for folder in self.location.databases:
            check_open(folder)
        db_id, number = index.kinds[code].db_id, int(np.argmax(index.rows["kind"] == code))
        expected = self.location.databases[0] / db_id / f"{db_id}.sqlite"
        return f"{expected} is not there, but {index.file}: record {number} needs it; unpack it"


def by_running(executor: Executor | None) -> Check | None:
    """Make a check that runs gold queries: they fail, return nothing, or a single value."""
    if executor is None:
        return None

    def look(examples: Sequence[Example]) -> Iterator[Checked]:
        queries = [(example.database, str(gold_for_sqlite(example))) for example in examples]
        results = executor.gold_many(queries)
        for example, result in zip(examples, results, strict=True):
            yield Checked(example, issues_of(result), describe_failure(result))

    return look


def issues_of(result: Result) -> tuple[str, ...]:
    """Say what is wrong with a gold query whose result this is."""
    if not isinstance(result, Table):
        return ("failing",)
    if not result.rows:
        return ("empty",)
    return ("scalar",) * (len(result.rows) == result.width == 1)


def gold_for_sqlite(example: Example) -> str | SqlError:
    """Write the gold query for SQLite."""
    return transpile(example.gold_sql, example.dialect)
