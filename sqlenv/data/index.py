"""What a question file holds, without its texts: a file is read once, and then only what is used.

The index of a file is in the shared cache, under the file's contents. A million records take 30 MB.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exchange import UserError
from sqlenv.cache import content_key, shared_cache
from sqlenv.config import Layout
from sqlenv.data.layouts import DATASETS, other_dataset
from sqlenv.data.records import QuestionRecord, Record, check, placed_records
from sqlenv.executor.database import fingerprint

_VERSION = 3
"""Of what an index holds."""
_ROW = np.dtype([("start", "i8"), ("length", "i8"), ("kind", "i4"), ("text", "u8")])


class RecordKind(NamedTuple):
    """What decides whether a question may be used; `dialect` is empty where no record says it."""

    db_id: str
    level: str
    style: str
    dialect: str
    is_blank: bool
    is_local: bool


@dataclass(frozen=True)
class QuestionIndex:
    """The records of a file of N.

    Attributes:
        rows: Of each the byte where it begins, its `length` in bytes, the place of its kind in
            `kinds`, and a digest of its database's name and its question, case and blanks apart, N.
    """

    file: Path
    layout: Layout
    rows: np.ndarray
    kinds: tuple[RecordKind, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def kind(self, number: int) -> RecordKind:
        """Return the kind of a record."""
        return self.kinds[self.rows["kind"][number]]

    def records(self, numbers: Iterator[int]) -> Iterator[tuple[int, QuestionRecord]]:
        """Read some records."""
        with self.file.open("rb") as file:
            for number in numbers:
                start, length, *_ = self.rows[number].item()
                file.seek(start)
                record = json.loads(file.read(length).decode())
                yield number, read_question(self.layout, self.file, number, record)


def index_of(file: Path, layout: Layout) -> QuestionIndex:
    """Look a file's index up, or read the file from end to end.

    Raises:
        UserError: A record is broken, or not as the layout says.
    """
    return _index_of(file, layout, fingerprint(file))


@lru_cache(maxsize=64)
def _index_of(file: Path, layout: Layout, contents: str) -> QuestionIndex:
    key = content_key("questions", _VERSION, layout, contents)
    if (stored := shared_cache().open_file(key)) is not None:
        with stored, np.load(stored) as arrays:
            kinds = tuple(RecordKind(*kind) for kind in json.loads(str(arrays["kinds"])))
            return QuestionIndex(file, layout, arrays["rows"], kinds)
    index = _read(file, layout)
    written = io.BytesIO()
    np.savez(written, rows=index.rows, kinds=json.dumps(index.kinds))
    written.seek(0)
    shared_cache().store_file(key, written)
    return index


def _read(file: Path, layout: Layout) -> QuestionIndex:
    codes: dict[RecordKind, int] = {}

    def rows() -> Iterator[tuple[int, int, int, int]]:
        for number, (start, length, record) in enumerate(placed_records(file)):
            asked = read_question(layout, file, number, record)
            code = codes.setdefault(_kind(layout, asked), len(codes))
            yield start, length, code, _digest(asked)

    return QuestionIndex(file, layout, np.fromiter(rows(), _ROW), tuple(codes))


def _kind(layout: Layout, asked: QuestionRecord) -> RecordKind:
    written = (asked.gold_sql or "").strip()
    is_local = asked.instance_id is None or asked.instance_id.startswith("local")
    style, dialect = asked.question_style or "", (asked.dialect or "").lower()
    return RecordKind(asked.db_id, level_of(layout, asked), style, dialect, not written, is_local)


def level_of(layout: Layout, asked: QuestionRecord) -> str:
    """Return a question's level of difficulty: what the record says, or Spider's own."""
    spoken = asked.difficulty or asked.sql_complexity
    if spoken or not DATASETS[layout].is_graded:
        return spoken or ""
    # sqlglot takes longer to import than most of what a command needs.
    from sqlenv.evaluators.hardness import grade

    return grade((asked.gold_sql or "").strip()) or ""


def _digest(asked: QuestionRecord) -> int:
    text = f"{asked.db_id}\n{' '.join(asked.question.lower().split())}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def read_question(layout: Layout, file: Path, number: int, record: Record) -> QuestionRecord:
    """Read a record of a question file."""
    spec = DATASETS[layout]
    where = f"{file}: record {number}"
    if other := other_dataset(layout, record):
        raise UserError(
            f"{where} is of {other}, not of {layout} (it has {', '.join(list(record)[:8])}); "
            f"give {layout}'s own file, or correct `layout`"
        )
    names = {"question": spec.question, "gold_sql": spec.gold, "evidence": spec.evidence}
    advice = f"correct it if the layout is really {layout}"
    return check(QuestionRecord, record, where=where, advice=advice, names=names)
