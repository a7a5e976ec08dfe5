"""A table of the questions that files hold, without their texts: files are read once, and then
only the records that are used.

The table of a source is in the shared cache, under the contents of its files. 300,000 records take
20 MB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import apsw

from minirl.exchange import UserError
from sqlenv.cache import content_key, shared_cache
from sqlenv.config import Layout
from sqlenv.data.layouts import DATASETS, other_dataset
from sqlenv.data.records import QuestionRecord, Record, check, placed_records
from sqlenv.executor.database import fingerprint

_VERSION = 4
"""Of what a table holds."""
_SCHEMA = """
PRAGMA journal_mode = off;
PRAGMA synchronous = off;
CREATE TABLE question (
    position INTEGER PRIMARY KEY,  -- among the records of all files, from 0
    file, number,  -- its place in the list of files, and its number there
    start, length,  -- where it is, in bytes
    db_id, level, style,
    dialect,  -- empty where the record does not say it
    is_blank, is_local,
    text,  -- digest of its database's name and its question, case and blanks apart
    lot  -- a random number that stays the same, of 31 bits
);
"""
_INSERT = f"INSERT INTO question VALUES ({', '.join('?' * 13)})"


def open_tables() -> apsw.Connection:
    """Open a database for the tables of a mixture's sources; its file goes with it.

    `seen` has the texts of questions that came before, in other sources.
    """
    db = apsw.Connection("")
    db.execute("CREATE TABLE seen (text INTEGER PRIMARY KEY)")
    return db


class QuestionTable:
    """The table of a source's questions, in a database that the sources of a mixture share.

    `name` is what SQL calls the table.
    """

    def __init__(self, db: apsw.Connection, files: tuple[Path, ...], layout: Layout) -> None:
        """Attach a table; it is made first where the cache lacks it.

        Raises:
            UserError: A record is broken, or not as the layout says.
        """
        self.db, self.files, self.layout = db, files, layout
        key = content_key("questions", _VERSION, layout, [fingerprint(file) for file in files])
        path = shared_cache().made_file(key, partial(_write, files, layout))
        schema = f"source_{len(db.db_names())}"
        db.execute(f"ATTACH ? AS {schema}", (str(path),))
        self.name = f"{schema}.question"

    def __len__(self) -> int:
        return self.number(f"SELECT count(*) FROM {self.name}")

    def ask(self, sql: str, values: Any = None) -> list[Any]:
        """Return the rows of a query, of whatever it has."""
        return self.db.execute(sql, values).fetchall()

    def number(self, sql: str, values: Any = None) -> int:
        """Return the number that a query gives."""
        return self.ask(sql, values)[0][0]

    def databases(self) -> list[str]:
        """List the names of all databases."""
        return [name for (name,) in self.ask(f"SELECT DISTINCT db_id FROM {self.name}")]

    def records(self, positions: Iterable[int]) -> Iterator[tuple[int, Path, int, QuestionRecord]]:
        """Read some records, in the order of the files: each with its position, its file and its
        number there.
        """
        rows = self.ask(
            f"SELECT file, position, number, start, length FROM {self.name} "
            "WHERE position IN (SELECT value FROM json_each(?)) ORDER BY position",
            (json.dumps([*positions]),),
        )
        for place, own in groupby(rows, key=itemgetter(0)):
            file = self.files[place]
            with file.open("rb") as content:
                for _, position, number, start, length in own:
                    content.seek(start)
                    record = json.loads(content.read(length).decode())
                    yield position, file, number, read_question(self.layout, file, number, record)


def _write(files: tuple[Path, ...], layout: Layout, path: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.execute(_SCHEMA).fetchall()
        with db:
            db.executemany(_INSERT, _rows(files, layout))


def _rows(files: tuple[Path, ...], layout: Layout) -> Iterator[tuple[Any, ...]]:
    position = 0
    for place, file in enumerate(files):
        for number, (start, length, record) in enumerate(placed_records(file)):
            asked = read_question(layout, file, number, record)
            is_blank = not (asked.gold_sql or "").strip()
            is_local = asked.instance_id is None or asked.instance_id.startswith("local")
            where = (position, place, number, start, length)
            style, dialect = asked.question_style or "", (asked.dialect or "").lower()
            kind = (asked.db_id, level_of(layout, asked), style, dialect, is_blank, is_local)
            yield *where, *kind, *_digests(asked, f"{file.name} {number}")
            position += 1


def _digests(asked: QuestionRecord, place: str) -> tuple[int, int]:
    """Hash a question, and then with its place."""
    text = hashlib.sha256(f"{asked.db_id}\n{' '.join(asked.question.lower().split())}".encode())
    found = int.from_bytes(text.digest()[:8], "big", signed=True)
    text.update(place.encode())
    return found, int.from_bytes(text.digest()[:4], "big") >> 1


def level_of(layout: Layout, asked: QuestionRecord) -> str:
    """Return a question's level of difficulty: what the record says, or Spider's own."""
    spoken = asked.difficulty or asked.sql_complexity
    if spoken or not DATASETS[layout].is_graded:
        return spoken or ""
    # sqlglot takes longer to import than most of what a command needs.
    from sqlenv.evaluators.hardness import grade

    return grade((asked.gold_sql or "").strip()) or ""


def read_question(layout: Layout, file: Path, number: int, record: Record) -> QuestionRecord:
    """Read a record of a question file."""
    spec = DATASETS[layout]
    where = f"{file}: record {number}"
    if other := other_dataset(layout, record):
        raise UserError(f"{where} is {other}")
    names = {"question": spec.question, "gold_sql": spec.gold, "evidence": spec.evidence}
    advice = f"correct it if the layout is really {layout}"
    return check(QuestionRecord, record, where=where, advice=advice, names=names)
