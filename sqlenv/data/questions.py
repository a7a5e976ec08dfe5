"""A table of the questions that files hold, without their texts: files are read once, and then
only the records that are used.

The table of a source is in the shared cache, under the contents of its files. 300,000 records take
20 MB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import apsw

from minirl.exchange import UserError
from sqlenv.cache import content_key, shared_cache
from sqlenv.config import Layout
from sqlenv.data.layouts import DATASETS, other_dataset
from sqlenv.data.records import QuestionRecord, Record, check, placed_records
from sqlenv.executor.database import fingerprint

_VERSION = 5
"""Of the table's format: an older table is made anew."""
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
    text,  -- `text_digest` of the question
    lot  -- a random number that stays the same, of 31 bits
);
"""
_INSERT = f"INSERT INTO question VALUES ({', '.join('?' * 13)})"


def attach(db: apsw.Connection, files: tuple[Path, ...], layout: Layout) -> str:
    """Attach the table of a source's questions, and return its name; it is made first where the
    cache lacks it. `waiting` has the questions of all sources that may be drawn, in that order.

    Raises:
        UserError: A record is broken, or not as the layout says.
    """
    key = content_key("questions", _VERSION, layout, [fingerprint(file) for file in files])
    path = shared_cache().made_file(key, partial(_write, files, layout))
    schema = f"source_{len(db.db_names())}"
    db.execute(f"ATTACH ? AS {schema}", (str(path),))
    db.execute("CREATE TABLE IF NOT EXISTS waiting (position, db_id, text)")
    return f"{schema}.question"


def read_again(layout: Layout, file: Path, number: int, start: int, length: int) -> QuestionRecord:
    """Read a record at its place in a file."""
    with file.open("rb") as content:
        content.seek(start)
        return read_question(layout, file, number, json.loads(content.read(length).decode()))


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
            kind = (asked.db_id, _level(layout, asked), style, dialect, is_blank, is_local)
            lot = _hash(asked.question, f"{asked.db_id}\n", f"{file.name} {number}")[:4]
            yield *where, *kind, text_digest(asked.question), int.from_bytes(lot, "big") >> 1
            position += 1


def text_digest(question: str) -> int:
    """Hash the words of a question, case and blanks apart."""
    return int.from_bytes(_hash(question)[:8], "big", signed=True)


def _hash(question: str, before: str = "", after: str = "") -> bytes:
    words = " ".join(question.lower().split())
    return hashlib.sha256(f"{before}{words}{after}".encode()).digest()


def _level(layout: Layout, asked: QuestionRecord) -> str:
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
