"""What questions to learn from and questions to measure by have in common."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlenv.prepared import DatabaseEntry

Kind = Literal["database name", "database file", "tables and columns", "question"]


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that stands on both sides.

    Attributes:
        learn, measure: The sets.
        count: Databases, or questions to measure by.
        examples: Some of them.
    """

    learn: str
    measure: str
    kind: Kind
    count: int
    examples: tuple[str, ...]

    def line(self) -> str:
        """Say it in a line."""
        what = f"{self.count:,} x {self.kind}"
        return f"{self.learn} and {self.measure} share {what} (such as {', '.join(self.examples)})"


_NAMED = 5


def database_leaks(
    learn: Mapping[str, Sequence[DatabaseEntry]], measure: Mapping[str, Sequence[DatabaseEntry]]
) -> list[Leak]:
    """Find databases of one name, of the same bytes, or with the same tables and columns."""
    traits: dict[Kind, str] = {
        "database name": "db_id",
        "database file": "fingerprint",
        "tables and columns": "shape",
    }
    found = []
    for there, known in learn.items():
        for here, entries in measure.items():
            for kind, trait in traits.items():
                seen = {getattr(entry, trait) for entry in known}
                same = [entry.db_id for entry in entries if getattr(entry, trait) in seen]
                if same:
                    found.append(Leak(there, here, kind, len(same), tuple(same[:_NAMED])))
    return found


class Questions:
    """The texts of questions, compared without regard to case and blanks."""

    def __init__(self) -> None:
        self._measured: defaultdict[bytes, set[tuple[str, str]]] = defaultdict(set)
        self._found: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)

    def measure(self, name: str, identity: str, question: str) -> None:
        """Take in a question to measure by; all of them come before those to learn from."""
        self._measured[_key(question)].add((name, identity))

    def learn(self, name: str, question: str) -> None:
        """Compare a question to learn from."""
        for other, identity in self._measured.get(_key(question), ()):
            self._found[name, other][identity] = None

    def leaks(self) -> list[Leak]:
        """List the questions that stand on both sides."""
        return [
            Leak(learn, measure, "question", len(found), tuple(sorted(found)[:_NAMED]))
            for (learn, measure), found in sorted(self._found.items())
        ]


def _key(question: str) -> bytes:
    return hashlib.sha256(" ".join(question.lower().split()).encode()).digest()[:12]
