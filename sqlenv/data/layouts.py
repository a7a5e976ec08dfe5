"""Where data sets keep their files: `layouts.yaml`, and how it is used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import yaml

from minirl.exchange import UserError
from minirl.exchange.settings import Settings
from sqlenv.config import DatasetSplit, Layout, SourceConfig
from sqlenv.data.records import Record, read_records
from sqlenv.types import Dialect


class NamedSet(Settings):
    """A split of a data set, as commands name it.

    Of a test set, `questions` says how many are published (for SQLite) and `comparators` by which
    it is judged, its own measure first.
    """

    layout: Layout
    split: DatasetSplit
    file: str = ""
    questions: int = 0
    comparators: tuple[str, ...] = ()

    def at(self, folder: Path, dialect: Dialect = "sqlite") -> SourceConfig:
        """Take it from a folder, with the file that has its gold queries in a dialect."""
        name = "postgresql" if dialect == "postgres" else dialect
        file = self.file.replace("sqlite", name)
        return SourceConfig(
            layout=self.layout, path=folder, split=self.split, file=file, dialect=dialect
        )


class DatasetSpec(Settings):
    """How one data set is laid out.

    Attributes:
        omnisql: Its folder in OmniSQL's `data/`.
        files: Question files of each split: patterns, of which the first that matches counts.
        fields: Fields that tell its records from other data sets'.
        databases: Folders of databases, relative to the question file or to the data set.
        tables: Files of natural names.
        more: A second question file that belongs to the split, where it exists.
        documents: Folder of the files that `evidence` names, where it does not hold text.
        is_graded: Whether its queries have Spider's levels of difficulty, told by their text.
    """

    omnisql: str
    files: Mapping[DatasetSplit, tuple[str, ...]]
    fields: frozenset[str] = frozenset({"question", "query"})
    databases: tuple[str, ...] = ("database", "test_database")
    tables: tuple[str, ...] = ("tables.json", "test_tables.json")
    more: Mapping[DatasetSplit, str] = {}
    gold: str = "query"
    question: str = "question"
    evidence: str = "evidence"
    documents: str = ""
    is_graded: bool = False


_KNOWN = yaml.safe_load(Path(__file__).with_name("layouts.yaml").read_text(encoding="utf-8"))
DATASETS: Mapping[Layout, DatasetSpec] = {
    name: DatasetSpec(**given) for name, given in _KNOWN["datasets"].items()
}
SETS: Mapping[str, NamedSet] = {name: NamedSet(**given) for name, given in _KNOWN["sets"].items()}
"""Data sets by name, those to learn from first."""
TEST_SETS: Mapping[str, NamedSet] = {name: one for name, one in SETS.items() if one.comparators}
"""Published test sets."""


def set_name(source: SourceConfig) -> str:
    """Name the set that a source is; empty where it is none of them."""
    asked = (source.layout, source.split, source.file)
    names = (name for name, one in SETS.items() if (one.layout, one.split, one.file) == asked)
    return next(names, "")


_NO_DATASETS = {
    "OmniSQL's finished prompts": frozenset({"input_seq", "output_seq"}),
    "a list of schemas, such as tables.json": frozenset({"table_names_original", "column_names"}),
}


def find_set(folder: Path, file: Path) -> SourceConfig:
    """Take a question file in a folder for the data set that its records are of."""
    kind = _kind_of(next(read_records(file)))
    if kind not in DATASETS:
        raise UserError(f"{file}: its records are of {kind}; give a file of questions")
    given = {"layout": kind, "path": folder, "split": "dev", "file": str(file)}
    return SourceConfig.model_validate(given)


class AbsentError(UserError):
    """A data set is not in a folder."""


@dataclass(frozen=True, slots=True)
class Location:
    """The files of a source that were found; databases' folders in the order they are searched."""

    root: Path
    files: tuple[Path, ...]
    databases: tuple[Path, ...]

    def database(self, db_id: str) -> Path | None:
        """Find a database's file; None where there is none."""
        names = (Path(db_id, f"{db_id}.sqlite"), Path(f"{db_id}.sqlite"))
        paths = (folder / name for folder in self.databases for name in names)
        return next((path for path in paths if is_file(path)), None)


def is_file(path: Path) -> bool:
    """Tell whether a name from a record is a file; pathlib raises for one that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113


def locate(source: SourceConfig) -> Location:
    """Find a source's files in its folder: OmniSQL's place first, the folder itself, then the
    folders in it, of which only one may hold them.

    Raises:
        AbsentError: They are not there, or those of another data set.
        UserError: They cannot be read, lack databases, or are there twice.
    """
    if not source.path.is_dir():
        raise UserError(f"{source.path} is no folder: point `path` at that of {source.layout}")
    if not os.access(source.path, os.R_OK | os.X_OK):  # what is there would look missing
        raise UserError(f"{source.path}: this folder may not be read; allow it, or copy it")
    near, inside = _searched(source)
    # A file of one's own may lie away from the databases.
    elsewhere = ((), (*near, *inside)) if source.file else ((),)
    problems: list[UserError] = []
    for others, folders in product(elsewhere, (near, inside)):
        found: dict[tuple[Path, ...], Location] = {}
        for root in folders:
            files = question_files(root, source)
            if files and files not in found:
                try:
                    found[files] = _location(root, files, source.layout, others)
                except UserError as error:
                    # Its frames would stay with it until the garbage is collected, and what these
                    # hold: the questions' connection, of megabytes.
                    problems.append(error.with_traceback(None))
        if len(found) > 1 and folders is inside:
            places = " and in ".join(str(one.root) for one in [*found.values()][:2])
            raise UserError(f"is in {places}; give the folder of one, or move the other away")
        if found:
            return next(iter(found.values()))
    problems.sort(key=lambda problem: isinstance(problem, AbsentError))
    raise problems[0] if problems else AbsentError(_nothing_found(source))


def _location(
    root: Path, files: tuple[Path, ...], layout: Layout, others: Sequence[Path]
) -> Location:
    """Make sure that files are of a data set, and find its databases: beside them, or in others."""
    for file in files:
        if other := other_dataset(layout, next(read_records(file))):
            raise AbsentError(f"{file}: its records are {other}")
    names, beside = DATASETS[layout].databases, files[0].parent
    paths = (base / name for base in (beside, root, *others) for name in names)
    if databases := tuple(dict.fromkeys(path for path in paths if path.is_dir())):
        return Location(root, files, databases)
    packed = sorted(beside.glob("*.zip"))
    advice = f"unpack {packed[0]}" if packed else "put the data set's databases there"
    raise UserError(f"{beside}: no folder {' or '.join(names)} in it; {advice}")


def _kind_of(record: Record) -> str:
    """Name the data set of a record; empty where it is of none."""
    kinds = {name: spec.fields for name, spec in DATASETS.items()} | _NO_DATASETS
    return next((name for name, fields in kinds.items() if fields <= record.keys()), "")


def other_dataset(layout: Layout, record: Record) -> str:
    """Say of which other data set a record is; empty where it may be of this one."""
    other = "" if DATASETS[layout].fields <= record.keys() else _kind_of(record)
    advice = f"give {layout}'s own file, or correct `layout`"
    fields = ", ".join(list(record)[:8])
    return f"of {other} (with {fields}), not of {layout}; {advice}" if other else ""


def question_files(root: Path, source: SourceConfig) -> tuple[Path, ...]:
    """Find a source's question files in a folder; none if they are not there."""
    spec = DATASETS[source.layout]
    if source.file:
        return (root / source.file,) if (root / source.file).is_file() else ()
    for pattern in spec.files.get(source.split, ()):
        # Of several releases side by side (dev_20240627, dev_20251106) the newest counts.
        if matches := sorted(path for path in root.glob(pattern) if path.is_file()):
            more = matches[-1].with_name(spec.more.get(source.split, matches[-1].name))
            return tuple(dict.fromkeys(path for path in (matches[-1], more) if path.is_file()))
    return ()


def is_below(source: SourceConfig) -> bool:
    """Tell whether a source's files are in one of the folders that are searched."""
    return any(question_files(root, source) for root in chain(*_searched(source)))


def _nothing_found(source: SourceConfig) -> str:
    spec = DATASETS[source.layout]
    if not source.file and source.split not in spec.files:
        return f"{source.layout} has no split {source.split}; it has {', '.join(spec.files)}"
    expected = source.file or " or ".join(spec.files[source.split])
    where = f"in it or a folder in it (layout {source.layout}, split {source.split})"
    above = source.path.resolve().parent
    is_above = bool(question_files(above, source))
    advice = f"use {above}, which has it" if is_above else "check `path`, `layout` and `split`"
    return f"{source.path}: no {expected} {where}; {advice}"


def _searched(source: SourceConfig) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """List the folders that may hold a source, and the folders in its own."""
    root = source.path
    inside = tuple(path for path in sorted(root.glob("*/")) if path.is_dir())
    # OmniSQL's folder first: beside it lies a train_spider.json of finished prompts.
    return (root / DATASETS[source.layout].omnisql, root), inside
