"""Contamination: what questions to learn from and questions to measure by have in common.

A checkpoint that was chosen by a test set's questions, or that has learned from its databases,
says nothing on that set: a run is refused before anything is trained, unless data.overlap=tell.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.config import DataSection, JobConfig, Split
from minirl.exchange import UserError
from sqlenv.config import SourceConfig
from sqlenv.data.layouts import TEST_SETS, AbsentError, locate
from sqlenv.data.loading import read_all
from sqlenv.demo import STAMP
from sqlenv.types import Example

_log = logging.getLogger(__name__)

OverlapKind = Literal["database name", "question"]
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
    """What sets to learn from and sets to measure by share: names of databases, and texts of
    questions about databases of one name, compared without regard to case and blanks.
    """

    def __init__(self) -> None:
        # By what may be the same, the sets to measure by that have it, each with what is told.
        self._known: defaultdict[tuple[OverlapKind, Any], dict[str, str]] = defaultdict(dict)
        # By sets and kind, what is measured by, and the databases to learn from that share it.
        self._found: defaultdict[tuple[str, str, OverlapKind], defaultdict[str, set[str]]]
        self._found = defaultdict(lambda: defaultdict(set))

    def measure(self, name: str, example: Example) -> None:
        """Add a question to measure by; all of them come before those to learn from."""
        for kind, value in _traits(example):
            self._known[kind, value][name] = example.id if kind == "question" else example.db_id

    def learn(self, name: str, example: Example) -> None:
        """Compare a question to learn from, or to choose by, with those of other sets."""
        for kind, value in _traits(example):
            for other, what in self._known.get((kind, value), {}).items():
                if other != name:
                    self._found[name, other, kind][what].add(example.db_id)

    def overlaps(self) -> list[Overlap]:
        """List what stands on both sides: databases, then questions."""
        order = sorted(self._found, key=lambda key: (key[2] == "question", key))
        return [Overlap(*key, self._found[key]) for key in order]


def _traits(example: Example) -> Iterator[tuple[OverlapKind, Any]]:
    """Give what may stand on the other side too."""
    yield "database name", example.db_id
    yield "question", (example.db_id, _key(example.question))


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
