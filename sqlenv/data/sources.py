"""One data set of a mixture: its questions drawn, checked, and counted by what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import apsw

from minirl.exchange import UserError
from sqlenv.config import DataConfig, GoldIssue, SourceConfig
from sqlenv.data.corrections import Corrections, read_corrections
from sqlenv.data.layouts import DATASETS, is_file, locate
from sqlenv.data.questions import attach, read_again
from sqlenv.dialects import NAMES, run_many
from sqlenv.executor import Executor
from sqlenv.types import Example, Result, Table, describe_failure

BATCH = 256
"""Questions that are checked at a time: the results of their gold queries are held together."""
_NAMED_FAILURES = 3


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
_READ = "position, file, number, start, length, level"
"""What `Pool._example` makes a question of, led by its position."""
_LABELLED = """
WITH labelled AS (SELECT *, CASE
    WHEN db_id IN (SELECT value FROM json_each(:excluded)) THEN 'in exclude_databases'
    WHEN :levels <> '[]' AND level NOT IN (SELECT value FROM json_each(:levels))
        OR style IN (SELECT value FROM json_each(:styles)) THEN 'of other levels or styles'
    WHEN NOT is_local OR dialect NOT IN (SELECT value FROM json_each(:dialects))
        THEN 'not for SQLite'
    WHEN db_id NOT IN (SELECT value FROM json_each(:there)) THEN 'missing database'
    WHEN is_blank AND position NOT IN (SELECT value FROM json_each(:filled)) THEN 'blank'
    END AS issue FROM {table}),
candidate AS (SELECT * FROM labelled WHERE db_id IN (SELECT value FROM json_each(:accepted))
    AND (issue IS NULL OR issue = 'blank' AND :takes_blank))
"""
"""What keeps a question from being asked, and the questions that may be."""
_FIRST = """(SELECT min(position) AS position, db_id, text, lot FROM candidate
    WHERE (db_id, text) NOT IN (SELECT db_id, text FROM waiting) GROUP BY db_id, text)"""
_BY_SEED = "(lot * :factor + :summand) % 2147483647, position"


class Pool:
    """Questions of one source that may be used, drawn one after the other.

    A question has a position among all records of its source; only those drawn are read. They are
    drawn in the order of the files, or where not all are wanted in one by seed, so that a larger
    sample contains a smaller one.

    Attributes:
        found: How many questions have each issue, left out or not.
        left, kept: How many may still be drawn, and how many of those drawn stayed.
        checked: How many gold queries were executed.
        failures: The first gold queries that fail, and why.
    """

    def __init__(
        self,
        source: SourceConfig,
        config: DataConfig,
        check: Check | None = None,
        *,
        accept: Accept = lambda _db_id: True,
        db: apsw.Connection | None = None,
    ) -> None:
        """Find the questions of a source in a mixture; without a `check` all golds are trusted.

        `db` has the tables of the mixture's sources, and what came before in other ones.

        Raises:
            UserError: A database is missing, and its questions are not to be left out.
        """
        self.source, self._config, self._check = source, config, check
        self._db = db or apsw.Connection("")
        self.location = locate(source)
        self._table = attach(self._db, self.location.files, source.layout)
        ((self.total,),) = self._fetch(f"SELECT count(*) FROM {self._table}")
        self._corrections = Corrections(Path(), {})
        if source.corrections:
            self._corrections = read_corrections(source.corrections)
            every = self._db.execute(f"SELECT {_READ} FROM {self._table}")
            self._corrections.check(self._example(*row) for _, *row in every)
        self.found, self.failures = Counter[str](), list[str]()
        self.checked = self.kept = 0
        ((self._drawn,),) = self._fetch("SELECT count(*) FROM waiting")
        self.left = self._find(accept)

    @property
    def name(self) -> str:
        """Name the source, the same on every machine."""
        of = "-".join(self.source.levels).replace(" ", "_")
        parts = (self.source.layout, self.source.file or self.source.split, of)
        return "/".join(filter(None, parts))

    def line(self) -> str:
        """Say in a line what was found."""
        issues = "".join(f", {count:,} {issue}" for issue, count in sorted(self.found.items()))
        checks = f", {self.checked:,} golds executed" if self.checked else ""
        failures = f" ({'; '.join(self.failures)})" if self.failures else ""
        counts = f"{self.kept:,} of {self.total:,} questions"
        return f"{self.name}: {counts}{checks}{issues}{failures}"

    def count_by_database(self) -> Counter[str]:
        """Count the questions that are not drawn yet by the names of their databases."""
        rows = f"SELECT * FROM waiting LIMIT {self.left} OFFSET {self._drawn}"
        return Counter(dict(self._fetch(f"SELECT db_id, count(*) FROM ({rows}) GROUP BY db_id")))

    def draw(self, wanted: int) -> Iterator[tuple[int, Example]]:
        """Draw so many questions that may stay, or as many as there are, with their positions.

        At most `BATCH` are in memory at a time.
        """
        while wanted and self.left:
            rows = self._fetch(
                f"SELECT {_READ} FROM waiting JOIN {self._table} USING (position) "
                "WHERE waiting.rowid > ? ORDER BY waiting.rowid LIMIT ?",
                (self._drawn, min(wanted, self.left, BATCH)),
            )
            self._drawn += len(rows)
            self.left -= len(rows)
            for question in self._sound(rows):
                wanted -= 1
                yield question

    def _find(self, accept: Accept) -> int:
        """Line up those that may be drawn; count them, and the others by issue."""
        rng = Random(f"{self._config.seed} {self.name}")
        names = [name for (name,) in self._fetch(f"SELECT DISTINCT db_id FROM {self._table}")]
        blank = self._fetch(f"SELECT {_READ} FROM {self._table} WHERE is_blank")
        lists = {
            "filled": [at for at, *row in blank if self._corrected(*row).gold_sql],
            "excluded": self._config.exclude_databases,
            "levels": self.source.levels,
            "styles": self.source.exclude_styles,
            "dialects": ["", *NAMES],
            "there": [name for name in names if self.location.database(name)],
            "accepted": [name for name in names if accept(name)],
        }
        numbers = {
            "takes_blank": "blank" not in self._config.exclude,
            "factor": rng.randrange(1, _PRIME),
            "summand": rng.randrange(_PRIME),
        }
        values = {name: json.dumps(given) for name, given in lists.items()} | numbers
        labelled = _LABELLED.format(table=self._table)
        counts = f"{labelled} SELECT issue, count(*), min(position) FROM labelled GROUP BY issue"
        for issue, count, first in self._fetch(f"{counts} HAVING issue <> ''", values):
            self.found[issue] += count
            if issue == "missing database" and not self._config.drop_missing_database:
                raise self._no_database(first)
        is_once = "duplicate" in self._config.exclude
        source = _FIRST if is_once else "candidate"
        order = _BY_SEED if self._config.total else "position"
        self._fetch(
            f"{labelled} INSERT INTO waiting SELECT position, db_id, text FROM {source} "
            f"ORDER BY {order}",
            values,
        )
        size = self._db.changes()
        if is_once:
            ((every,),) = self._fetch(f"{labelled} SELECT count(*) FROM candidate", values)
            self.found["duplicate"] += every - size
        return size

    def _fetch(self, sql: str, values: Any = None) -> list[Any]:
        return self._db.execute(sql, values).fetchall()

    def _sound(self, rows: Sequence[Any]) -> Iterator[tuple[int, Example]]:
        """Look at the gold queries of some questions, and pass on those that may stay."""
        read = {position: self._corrected(*row) for position, *row in rows}
        found = {position: Checked(example) for position, example in read.items()}
        if self._check is not None:
            asked = {position: one for position, one in read.items() if one.gold_sql}
            self.checked += len(asked)
            found |= zip(asked, self._check([*asked.values()]), strict=True)
        drops = set(self._config.exclude)
        for position, one in found.items():
            self.found.update(one.issues)
            if "failing" in one.issues:
                if one.example.question_id in self._corrections.by_id:
                    where = self._corrections.place(one.example)
                    raise UserError(f"{where}: its gold query fails ({one.note}); correct it")
                if len(self.failures) < _NAMED_FAILURES:
                    self.failures.append(f"{one.example.id}: {one.note}")
            if drops.isdisjoint(one.issues):
                self.kept += 1
                yield position, one.example

    def _corrected(self, *row: Any) -> Example:
        return self._corrections.lay(self._example(*row))

    def _example(self, file: int, number: int, start: int, length: int, level: str) -> Example:
        path, layout = self.location.files[file], self.source.layout
        asked, spec = read_again(layout, path, number, start, length), DATASETS[layout]
        evidence = (asked.evidence or "").strip()
        document = path.parent / spec.documents / evidence
        if spec.documents and evidence and is_file(document):  # Spider 2 names a file that holds it
            evidence = document.read_text(encoding="utf-8", errors="replace").strip()
        name = asked.instance_id or f"{path.stem}/{number}"
        own = asked.question_id if asked.question_id is not None else asked.instance_id
        return Example(
            id=f"{layout}/{name}",
            question=asked.question.strip(),
            db_id=asked.db_id,
            database=self.location.database(asked.db_id) or Path(asked.db_id),
            gold_sql=(asked.gold_sql or "").strip(),
            evidence=evidence,
            difficulty=level,
            dialect=NAMES.get((asked.dialect or self.source.dialect).lower(), "sqlite"),
            source=layout,
            question_id=str(number if own is None else own),
            alternatives=asked.alternatives or (),
            grading_method=asked.grading_method or "",
        )

    def _no_database(self, position: int) -> UserError:
        sql = f"SELECT file, number, db_id FROM {self._table} WHERE position = ?"
        ((file, number, db_id),) = self._fetch(sql, (position,))
        expected = self.location.databases[0] / db_id / f"{db_id}.sqlite"
        where = f"{self.location.files[file]}: record {number} needs it"
        return UserError(
            f"{expected} is not there, but {where}; unpack it, or leave such questions out "
            "(drop_missing_database=true beside the source, or another question file)"
        )


def by_running(executor: Executor | None) -> Check | None:
    """Make a check that runs gold queries: they fail, return nothing or a single value, or vary."""
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
    found: dict[GoldIssue, bool] = {
        "empty": not result.rows,
        "scalar": len(result.rows) == result.width == 1,
        "varying": result.nondeterministic,
    }
    return tuple(issue for issue, is_there in found.items() if is_there)
