"""What questions to learn from and questions to measure by have in common."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from sqlenv.errors import UserError
from sqlenv.schema.reading import DatabaseSchema
from sqlenv.types import Example

Kind = Literal[
    "database name", "database file", "tables and columns", "question", "wording of a question"
]
_REFUSED: frozenset[Kind] = frozenset({"database name", "database file", "question"})
"""Kinds that make a measurement worthless; the others happen between data sets as published:
generic questions ("How many flights do we have?") of databases that have nothing in common, and
databases of common models."""


class Database(Protocol):
    """A database, as both sides are compared by."""

    @property
    def db_id(self) -> str:
        """Its name."""
        ...

    @property
    def bytes(self) -> int:
        """Size of its file."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of the file; looked at where another file has its size."""
        ...

    @property
    def shape(self) -> str:
        """Digest of its tables and columns, by `shape_of`."""
        ...


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that stands on both sides.

    Attributes:
        learn, measure: The sets.
        count: Databases, or questions to measure by.
        examples: Some of them.
        databases: All databases to learn from that are concerned.
    """

    learn: str
    measure: str
    kind: Kind
    count: int
    examples: tuple[str, ...]
    databases: tuple[str, ...]

    @property
    def is_refused(self) -> bool:
        """Tell whether nothing should be measured so; to choose by what was learned is told."""
        return self.kind in _REFUSED and not self.measure.endswith("validation")

    def line(self) -> str:
        """Say it in a line."""
        what = f"{self.count:,} x {self.kind}"
        return f"{self.learn} and {self.measure} share {what} (such as {', '.join(self.examples)})"


_NAMED = 5
_LISTED = 20


def shape_of(schema: DatabaseSchema) -> str:
    """Hash the names of tables and columns: two databases of one shape are the same one, edited."""
    names = sorted(
        (table.name.lower(), sorted(column.name.lower() for column in table.columns))
        for table in schema.tables
    )
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


def refuse(leaks: Sequence[Leak], *, excluded: Sequence[str], more: str = "") -> None:
    """Refuse to learn or to choose checkpoints by what a test set has.

    Args:
        leaks: What was found.
        excluded: Databases that are left out already.
        more: What else can be done about it.

    Raises:
        UserError: There are some that are to be refused.
    """
    refused = [leak for leak in leaks if leak.is_refused]
    if not refused:
        return
    names = sorted({*excluded, *(name for leak in refused for name in leak.databases)})
    listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
    raise UserError(
        f"{'; '.join(leak.line() for leak in refused)}; leave these out "
        f"(data.train.exclude_databases='[{listed}]'){more}, or set data.overlap=tell to go on "
        "with them"
    )


def database_leaks(
    learn: Mapping[str, Sequence[Database]],
    measure: Mapping[str, Sequence[Database]],
    *,
    shapes: bool = True,
) -> list[Leak]:
    """Find databases of one name, of the same bytes, or with the same tables and columns.

    Args:
        learn: The databases of each set to learn from.
        measure: Those of each set to measure by.
        shapes: Whether tables and columns are compared too.
    """
    traits: dict[Kind, Callable[[Database], object]] = {
        "database name": lambda entry: entry.db_id,
        "database file": lambda entry: entry.fingerprint,
    }
    if shapes:
        traits["tables and columns"] = lambda entry: entry.shape
    found = []
    for there, known in learn.items():
        for here, entries in measure.items():
            if here == there:
                continue
            # Only files of one size can be the same: no other is read.
            sizes = {entry.bytes for entry in known} & {entry.bytes for entry in entries}
            for kind, trait in traits.items():
                is_read = kind == "database file"
                seen = defaultdict(list)
                for entry in known:
                    if not is_read or entry.bytes in sizes:
                        seen[trait(entry)].append(entry.db_id)
                same = [
                    e for e in entries if (not is_read or e.bytes in sizes) and trait(e) in seen
                ]
                if same:
                    shown = tuple(entry.db_id for entry in same[:_NAMED])
                    names = tuple(name for entry in same for name in seen[trait(entry)])
                    found.append(Leak(there, here, kind, len(same), shown, names))
    return found


class Questions:
    """The texts of questions, compared without regard to case and blanks.

    A question is the same only about the same database: one of its name, or with its tables and
    columns.

    Args:
        shape_of: Digests the tables and columns of a database.
    """

    def __init__(self, shape_of: Callable[[Path], str]) -> None:
        self._shape_of = shape_of
        self._measured: defaultdict[bytes, list[tuple[str, Example]]] = defaultdict(list)
        self._found: defaultdict[tuple[str, str, Kind], dict[str, str]] = defaultdict(dict)

    def measure(self, name: str, example: Example) -> None:
        """Take in a question to measure by; all of them come before those to learn from."""
        self._measured[_key(example.question)].append((name, example))

    def learn(self, name: str, example: Example) -> None:
        """Compare a question to learn from, or to choose by, with those of other sets."""
        for other, known in self._measured.get(_key(example.question), ()):
            if other == name:
                continue
            same = known.db_id == example.db_id or (
                self._shape_of(known.database) == self._shape_of(example.database)
            )
            kind: Kind = "question" if same else "wording of a question"
            self._found[name, other, kind][known.id] = example.db_id

    def leaks(self) -> list[Leak]:
        """List the questions that stand on both sides."""
        return [
            Leak(
                learn, measure, kind, len(found), tuple(sorted(found)[:_NAMED]),
                tuple(sorted(set(found.values()))),
            )
            for (learn, measure, kind), found in sorted(self._found.items())
        ]  # fmt: skip


def _key(question: str) -> bytes:
    return hashlib.sha256(" ".join(question.lower().split()).encode()).digest()[:12]
