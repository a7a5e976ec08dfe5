"""Which data sets lie below a folder, told by where files are and what fields they have."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.layouts import (
    DATASETS,
    MANIFEST,
    SETS,
    check_open,
    folders_below,
    locate,
    other_dataset,
    question_files,
)
from sqlenv.data.records import read_records
from sqlenv.data.sources import Pool
from sqlenv.errors import UserError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Detected:
    """The data sets found below a folder, by their names in `SETS`.

    `left` says why files that look like a data set's, and are of none that was found, are not it.
    """

    sources: dict[str, SourceConfig]
    left: dict[str, str]


def detect(root: Path) -> Detected:
    """Find every data set in a folder: one download, several side by side, or OmniSQL's `data/`."""
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise UserError(f"{root} {what}; give the folder of the downloads")
    check_open(root)
    if (root / MANIFEST).is_file():
        raise UserError(f"{root}: was itself prepared; give the folder of the downloads")
    sources: dict[str, SourceConfig] = {}
    left: dict[str, str] = {}
    tried = {name: {one: _problem(one) for one in _candidates(root, name)} for name in SETS}
    for name, tries in tried.items():
        good = [source for source, problem in tries.items() if not problem]
        near = [source for source in good if source.path in _near(root, name)]
        if len(good) == 1 or near:
            sources[name] = (near or good)[0]
    known = {file for source in sources.values() for file in _files(source)}
    for name in (name for name in SETS if name not in sources):
        tries = {one: why for one, why in tried[name].items() if not known.issuperset(_files(one))}
        if good := [source for source, problem in tries.items() if not problem]:
            places = " and in ".join(str(source.path) for source in good[:2])
            left[name] = f"is in {places}; give the folder of one, or move the other away"
        elif tries:
            left[name] = next(iter(tries.values()))
    return Detected(sources, left)


def _files(source: SourceConfig) -> tuple[Path, ...]:
    return question_files(source.path, source)


def _near(root: Path, name: str) -> tuple[Path, ...]:
    return root / DATASETS[SETS[name].layout].omnisql, root


def choose_sets(root: Path, names: Sequence[str]) -> dict[str, SourceConfig]:
    """Find the data sets of these names, or all that have databases; warn of what only looks like a
    data set.
    """
    found = detect(root)
    if not names:
        return _whole(root, found)
    for name in names:
        if name in found.left:
            raise UserError(f"{name}: {found.left[name]}")
        if name not in found.sources:
            there = ", ".join(found.sources) or "no data set"
            raise UserError(f"{root}: no {name}; expected {_expected(name)}; found {there}")
    return {name: found.sources[name] for name in names}


def _whole(root: Path, found: Detected) -> dict[str, SourceConfig]:
    """Leave out the data sets whose databases are a download of their own that is not there."""
    problems = {name: _without_databases(source) for name, source in found.sources.items()}
    left = found.left | {name: problem for name, problem in problems.items() if problem}
    if whole := {name: one for name, one in found.sources.items() if not problems[name]}:
        for name, problem in left.items():
            _log.warning("left out: %s: %s", name, problem)
        return whole
    for name, problem in left.items():
        raise UserError(f"{root}: no data set is whole; {name}: {problem}")
    there = ", ".join(sorted(path.name for path in islice(root.iterdir(), 8))) or "nothing"
    raise UserError(
        f"{root}: no data set recognised in {there}; expected such as {_expected('bird-train')}, "
        "there or up to two folders deeper (docs/data.md)"
    )


def _without_databases(source: SourceConfig) -> str:
    """Say where the databases of a source should be, if none is there; else nothing."""
    drops = {"drop_missing_database": True, "drop_failing_gold": False}
    pool = Pool(source, DataConfig.model_validate({"sources": (source,), **drops}))
    if next(pool.questions(), None) is not None:
        return ""
    folders = " or ".join(DATASETS[source.layout].databases)
    return f"{pool.location.files[0]}: no database of its questions is in {folders} beside it"


def _candidates(root: Path, name: str) -> Iterator[SourceConfig]:
    """List where a data set's question files lie: OmniSQL's folder, the folder, then deeper."""
    seen: set[tuple[Path, ...]] = set()
    for folder in (*_near(root, name), *folders_below(root)):
        source = SETS[name].at(folder)
        files = question_files(folder, source) if folder.is_dir() else ()
        if files and files not in seen:
            seen.add(files)
            yield source


def _problem(source: SourceConfig) -> str:
    """Say why the files of a candidate are not the data set; nothing where they are."""
    try:
        for file in _files(source):
            first = next(read_records(file))
            if other := other_dataset(source.layout, first):
                return (
                    f"{file}: its records are of {other} (they have {', '.join(list(first)[:8])}), "
                    f"not of {source.layout}, whose own file belongs into another folder"
                )
        locate(source)
    except UserError as error:
        return str(error)
    return ""


def _expected(name: str) -> str:
    named = SETS[name]
    spec = DATASETS[named.layout]
    files = named.file or " or ".join(spec.files[named.split])
    return f"{files} with {' or '.join(spec.databases)} beside it"
