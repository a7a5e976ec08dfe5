"""Where the data sets keep their files, and reading those files."""

from __future__ import annotations

import csv
import io
import json
import os.path
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from textwrap import shorten
from typing import IO, Any

import ijson

from sqlenv.config import Layout, SourceConfig
from sqlenv.errors import UserError
from sqlenv.records import Named, TableNames, check
from sqlenv.schema import ColumnKey, Descriptions

Record = dict[str, Any]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SEARCHED = 1_000

DESCRIPTION_CHARACTERS = 240
"""Full descriptions are cut here: some of BIRD's explain common sense at length."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one data set is laid out.

    Attributes:
        omnisql: Its folder in OmniSQL's `data/`.
        files: Question files of each split: patterns, of which the first that matches counts.
        databases: Folders of databases, relative to the question file or to the data set.
        more: A second question file that belongs to the split, where it exists.
        gold, question, evidence: Names of the fields.
        documents: Folder of the files that `evidence` names, where it does not hold text.
    """

    omnisql: str
    files: Mapping[str, tuple[str, ...]]
    databases: tuple[str, ...] = ("database", "test_database")
    more: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[str, ...] = ("tables.json", "test_tables.json")
    gold: str = "query"
    question: str = "question"
    evidence: str = "evidence"
    documents: str = ""


_SPIDERS = ("database", "../spider/database")
FORMS: Mapping[Layout, Form] = {
    "spider": Form(
        "spider",
        {
            "train": ("train_spider.json", "train.json"),
            "dev": ("dev.json", "val.json"),
            "test": ("test.json",),
        },
        more={"train": "train_others.json"},
    ),
    "spider_syn": Form(
        "Spider-Syn",
        {"train": ("train_spider.json",), "dev": ("dev.json",)},
        databases=_SPIDERS,
        question="SpiderSynQuestion",
    ),
    "spider_dk": Form("Spider-DK", {"dev": ("Spider-DK.json",)}, databases=_SPIDERS),
    "spider_realistic": Form(
        "spider-realistic", {"dev": ("spider-realistic.json",)}, databases=_SPIDERS
    ),
    "spider2": Form(
        "spider2_sqlite",
        {"test": ("test.json", "spider2-lite.jsonl")},
        databases=("databases", "resource/databases", "resource/databases/spider2-localdb"),
        evidence="external_knowledge",
        documents="resource/documents",
    ),
    "bird": Form(
        "bird",
        {
            "train": ("train.json", "train/train.json"),
            "dev": ("dev.json", "dev/dev.json", "dev_[0-9]*/dev.json"),
        },
        databases=("train_databases", "dev_databases"),
        tables=("train_tables.json", "dev_tables.json"),
        gold="SQL",
    ),
    "synsql": Form(
        "SynSQL-2.5M",
        {"train": ("data.json",)},
        databases=("databases",),
        gold="sql",
        evidence="external_knowledge",
    ),
}


@dataclass(frozen=True, slots=True)
class Location:
    """The files of a source that were found.

    Attributes:
        root: The data set's own folder.
        files: Question files.
        databases: Folders that hold databases, in the order they are searched.
    """

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
    """Find a source's files.

    Raises:
        UserError: The folder does not have the source's layout; says which one nearby does.
    """
    if not source.path.is_dir():
        what = "is a file, not the data set's folder" if source.path.exists() else "does not exist"
        raise UserError(f"{source.path} {what}: point `path` of the {source.layout} source at it")
    form = FORMS[source.layout]
    # OmniSQL's folder first: beside it lies a train_spider.json of finished prompts.
    for root in (source.path / form.omnisql, source.path):
        if files := _question_files(root, source):
            return Location(root, files, _database_folders(root, files[0].parent, form))
    raise UserError(_nothing_found(source))


def read_records(path: Path) -> Iterator[Record]:
    """Stream the records of a JSON list, or of a .jsonl file, one at a time.

    Raises:
        UserError: The file is damaged or is not a list of objects.
    """
    count = 0
    with path.open("rb") as file:
        if file.read(3) != _BYTE_ORDER_MARK:
            file.seek(0)
        try:
            for record in _json_lines(file) if path.suffix == ".jsonl" else _json_list(file):
                if not isinstance(record, dict):
                    raise UserError(f"{path}: record {count} is not an object with fields")
                yield record
                count += 1
        except (ijson.JSONError, ValueError) as error:
            where = f"after {count} whole records, before byte {file.tell()}"
            raise UserError(
                f"{path}: broken JSON {where}; it is cut off or damaged, fetch it again"
            ) from error
    if not count:
        raise UserError(f"{path}: expected a list of records, found none")


def read_descriptions(
    location: Location, source: SourceConfig, databases: Mapping[str, Path]
) -> dict[Path, Descriptions]:
    """Read what columns hold: tables.json's natural names, or BIRD's full descriptions.

    Args:
        location: The source's files.
        source: Says which of the two.
        databases: The databases in use, by `db_id`.
    """
    found: dict[Path, dict[ColumnKey, str]] = {path: {} for path in databases.values()}
    for file in _beside(location, FORMS[source.layout].tables):
        for number, entry in enumerate(read_records(file)):
            where = {"where": f"{file}: record {number}", "advice": "correct it or fetch it again"}
            if path := databases.get(check(Named, entry, **where).db_id):
                found[path].update(_natural_names(check(TableNames, entry, **where)))
    if source.comments == "full":
        for path, descriptions in found.items():
            descriptions.update(_full_descriptions(path.parent / "database_description"))
    return {path: descriptions for path, descriptions in found.items() if descriptions}


# Finding.


def _question_files(root: Path, source: SourceConfig) -> tuple[Path, ...]:
    form = FORMS[source.layout]
    if source.file:
        return (root / source.file,) if (root / source.file).is_file() else ()
    for pattern in form.files.get(source.split, ()):
        # Of several releases side by side (dev_20240627, dev_20251106) the newest counts.
        if matches := sorted(path for path in root.glob(pattern) if path.is_file()):
            more = matches[-1].with_name(form.more.get(source.split, matches[-1].name))
            return tuple(dict.fromkeys(path for path in (matches[-1], more) if path.is_file()))
    return ()


def _database_folders(root: Path, beside: Path, form: Form) -> tuple[Path, ...]:
    paths = (base / name for name in form.databases for base in (beside, root))
    folders = tuple(dict.fromkeys(path for path in paths if path.is_dir()))
    if folders:
        return folders
    packed = sorted(beside.glob("*.zip"))
    advice = f"unpack {packed[0]}" if packed else "put the data set's databases there"
    raise UserError(f"{beside}: no folder {' or '.join(form.databases)} in it; {advice}")


def _nothing_found(source: SourceConfig) -> str:
    form = FORMS[source.layout]
    if not source.file and source.split not in form.files:
        return f"{source.layout} has no split {source.split}; it has {', '.join(form.files)}"
    expected = source.file or " or ".join(form.files[source.split])
    problem = f"{source.path}: no {expected} in it (layout {source.layout}, split {source.split})"
    nearby = chain(
        islice((p for depth in ("*/", "*/*/") for p in sorted(source.path.glob(depth))), _SEARCHED),
        source.path.resolve().parents[:2],
    )
    right = next((folder for folder in nearby if _question_files(folder, source)), None)
    advice = f"use {right}, which has it" if right else "check `path`, `layout` and `split`"
    return f"{problem}; {advice}"


def _beside(location: Location, names: tuple[str, ...]) -> list[Path]:
    folders = (location.files[0].parent, location.root, *(d.parent for d in location.databases))
    paths = (folder / name for folder in folders for name in names)
    return [path for path in dict.fromkeys(paths) if path.is_file()]


# Reading.


def _json_list(file: IO[bytes]) -> Iterator[Any]:
    return ijson.items(file, "item", use_float=True)


def _json_lines(file: IO[bytes]) -> Iterator[Any]:
    return (json.loads(line) for line in file if line.strip())


def _natural_names(entry: TableNames) -> dict[ColumnKey, str]:
    tables = entry.table_names_original
    pairs = zip(entry.column_names_original, entry.column_names, strict=True)
    return {
        (tables[table].lower(), original.lower()): natural
        for (table, original), (_, natural) in pairs
        if table >= 0
    }


def _full_descriptions(folder: Path) -> dict[ColumnKey, str]:
    """Read BIRD's database_description: one CSV a table, in mixed encodings, names padded."""
    found = {}
    for file in sorted(folder.glob("*.csv")):
        try:
            rows = list(csv.DictReader(io.StringIO(_decoded(file.read_bytes()), newline="")))
        except csv.Error as error:
            raise UserError(f"{file}: not a readable CSV file ({error}); fetch it again") from error
        for row in rows:
            cells = ((row.get(name) or "").strip() for name in _DESCRIPTION_FIELDS)
            column, name, description, values = cells
            text = "; ".join(filter(None, (description or name, values)))
            found[file.stem.strip().lower(), column.lower()] = shorten(
                text, DESCRIPTION_CHARACTERS, placeholder=" ..."
            )
    return found


_DESCRIPTION_FIELDS = (
    "original_column_name",
    "column_name",
    "column_description",
    "value_description",
)


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")
