"""Contamination: what questions to learn from and questions to measure by have in common.

A checkpoint that was chosen by a test set's questions, or that has learned from its databases,
says nothing on that set: a run is refused before anything is trained, unless data.overlap=tell.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from exchange import UserError
from launch.config import DataSection, JobConfig
from launch.evaluation.questions import TEST_SETS, Split
from sqlenv.config import SourceConfig
from sqlenv.data.layouts import AbsentError, is_file, locate
from sqlenv.data.loading import read_all
from sqlenv.demo import STAMP
from sqlenv.executor.database import fingerprint
from sqlenv.schema.reading import read_schema
from sqlenv.types import Example

_log = logging.getLogger(__name__)

OverlapKind = Literal["database name", "database file", "question"]
_LEARNED: tuple[Split, ...] = ("train", "validation")
_NAMED = 5
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Overlap:
    """Something that stands on both sides.

    Attributes:
        learn, measure: The sets.
        shared: By database, or by question to measure by, the databases to learn from that are
            concerned.
    """

    learn: str
    measure: str
    kind: OverlapKind
    shared: Mapping[str, set[str]]

    @property
    def is_refused(self) -> bool:
        """Tell whether nothing should be measured so; to choose by what was learned is told."""
        return not self.measure.endswith("validation")

    def line(self) -> str:
        """Say it in a line."""
        examples = ", ".join(sorted(self.shared)[:_NAMED])
        what = f"{len(self.shared):,} x {self.kind} (such as {examples})"
        return f"{self.learn} and {self.measure} share {what}"


class OverlapIndex:
    """What sets to learn from and sets to measure by share: databases, and texts of questions.

    Databases are the same by name or by their bytes. Texts are compared without regard to case and
    blanks; a question is the same only about the same database: one of its name, or with its tables
    and columns. Generic ones ("How many flights do we have?") may be asked of any.
    """

    def __init__(self) -> None:
        # By what may be the same, the questions to measure by that have it, and their sets.
        self._known: defaultdict[tuple[OverlapKind, Any], list[tuple[str, Example]]] = defaultdict(
            list
        )
        self._databases: set[tuple[str, str, Path]] = set()
        # By sets and kind, what is measured by, and the databases to learn from that share it.
        self._found: defaultdict[tuple[str, str, OverlapKind], defaultdict[str, set[str]]]
        self._found = defaultdict(lambda: defaultdict(set))
        self._shape = cache(_shape)

    def measure(self, name: str, example: Example) -> None:
        """Add a question to measure by; all of them come before those to learn from."""
        for trait in self._traits("measure", name, example):
            self._known[trait].append((name, example))

    def learn(self, name: str, example: Example) -> None:
        """Compare a question to learn from, or to choose by, with those of other sets."""
        for kind, value in self._traits("learn", name, example):
            for other, known in self._known.get((kind, value), ()):
                if other != name and self._is_same(kind, known, example):
                    what = known.id if kind == "question" else known.db_id
                    self._found[name, other, kind][what].add(example.db_id)

    def overlaps(self) -> list[Overlap]:
        """List what stands on both sides: databases, then questions."""
        order = sorted(self._found, key=lambda key: (key[2] == "question", key))
        return [Overlap(*key, self._found[key]) for key in order]

    def _traits(self, side: str, name: str, example: Example) -> Iterator[tuple[OverlapKind, Any]]:
        """Give what may stand on the other side too; of a database once."""
        yield "question", _key(example.question)
        database = example.database
        if (side, name, database) not in self._databases:
            self._databases.add((side, name, database))
            yield "database name", example.db_id
            if is_file(database):
                # Files of other sizes are not the same: none is read.
                yield "database file", database.stat().st_size

    def _is_same(self, kind: OverlapKind, known: Example, example: Example) -> bool:
        if kind == "database file":
            return fingerprint(known.database) == fingerprint(example.database)
        is_named = known.db_id == example.db_id
        return is_named or self._shape(known.database) == self._shape(example.database)


def _shape(path: Path) -> str:
    """Hash the names of tables and columns: two databases of one shape are the same one, edited.

    One that cannot be read has the shape of no other.
    """
    try:
        tables = read_schema(path, examples=0).column_names().items()
    except UserError:
        return str(path)
    names = sorted((table.lower(), sorted(map(str.lower, columns))) for table, columns in tables)
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def _key(question: str) -> bytes:
    return hashlib.sha256(" ".join(question.lower().split()).encode()).digest()[:12]


def check_overlap(config: JobConfig, splits: Mapping[Split, Sequence[Example]]) -> None:
    """Compare what is learned from and chosen by with all test sets below `data.root` or beside the
    sources, and with the run's own test questions. Generated data is left alone.

    Raises:
        UserError: A test set has some of these questions or databases, and data.overlap=refuse. It
            says which databases to leave out, those that are left out already too.
    """
    data, index = config.data, OverlapIndex()
    if data.root is None:
        return
    for name, examples in _measured(data, data.root, splits).items():
        for example in examples:
            index.measure(name, example)
    for name in _LEARNED:
        for example in splits.get(name, ()):
            index.learn(f"data.{name}", example)
    overlaps = index.overlaps()
    refused = [one for one in overlaps if one.is_refused and data.overlap == "refuse"]
    if refused:
        names = set(data.train.exclude_databases)
        names = names.union(*(found for one in refused for found in one.shared.values()))
        listed = ", ".join(sorted(names)[:_LISTED]) + ", ..." * (len(names) > _LISTED)
        more = "" if data.validation is None else ", choose by others (data.held_out=200)"
        raise UserError(
            f"{'; '.join(one.line() for one in refused)}; leave these out "
            f"(data.train.exclude_databases='[{listed}]'){more}, or set data.overlap=tell to go "
            "on with them"
        )
    for overlap in overlaps:
        _log.warning("%s", overlap.line())


def _measured(
    data: DataSection, root: Path, splits: Mapping[Split, Sequence[Example]]
) -> dict[str, Sequence[Example]]:
    """Collect the questions to measure by and to choose by."""
    places = {root / source.path for name in _LEARNED for source in data.of(name).sources}
    away = [one for one in sorted(places) if not one.resolve().is_relative_to(root.resolve())]
    measured = {name: found for place in (*away, root) for name, found in _test_sets(place)}
    own = (one.model_copy(update={"path": root / one.path}) for one in data.test.sources)
    test = {(one.id, one.database) for one in splits.get("test", ())}
    known = ({(one.id, one.database) for one in examples} for examples in measured.values())
    if not any(test <= one for one in known) and not all(map(_is_generated, own)):
        measured["data.test"] = splits.get("test", ())
    if data.validation is not None:
        measured["data.validation"] = splits.get("validation", ())
    return measured


def _test_sets(root: Path) -> Iterator[tuple[str, Sequence[Example]]]:
    """Read the published test sets below a folder, as far as they are there."""
    for name, named in TEST_SETS.items():
        source = named.at(root)
        try:
            if not _is_generated(source):
                yield name, read_all(source, needs_databases=False)
        except AbsentError:
            pass
        except UserError as error:
            _log.warning("%s is not compared with: %s", name, error)


def _is_generated(source: SourceConfig) -> bool:
    return (locate(source).root / STAMP).is_file()
