"""Where the data sets keep their files, and reading those files."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import ijson

from sqlenv.config import Layout, SourceConfig, Split
from sqlenv.errors import UserError

Record = dict[str, Any]

_SEARCHED = 1_000
_LEVELS = 200
"""Lists and objects within one another in a question file; parsed queries of Spider have some 30.
What is deeper takes ijson memory with the square of its depth."""
_CHUNK_BYTES = 1 << 20


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
        marks: Fields that tell its records from other data sets'.
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
    marks: frozenset[str] = frozenset({"question", "query"})


_SPIDERS = ("database", "../spider/database", "../spider_data/database")
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
        marks=frozenset({"SpiderSynQuestion", "query"}),
    ),
    "spider_dk": Form("Spider-DK", {"dev": ("Spider-DK.json",)}, databases=_SPIDERS),
    "spider_realistic": Form(
        "spider-realistic", {"dev": ("spider-realistic.json",)}, databases=_SPIDERS
    ),
    "spider2": Form(
        "spider2_sqlite",
        {"test": ("test.json", "spider2-lite.jsonl")},
        databases=(
            *("databases", "resource/databases", "resource/databases/spider2-localdb"),
            "spider2-localdb",
        ),
        evidence="external_knowledge",
        documents="resource/documents",
        marks=frozenset({"question", "external_knowledge"}),
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
        marks=frozenset({"question", "SQL"}),
    ),
    "synsql": Form(
        "SynSQL-2.5M",
        {"train": ("data.json",)},
        databases=("databases",),
        gold="sql",
        evidence="external_knowledge",
        marks=frozenset({"question", "sql", "sql_complexity"}),
    ),
    "prepared": Form(
        "prepared",
        {"train": ("train.jsonl",), "dev": ("validation.jsonl",)},
        databases=(),
        tables=(),
        marks=frozenset({"database", "fingerprint"}),
    ),
}


@dataclass(frozen=True, slots=True)
class NamedSet:
    """A data set as commands name it.

    Attributes:
        file: Question file, where it is not the layout's own for the split.
    """

    layout: Layout
    split: Split
    file: str = ""


SETS: Mapping[str, NamedSet] = {
    "bird-train": NamedSet("bird", "train"),
    "spider-train": NamedSet("spider", "train"),
    "spider-syn-train": NamedSet("spider_syn", "train"),
    "synsql": NamedSet("synsql", "train"),
    "bird-dev": NamedSet("bird", "dev"),
    "bird-minidev": NamedSet("bird", "dev", "mini_dev_sqlite.json"),
    "spider-dev": NamedSet("spider", "dev"),
    "spider-test": NamedSet("spider", "test"),
    "spider-syn": NamedSet("spider_syn", "dev"),
    "spider-dk": NamedSet("spider_dk", "dev"),
    "spider-realistic": NamedSet("spider_realistic", "dev"),
    "spider2-local": NamedSet("spider2", "test"),
}
"""Data sets by name, those to learn from first."""

MANIFEST = "prepared.json"
"""What makes a folder one that `launch.prepare` has written."""

_STRANGERS = {
    "OmniSQL's finished prompts": frozenset({"input_seq", "output_seq"}),
    "a list of schemas, such as tables.json": frozenset({"table_names_original", "column_names"}),
}


@dataclass(frozen=True, slots=True)
class Location:
    """The files of a source that were found.

    Attributes:
        root: The data set's own folder.
        files: Question files.
        databases: Folders that hold databases, in the order they are searched.
        layout: The source's, or `prepared`.
    """

    root: Path
    files: tuple[Path, ...]
    databases: tuple[Path, ...]
    layout: Layout

    def database(self, db_id: str) -> Path | None:
        """Find a database's file; None where there is none."""
        names = (Path(db_id, f"{db_id}.sqlite"), Path(f"{db_id}.sqlite"))
        paths = (folder / name for folder in self.databases for name in names)
        return next((path for path in paths if is_file(path)), None)


def is_file(path: Path) -> bool:
    """Tell whether a name from a record is a file; pathlib raises for one that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113


def check_open(folder: Path) -> None:
    """Refuse a folder in which nothing can be found: what is there would look missing.

    Raises:
        UserError: It may not be read.
    """
    if not is_open(folder):
        raise UserError(f"{folder}: this folder may not be read; allow it, or copy it")


def is_open(folder: Path) -> bool:
    """Tell whether a folder may be listed, and what is in it be opened."""
    return os.access(folder, os.R_OK | os.X_OK)


def locate(source: SourceConfig) -> Location:
    """Find a source's files.

    Raises:
        UserError: The folder does not have the source's layout; says which one nearby does.
    """
    if not source.path.is_dir():
        what = "is a file, not the data set's folder" if source.path.exists() else "does not exist"
        raise UserError(f"{source.path} {what}: point `path` of the {source.layout} source at it")
    check_open(source.path)
    if source.layout == "prepared" or (source.path / MANIFEST).is_file():
        return _prepared(source)
    form = FORMS[source.layout]
    # OmniSQL's folder first: beside it lies a train_spider.json of finished prompts.
    for root in filter(Path.is_dir, (source.path / form.omnisql, source.path)):
        if files := question_files(root, source):
            databases = _database_folders(root, files[0].parent, form)
            return Location(root, files, databases, source.layout)
    raise UserError(_nothing_found(source))


def _prepared(source: SourceConfig) -> Location:
    """Find a set that was prepared, by the name of its file or as the data set that it was."""
    own = source.file or FORMS["prepared"].files.get(source.split, ("test.jsonl",))[0]
    asked = NamedSet(source.layout, source.split, source.file)
    expected = next((f"{name}.jsonl" for name, one in SETS.items() if one == asked), own)
    file = source.path / expected
    if (source.path / MANIFEST).is_file() and file.is_file():
        return Location(source.path, (file,), (), "prepared")
    found = ", ".join(sorted(path.name for path in source.path.glob("*.jsonl"))) or "no set at all"
    raise UserError(
        f"{source.path}: no {MANIFEST} with {expected} in it, but {found}; prepare that set too "
        "(python -m launch.prepare), or correct `path` and `file`"
    )


def foreign(layout: Layout, record: Record) -> str:
    """Name what a record is of, where it is of another data set; empty where it may be this one."""
    fields = record.keys()
    if FORMS[layout].marks <= fields:
        return ""
    kinds = {**{name: form.marks for name, form in FORMS.items()}, **_STRANGERS}
    return next((name for name, marks in kinds.items() if marks <= fields), "")


def read_records(path: Path) -> Iterator[Record]:
    """Stream the records of a JSON list, or of a .jsonl file, one at a time.

    Raises:
        UserError: The file is damaged or is not a list of objects.
    """
    count = 0
    with path.open("rb") as file:
        if file.read(3) != codecs.BOM_UTF8:
            file.seek(0)
        try:
            for record in _json_lines(file) if path.suffix == ".jsonl" else _json_list(file):
                if not isinstance(record, dict):
                    raise UserError(f"{path}: record {count} is not an object with fields")
                yield record
                count += 1
        except (_TooDeepError, RecursionError):
            raise UserError(
                f"{path}: more than {_LEVELS} levels of lists and objects after {count} whole "
                "records; it is damaged, fetch it again"
            ) from None
        except (ijson.JSONError, ValueError) as error:
            where = f"after {count} whole records, before byte {file.tell()}"
            if isinstance(error, _BrokenLineError):
                where += f", in line {error.args[0]}"
            if not path.stat().st_size:
                where = "in it: the file is empty"
            if encoding := _encoding_problem(path):
                raise UserError(f"{path}: {encoding}") from error
            raise UserError(
                f"{path}: broken JSON {where}; it is cut off or damaged, fetch it again"
            ) from error
    if not count:
        raise UserError(f"{path}: expected a list of records, found none")


# Finding.


def question_files(root: Path, source: SourceConfig) -> tuple[Path, ...]:
    """Find a source's question files in a folder; none if they are not there."""
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
    right = next((folder for folder in nearby if question_files(folder, source)), None)
    advice = f"use {right}, which has it" if right else "check `path`, `layout` and `split`"
    return f"{problem}; {advice}"


# Reading.


def is_utf16(start: bytes) -> bool:
    """Tell from the first bytes of a text that its characters have two bytes each."""
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in start[:2]


def _encoding_problem(path: Path) -> str:
    """Say of a file that is no JSON that it is no UTF-8; empty where it is."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if not read and is_utf16(chunk):
                return "is UTF-16; save it as UTF-8"
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                at = read - waiting + error.start
                return f"byte {at} is not UTF-8; save it as UTF-8, or fetch it again"
            read += len(chunk)
    return ""


class _BrokenLineError(ValueError):
    """The number of a line that is not JSON."""


class _TooDeepError(ValueError):
    """More than `_LEVELS` levels."""


class _Shallow:
    """A file of JSON whose levels are counted as it is read, chunk by chunk."""

    _SIGNS = bytes.maketrans(b"{}", b"[]")
    _OTHERS = bytes(set(range(256)) - set(b'"[]{}'))

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._levels, self._is_text, self._escape = 0, False, b""

    def read(self, size: int = -1) -> bytes:
        """Read on.

        Raises:
            _TooDeepError: There are too many levels.
        """
        data = self._file.read(size)
        text = self._escape + data
        bare = text.rstrip(b"\\")
        self._escape = text[len(bare) :]  # of what the next chunk begins with
        signs = bare.replace(b"\\\\", b"").replace(b'\\"', b"").translate(self._SIGNS, self._OTHERS)
        # Without what nobody counts between them, most quotes stand side by side.
        parts = (b'"' * self._is_text + signs).replace(b'""', b"").split(b'"')
        self._is_text = len(parts) % 2 == 0
        signs = b"".join(parts[::2])
        for _ in range(_LEVELS):
            before, signs = signs, signs.replace(b"[]", b"")
            if signs == before:  # whatever is closed before what is opened
                break
        self._levels += signs.count(b"[") - signs.count(b"]")
        if self._levels > _LEVELS or b"[]" in signs:
            raise _TooDeepError
        return data


def _json_list(file: IO[bytes]) -> Iterator[Any]:
    return ijson.items(_Shallow(file), "item", use_float=True)


def _json_lines(file: IO[bytes]) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise _BrokenLineError(number) from error
