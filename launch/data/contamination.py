"""Contamination: what questions to learn from and questions to measure by have in common.

A checkpoint that was chosen by a test set's questions, or that has learned from its databases,
says nothing on that set: a run is refused before anything is trained, unless data.overlap=tell.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

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

Kind = Literal["database name", "database file", "question"]
_LEARNED: tuple[Split, ...] = ("train", "validation")
_NAMED = 5
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Overlap:
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
        return not self.measure.endswith("validation")

    def line(self) -> str:
        """Say it in a line."""
        what = f"{self.count:,} x {self.kind} (such as {', '.join(self.examples)})"
        return f"{self.learn} and {self.measure} share {what}"


class OverlapIndex:
    """What sets to learn from and sets to measure by share: databases, and texts of questions.

    Databases are the same by name or by their bytes. Texts are compared without regard to case and
    blanks; a question is the same only about the same database: one of its name, or with its tables
    and columns. Generic ones ("How many flights do we have?") may be asked of any.
    """

    def __init__(self) -> None:
        # By set, the names of databases by their files.
        self._learned: defaultdict[str, dict[Path, str]] = defaultdict(dict)
        self._measured: defaultdict[str, dict[Path, str]] = defaultdict(dict)
        self._questions: defaultdict[bytes, list[tuple[str, Example]]] = defaultdict(list)
        self._found: defaultdict[tuple[str, str, Kind], dict[str, str]] = defaultdict(dict)
        self._shape = cache(_shape)

    def measure(self, name: str, example: Example) -> None:
        """Add a question to measure by; all of them come before those to learn from."""
        self._measured[name][example.database] = example.db_id
        self._questions[_key(example.question)].append((name, example))

    def learn(self, name: str, example: Example) -> None:
        """Compare a question to learn from, or to choose by, with those of other sets."""
        self._learned[name][example.database] = example.db_id
        for other, known in self._questions.get(_key(example.question), ()):
            if other != name and (
                known.db_id == example.db_id
                or self._shape(known.database) == self._shape(example.database)
            ):
                self._found[name, other, "question"][known.id] = example.db_id

    def overlaps(self) -> list[Overlap]:
        """List what stands on both sides: databases, then questions."""
        found = []
        for there, here in product(self._learned, self._measured):
            if there != here:
                found += self._of_databases(there, here)
        for key, ids in sorted(self._found.items()):
            names = tuple(sorted(set(ids.values())))
            found.append(Overlap(*key, len(ids), tuple(sorted(ids)[:_NAMED]), names))
        return found

    def _of_databases(self, there: str, here: str) -> Iterator[Overlap]:
        known, entries = self._learned[there], self._measured[here]
        # Only files of one size can be the same: no other is read.
        sizes = {_size(path) for path in known} & {_size(path) for path in entries} - {None}
        traits: Mapping[Kind, Callable[[Path, str], str | None]] = {
            "database name": lambda _path, name: name,
            "database file": lambda path, _: fingerprint(path) if _size(path) in sizes else None,
        }
        for kind, trait in traits.items():
            seen = defaultdict(list)
            for path, name in known.items():
                seen[trait(path, name)].append(name)
            seen.pop(None, None)
            if same := [one for one in entries.items() if trait(*one) in seen]:
                shown = tuple(name for _, name in same[:_NAMED])
                names = tuple(name for one in same for name in seen[trait(*one)])
                yield Overlap(there, here, kind, len(same), shown, names)


def _size(path: Path) -> int | None:
    return path.stat().st_size if is_file(path) else None


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
        names = {
            *data.train.exclude_databases,
            *(name for one in refused for name in one.databases),
        }
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
