"""One data set of a mixture: its questions drawn, checked, and counted by what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from exchange import UserError
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.corrections import Corrections, read_corrections
from sqlenv.data.index import QuestionIndex, RecordKind, first_times, index_of, level_of
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
UNUSABLE = frozenset(
    {MISSING_DATABASE, OTHER_ENGINE, OTHER_KIND, NOT_TRANSPILED, EXCLUDED_DATABASE}
)
"""Issues of questions that no job can ask."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A question, what is wrong with it, and why."""

    example: Example
    issues: tuple[str, ...] = ()
    note: str = ""


Check = Callable[[Sequence[Example]], Iterable[Checked]]
"""Looks at the gold queries of some questions; answers in order."""
Accept = Callable[[str], bool]
"""Tells whether questions about a database, by its name, are candidates at all."""


@dataclass(slots=True)
class Pool:
    """Questions of one source that may be used, drawn one after the other.

    A question has a position among all records of its source; only those drawn are read. They are
    drawn in the order of the files, or where not all are wanted in one by seed.

    Attributes:
        check: Looks at gold queries; None trusts them all.
        accept: Which databases' questions may be used at all.
        advice: What to do about a missing database, but unpacking it.
        seen: Digests of questions that came before, in other sources.
        drops: Issues that leave a question out; by default those that the config names, and
            whatever keeps a query from being run.
        waiting: Positions of those that are not drawn yet.
        found: How many questions have each issue, left out or not.
        checked, kept: How many gold queries were executed, and how many questions drawn.
        failures: The first gold queries that fail or cannot be transpiled, and why.
    """

    source: SourceConfig
    config: DataConfig
    check: Check | None = None
    accept: Accept = lambda _db_id: True
    advice: str = ""
    seen: list[np.ndarray] = field(default_factory=list)
    drops: frozenset[str] = frozenset()
    corrections: Corrections | None = field(default=None, init=False)
    location: Location = field(init=False)
    index: QuestionIndex = field(init=False)
    waiting: np.ndarray = field(init=False)
    found: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    kept: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.location = locate(self.source)
        self.index = index_of(self.location.files, self.source.layout)
        self.drops = self.drops or UNUSABLE.union(self.config.exclude)
        if self.source.corrections:
            corrections = read_corrections(self.source.corrections)
            corrections.check(example for _, example in self._read(range(len(self.index))))
            self.corrections = corrections
        self.waiting = self._candidates()
        if self.source.limit or self.config.total:
            # One random number a question, the smallest win: a larger sample contains a smaller.
            rng = Random(f"{self.config.seed} {self.name}")
            numbers = np.fromiter((rng.random() for _ in self.waiting), float)
            self.waiting = self.waiting[np.argsort(numbers, kind="stable")]

    @property
    def name(self) -> str:
        """Name the source, the same on every machine."""
        of = "-".join(self.source.levels).replace(" ", "_")
        parts = (self.source.layout, self.source.file or self.source.split, of)
        return "/".join(filter(None, parts))

    @property
    def is_spent(self) -> bool:
        """Tell whether there is nothing more to draw."""
        return not len(self.waiting) or self.kept == self.source.limit

    def line(self) -> str:
        """Say in a line what was found."""
        issues = "".join(f", {count:,} {issue}" for issue, count in sorted(self.found.items()))
        checks = f", {self.checked:,} golds executed" if self.checked else ""
        failures = f" ({'; '.join(self.failures)})" if self.failures else ""
        counts = f"{self.kept:,} of {len(self.index):,} questions"
        return f"{self.name}: {counts}{checks}{issues}{failures}"

    def count_by_database(self) -> Counter[str]:
        """Count the questions that are not drawn yet by the names of their databases."""
        counts = Counter[str]()
        codes = self.index.rows["kind"][self.waiting]
        for kind, count in zip(self.index.kinds, np.bincount(codes).tolist(), strict=False):
            if count:
                counts[kind.db_id] += count
        return counts

    def draw(self, count: int | None = None) -> Iterator[tuple[int, Example]]:
        """Draw so many questions that may stay, or as many as there are, with their positions.

        At most `BATCH` are in memory at a time.
        """
        bounds = (count, self.source.limit and self.source.limit - self.kept)
        wanted = min((bound for bound in bounds if bound is not None), default=len(self.waiting))
        while wanted and len(self.waiting):
            positions, self.waiting = np.split(self.waiting, [min(wanted, BATCH)])
            for question in self._sound(positions.tolist()):
                wanted -= 1
                yield question

    def _candidates(self) -> np.ndarray:
        """Find the positions of questions that may be used; count the others.

        Raises:
            UserError: A database is missing, and its questions are not to be left out.
        """
        database_of = cache(self.location.database)
        kinds, codes = self.index.kinds, self.index.rows["kind"]
        issues = [self._issues(kind, database_of) for kind in kinds]
        for code, count in enumerate(np.bincount(codes).tolist()):
            self.found.update(dict.fromkeys(issues[code], count))
            if MISSING_DATABASE in issues[code] and not self.config.drop_missing_database:
                raise UserError(f"{self._no_database(code)}, or {self.advice}")
        may = [
            self.drops.isdisjoint(found) and self.accept(kind.db_id)
            for kind, found in zip(kinds, issues, strict=True)
        ]
        positions = np.flatnonzero(np.array(may)[codes])
        if "duplicate" not in self.drops:
            return positions
        is_first = first_times(self.index.rows["text"][positions], self.seen)
        self.found["duplicate"] += int(np.sum(~is_first))
        return positions[is_first]

    def _issues(self, kind: RecordKind, database_of: Callable[[str], Path | None]) -> set[str]:
        is_level = not self.source.levels or kind.level in self.source.levels
        if kind.db_id in self.config.exclude_databases:
            return {EXCLUDED_DATABASE}
        if not is_level or kind.style in self.source.exclude_styles:
            return {OTHER_KIND}
        if not kind.is_local or (kind.dialect and kind.dialect not in NAMES):
            return {OTHER_ENGINE}
        found = {MISSING_DATABASE: database_of(kind.db_id) is None, "blank": kind.is_blank}
        return {issue for issue, is_there in found.items() if is_there}

    def _read(self, positions: Iterable[int]) -> Iterator[tuple[int, Example]]:
        """Read questions as they are corrected, in the order of their positions."""
        for position, record in self.index.records(positions):
            example = self._example(*self.index.place(position), record)
            yield position, self.corrections.lay(example) if self.corrections else example

    def _sound(self, positions: Sequence[int]) -> Iterator[tuple[int, Example]]:
        """Look at the gold queries of some questions, and pass on those that may stay."""
        read = dict(self._read(positions))
        found = {position: _look(read[position]) for position in positions}
        if self.check is not None:
            asked = [at for at, one in found.items() if one.example.gold_sql and not one.issues]
            self.checked += len(asked)
            found |= zip(asked, self.check([read[position] for position in asked]), strict=True)
        for position, one in found.items():
            self.found.update(one.issues)
            if {NOT_TRANSPILED, "failing"}.intersection(one.issues):
                self._refuse_correction(one)
                if len(self.failures) < _NAMED_FAILURES:
                    self.failures.append(f"{one.example.id}: {one.note}")
            if self.drops.isdisjoint(one.issues):
                self.kept += 1
                yield position, one.example

    def _refuse_correction(self, checked: Checked) -> None:
        """Refuse a corrected gold query that fails: nothing is corrected by it."""
        example = checked.example
        if self.corrections and example.question_id in self.corrections.by_id:
            where = self.corrections.place(example)
            raise UserError(f"{where}: its gold query fails ({checked.note}); correct it")

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

    def _no_database(self, code: int) -> str:
        for folder in self.location.databases:
            check_open(folder)
        db_id = self.index.kinds[code].db_id
        file, number = self.index.place(int(np.argmax(self.index.rows["kind"] == code)))
        expected = self.location.databases[0] / db_id / f"{db_id}.sqlite"
        return f"{expected} is not there, but {file}: record {number} needs it; unpack it"


def _look(example: Example) -> Checked:
    """Look at a gold query without running it."""
    if example.dialect != "sqlite" and isinstance(no := gold_for_sqlite(example), SqlError):
        return Checked(example, (NOT_TRANSPILED,), no.message)
    return Checked(example)


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
