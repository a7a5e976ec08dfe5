"""What question files hold, without their texts: each is read once, and then only what is used.

The index of a source's files is in the shared cache, under their contents. A million records take
32 MB.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
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
_ROW = np.dtype("i4, i4, i8, i4, i4, u8")
_ROW.names = ("file", "number", "start", "length", "kind", "text")


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
    """The records of a source's files, N in all; their positions count those of all files.

    Attributes:
        rows: Of each record its place in `files` and its number there, the byte where it begins,
            its `length` in bytes, the place of its kind in `kinds`, and a digest of its database's
            name and its question, case and blanks apart, N.
    """

    layout: Layout
    files: tuple[Path, ...]
    rows: np.ndarray
    kinds: tuple[RecordKind, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, position: int) -> tuple[Path, int]:
        """Return the file of a record, and its number there."""
        row = self.rows[position]
        return self.files[row["file"]], int(row["number"])

    def records(self, positions: Iterable[int]) -> Iterator[tuple[int, QuestionRecord]]:
        """Read some records, in the order of the files."""
        for path, own in groupby(sorted(positions), key=lambda position: self.place(position)[0]):
            with path.open("rb") as file:
                for position in own:
                    row = self.rows[position]
                    file.seek(row["start"])
                    record = json.loads(file.read(row["length"]).decode())
                    yield position, read_question(self.layout, path, int(row["number"]), record)


def first_times(texts: np.ndarray, seen: list[np.ndarray]) -> np.ndarray:
    """Tell which digests of texts come for the first time, and add them to those seen so far."""
    unique, first = np.unique(texts, return_index=True)
    is_first = np.zeros(len(texts), bool)
    is_first[first[~np.isin(unique, np.concatenate([unique[:0], *seen]))]] = True
    seen.append(unique)
    return is_first


def index_of(files: tuple[Path, ...], layout: Layout) -> QuestionIndex:
    """Look the index of files up, or read them from end to end.

    Raises:
        UserError: A record is broken, or not as the layout says.
    """
    return _index_of(files, layout, tuple(map(fingerprint, files)))


@lru_cache(maxsize=64)
def _index_of(files: tuple[Path, ...], layout: Layout, contents: tuple[str, ...]) -> QuestionIndex:
    key = content_key("questions", _VERSION, layout, contents)
    if (stored := shared_cache().open_file(key)) is not None:
        with stored, np.load(stored) as arrays:
            kinds = tuple(RecordKind(*kind) for kind in json.loads(str(arrays["kinds"])))
            return QuestionIndex(layout, files, arrays["rows"], kinds)
    codes: dict[RecordKind, int] = {}

    def read() -> Iterator[tuple[int, ...]]:
        for place, file in enumerate(files):
            for number, (start, length, record) in enumerate(placed_records(file)):
                asked = read_question(layout, file, number, record)
                code = codes.setdefault(_kind(layout, asked), len(codes))
                yield place, number, start, length, code, _digest(asked)

    index = QuestionIndex(layout, files, np.fromiter(read(), _ROW), tuple(codes))
    written = io.BytesIO()
    np.savez(written, rows=index.rows, kinds=json.dumps(index.kinds))
    written.seek(0)
    shared_cache().store_file(key, written)
    return index


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
        raise UserError(f"{where} is {other}")
    names = {"question": spec.question, "gold_sql": spec.gold, "evidence": spec.evidence}
    advice = f"correct it if the layout is really {layout}"
    return check(QuestionRecord, record, where=where, advice=advice, names=names)
