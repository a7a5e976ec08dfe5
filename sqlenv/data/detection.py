"""Which data sets lie below a folder, told by where files are and what fields they have."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
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

_STRANGE = "its records are of"  # begins what is said of a file with the fields of another data set
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Detected:
    """The data sets found below a folder, by their names in `SETS`.

    `left` says why files that look like a data set's are not one, `unused` does so once a file.
    """

    sources: Mapping[str, SourceConfig]
    left: Mapping[str, str]
    unused: tuple[str, ...]


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
    looked_at: list[tuple[str, SourceConfig, str]] = []
    tried = {name: [_try(source) for source in _candidates(root, name)] for name in SETS}
    for name, tries in tried.items():
        good = [source for source, problem in tries if not problem]
        near = [source for source in good if source.path in _near(root, name)]
        if len(good) == 1 or near:
            sources[name] = (near or good)[0]
    told = {file for source in sources.values() for file in _files(source)}
    for name in (name for name in SETS if name not in sources):
        # A file of a set that was found is not this one's, but where this one's has to be.
        near = _near(root, name)
        tries = [one for one in tried[name] if one[0].path in near or _is_new(one[0], told)]
        if good := [source for source, problem in tries if not problem]:
            places = " and in ".join(str(source.path) for source in good[:2])
            left[name] = f"is in {places}; give the folder of one, or move the other away"
        elif tries:
            left[name] = tries[0][1]
        looked_at += [(name, source, problem or left[name]) for source, problem in tries]
    return Detected(sources, left, _unused(told, looked_at))


def _is_new(source: SourceConfig, told: Collection[Path]) -> bool:
    return not all(file in told for file in _files(source))


def _unused(
    told: Collection[Path], looked_at: Sequence[tuple[str, SourceConfig, str]]
) -> tuple[str, ...]:
    seen = set(told)
    lines: dict[str, None] = {}
    # A file with a data set's fields is that one's, whoever else has files of this name.
    for name, source, problem in sorted(looked_at, key=lambda one: _STRANGE in one[2]):
        if _is_new(source, seen):
            lines[f"{name}: {problem}"] = None
            seen.update(_files(source))
    return tuple(lines)


def _files(source: SourceConfig) -> tuple[Path, ...]:
    return question_files(source.path, source)


def _near(root: Path, name: str) -> tuple[Path, ...]:
    return root / DATASETS[SETS[name].layout].omnisql, root


def choose_sets(root: Path, names: Sequence[str]) -> dict[str, SourceConfig]:
    """Find the data sets of these names, or all that have databases; warn of what only looks like a
    data set.
    """
    found = detect(root) if names else _with_databases(detect(root))
    for name in names:
        if name in found.sources:
            continue
        if name in found.left:
            raise UserError(f"{name}: {found.left[name]}")
        for folder in root.glob("*/"):
            check_open(folder)
        there = ", ".join(found.sources) or "no data set"
        raise UserError(f"{root}: no {name}; expected {_expected(name)}; found {there}")
    if not names and not found.sources:
        if found.left:
            name, problem = next(iter(found.left.items()))
            raise UserError(f"{root}: no data set is whole; {name}: {problem}")
        there = ", ".join(sorted(path.name for path in islice(root.iterdir(), 8))) or "nothing"
        raise UserError(
            f"{root}: no data set recognised in {there}; expected such as "
            f"{_expected('bird-train')}, there or up to two folders deeper (docs/data.md)"
        )
    if not names:
        for line in found.unused:
            _log.warning("left out: %s", line)
    return {name: found.sources[name] for name in names or found.sources}


def _with_databases(found: Detected) -> Detected:
    """Leave out the data sets whose databases are a download of their own that is not there."""
    left: dict[str, str] = {}
    for name, source in found.sources.items():
        location, config = locate(source), DataConfig(sources=(source,), drop_failing_gold=False)
        config = config.model_copy(update={"drop_missing_database": True})
        for folder in location.databases:
            check_open(folder)
        pool = Pool(source, location, config, None)
        if next(pool.questions(), None) is None:
            folders = " or ".join(DATASETS[source.layout].databases)
            left[name] = (
                f"{location.files[0]}: no database of its questions is in {folders} beside it"
            )
    sources = {name: source for name, source in found.sources.items() if name not in left}
    unused = (*found.unused, *(f"{name}: {problem}" for name, problem in left.items()))
    return Detected(sources, {**found.left, **left}, unused)


def _candidates(root: Path, name: str) -> Iterator[SourceConfig]:
    """List where a data set's question files lie: OmniSQL's folder, the folder, then deeper."""
    named = SETS[name]
    seen: set[tuple[Path, ...]] = set()
    for folder in (*_near(root, name), *folders_below(root)):
        source = SourceConfig(layout=named.layout, path=folder, split=named.split, file=named.file)
        files = question_files(folder, source) if folder.is_dir() else ()
        if files and files not in seen:
            seen.add(files)
            yield source


def _try(source: SourceConfig) -> tuple[SourceConfig, str]:
    try:
        for file in question_files(source.path, source):
            first = next(read_records(file))
            if other := other_dataset(source.layout, first):
                return source, (
                    f"{file}: {_STRANGE} {other} (they have {', '.join(list(first)[:8])}), "
                    f"not of {source.layout}, whose own file belongs into another folder"
                )
        locate(source)
    except UserError as error:
        return source, str(error)
    return source, ""


def _expected(name: str) -> str:
    named = SETS[name]
    spec = DATASETS[named.layout]
    files = named.file or " or ".join(spec.files[named.split])
    return f"{files} with {' or '.join(spec.databases)} beside it"
