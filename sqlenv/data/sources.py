"""One data set of a mixture: its questions drawn, checked, and counted by what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import apsw

from minirl.exchange import UserError
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.corrections import Corrections, read_corrections
from sqlenv.data.layouts import DATASETS, Location, check_open, is_file, locate
from sqlenv.data.questions import QuestionTable, level_of, open_tables
from sqlenv.data.records import QuestionRecord
from sqlenv.dialects import NAMES, run_many, transpile
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


_PRIME = 2**31 - 1
_JUDGED = """
WITH judged AS (SELECT *, CASE
    WHEN db_id IN (SELECT value FROM json_each(:excluded)) THEN 'in exclude_databases'
    WHEN :levels <> '[]' AND level NOT IN (SELECT value FROM json_each(:levels))
        OR style IN (SELECT value FROM json_each(:styles)) THEN 'of other levels or styles'
    WHEN NOT is_local OR dialect NOT IN (SELECT value FROM json_each(:dialects))
        THEN 'not for SQLite'
    WHEN db_id NOT IN (SELECT value FROM json_each(:there)) THEN 'missing database'
    WHEN is_blank THEN 'blank'
    END AS issue FROM {table}),
candidate AS (SELECT * FROM judged WHERE db_id IN (SELECT value FROM json_each(:accepted))
    AND coalesce(issue NOT IN (SELECT value FROM json_each(:drops)), true))
"""
"""What keeps a question from being asked, and the questions that may be."""
_FIRST = """(SELECT min(position) AS position, db_id, text, lot FROM candidate
    WHERE text NOT IN (SELECT text FROM seen) GROUP BY text)"""
_BY_SEED = "(lot * :factor + :summand) % 2147483647, position"


@dataclass(slots=True)
class Pool:
    """Questions of one source that may be used, drawn one after the other.

    A question has a position among all records of its source; only those drawn are read. They are
    drawn in the order of the files, or where not all are wanted in one by seed, so that a larger
    sample contains a smaller one.

    Attributes:
        check: Looks at gold queries; None trusts them all.
        accept: Which databases' questions may be used at all.
        advice: What to do about a missing database, but unpacking it.
        db: Where the tables of a mixture's sources are, and what came before in other ones.
        drops: Issues that leave a question out; by default those that the config names, and
            whatever keeps a query from being run.
        waiting: The table of those that may be drawn, in order; `size` questions, of which `taken`
            are drawn.
        found: How many questions have each issue, left out or not.
        checked, kept: How many gold queries were executed, and how many questions drawn.
        failures: The first gold queries that fail or cannot be transpiled, and why.
    """

    source: SourceConfig
    config: DataConfig
    check: Check | None = None
    accept: Accept = lambda _db_id: True
    advice: str = ""
    db: apsw.Connection = field(default_factory=open_tables)
    drops: frozenset[str] = frozenset()
    corrections: Corrections | None = field(default=None, init=False)
    location: Location = field(init=False)
    table: QuestionTable = field(init=False)
    waiting: str = field(init=False)
    size: int = field(init=False)
    taken: int = 0
    found: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    kept: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.location = locate(self.source)
        self.table = QuestionTable(self.db, self.location.files, self.source.layout)
        self.drops = self.drops or UNUSABLE.union(self.config.exclude)
        if self.source.corrections:
            corrections = read_corrections(self.source.corrections)
            corrections.check(example for _, example in self._read(range(len(self.table))))
            self.corrections = corrections
        self.waiting = self.table.name.replace(".question", "_waiting")
        self.size = self._find()

    @property
    def name(self) -> str:
        """Name the source, the same on every machine."""
        of = "-".join(self.source.levels).replace(" ", "_")
        parts = (self.source.layout, self.source.file or self.source.split, of)
        return "/".join(filter(None, parts))

    @property
    def is_spent(self) -> bool:
        """Tell whether there is nothing more to draw."""
        return not self.left or self.kept == self.source.limit

    @property
    def left(self) -> int:
        """Count the questions that are not drawn yet."""
        return self.size - self.taken

    def line(self) -> str:
        """Say in a line what was found."""
        issues = "".join(f", {count:,} {issue}" for issue, count in sorted(self.found.items()))
        checks = f", {self.checked:,} golds executed" if self.checked else ""
        failures = f" ({'; '.join(self.failures)})" if self.failures else ""
        counts = f"{self.kept:,} of {len(self.table):,} questions"
        return f"{self.name}: {counts}{checks}{issues}{failures}"

    def count_by_database(self) -> Counter[str]:
        """Count the questions that are not drawn yet by the names of their databases."""
        sql = f"SELECT db_id, count(*) FROM {self.waiting} WHERE rowid > ? GROUP BY db_id"
        return Counter(dict(self.table.ask(sql, (self.taken,))))

    def draw(self, count: int | None = None) -> Iterator[tuple[int, Example]]:
        """Draw so many questions that may stay, or as many as there are, with their positions.

        At most `BATCH` are in memory at a time.
        """
        bounds = (count, self.source.limit and self.source.limit - self.kept)
        wanted = min((bound for bound in bounds if bound is not None), default=self.left)
        while wanted and self.left:
            sql = f"SELECT position FROM {self.waiting} WHERE rowid > ? ORDER BY rowid LIMIT ?"
            rows = self.table.ask(sql, (self.taken, min(wanted, BATCH)))
            self.taken += len(rows)
            for question in self._sound([position for (position,) in rows]):
                wanted -= 1
                yield question

    def _find(self) -> int:
        """Make the table of the questions that may be drawn; count them, and the others by issue.

        Raises:
            UserError: A database is missing, and its questions are not to be left out.
        """
        rng = Random(f"{self.config.seed} {self.name}")
        names = self.table.databases()
        lists = {
            "excluded": self.config.exclude_databases,
            "levels": self.source.levels,
            "styles": self.source.exclude_styles,
            "dialects": ["", *NAMES],
            "there": [name for name in names if self.location.database(name)],
            "accepted": [name for name in names if self.accept(name)],
            "drops": [*self.drops],
        }
        numbers = {"factor": rng.randrange(1, _PRIME), "summand": rng.randrange(_PRIME)}
        values = {name: json.dumps(given) for name, given in lists.items()} | numbers
        judged = _JUDGED.format(table=self.table.name)
        counts = f"{judged} SELECT issue, count(*) FROM judged WHERE issue <> '' GROUP BY issue"
        self.found.update(dict(self.table.ask(counts, values)))
        if self.found[MISSING_DATABASE] and not self.config.drop_missing_database:
            missing = f"{judged} SELECT min(position) FROM judged WHERE issue = 'missing database'"
            raise self._no_database(self.table.number(missing, values))
        source = _FIRST if "duplicate" in self.drops else "candidate"
        order = _BY_SEED if self.source.limit or self.config.total else "position"
        self.db.execute(
            f"CREATE TABLE {self.waiting} AS {judged} "
            f"SELECT position, db_id, text FROM {source} ORDER BY {order}",
            values,
        )
        size = self.table.number(f"SELECT count(*) FROM {self.waiting}")
        if "duplicate" in self.drops:
            every = self.table.number(f"{judged} SELECT count(*) FROM candidate", values)
            self.found["duplicate"] += every - size
            self.db.execute(f"INSERT INTO seen SELECT text FROM {self.waiting}")
        return size

    def _read(self, positions: Iterable[int]) -> Iterator[tuple[int, Example]]:
        """Read questions as they are corrected, in the order of their positions."""
        for position, file, number, record in self.table.records(positions):
            example = self._example(file, number, record)
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

    def _no_database(self, position: int) -> UserError:
        for folder in self.location.databases:
            check_open(folder)
        ((_, file, number, record),) = self.table.records([position])
        expected = self.location.databases[0] / record.db_id / f"{record.db_id}.sqlite"
        where = f"{file}: record {number} needs it"
        return UserError(f"{expected} is not there, but {where}; unpack it, or {self.advice}")


def _look(example: Example) -> Checked:
    """Look at a gold query without running it."""
    if isinstance(no := transpile(example.gold_sql, example.dialect), SqlError):
        return Checked(example, (NOT_TRANSPILED,), no.message)
    return Checked(example)


def by_running(executor: Executor | None) -> Check | None:
    """Make a check that runs gold queries: they fail, return nothing, or a single value."""
    if executor is None:
        return None

    def look(examples: Sequence[Example]) -> Iterator[Checked]:
        queries = [(example, example.gold_sql) for example in examples]
        results = run_many(executor.gold_many, queries)
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
