"""What a data set's own files say of columns: natural names or BIRD's descriptions, and types."""

from __future__ import annotations

import codecs
import csv
import io
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

from minirl.exchange import UserError
from sqlenv.config import SourceConfig
from sqlenv.data.layouts import DATASETS, Location
from sqlenv.data.records import Record, TableNames, check, read_records
from sqlenv.schema.reading import ColumnKey, Described, Descriptions, described_key

_log = logging.getLogger(__name__)

DESCRIPTION_CHARACTERS = 240
"""Full descriptions are cut here: some of BIRD's explain common sense at length."""

_FIELDS = ("original_column_name", "column_name", "column_description", "value_description")
_FOLDER = "database_description"


def read_descriptions(
    location: Location, source: SourceConfig, databases: Mapping[str, Path]
) -> dict[Path, Descriptions]:
    """Read what is said of the columns of databases (by `db_id`).

    tables.json's natural names and types; with `comments: full` BIRD's descriptions go before the
    names.
    """
    found: defaultdict[Path, dict[ColumnKey, Described]] = defaultdict(dict)
    folders = (location.files[0].parent, location.root, *(d.parent for d in location.databases))
    names = DATASETS[source.layout].tables
    files = dict.fromkeys(folder / name for folder in folders for name in names)
    for file in filter(Path.is_file, files):
        for number, entry in enumerate(read_records(file)):
            if path := databases.get(str(entry.get("db_id"))):
                found[path] |= _in_tables(entry, f"{file}: record {number}")
    if source.comments == "full":
        for path in databases.values():
            told = found[path]
            for key, text in full_descriptions(path.parent).items():
                told[key] = told.get(key, Described())._replace(text=text)
    return dict(found)


def full_descriptions(folder: Path) -> dict[ColumnKey, str]:
    """Read BIRD's database_description: one CSV a table, in mixed encodings, names padded.

    Names of the folder, of files and of columns may differ from the database's in case.
    """
    # macOS leaves `._name.csv` beside each file of an archive.
    files = (file for file in folder.glob("*/*.*") if not file.name.startswith("."))
    named = (file for file in files if file.parent.name.strip().lower() == _FOLDER)
    found = {}
    for file in sorted(one for one in named if one.suffix.lower() == ".csv" and one.is_file()):
        for row in _rows(file):
            column, name, description, values = ((row.get(key) or "").strip() for key in _FIELDS)
            text = "; ".join(filter(None, (description or name, values)))
            found[described_key(file.stem, column)] = shorten(
                text, DESCRIPTION_CHARACTERS, placeholder=" ..."
            )
    return found


def _rows(file: Path) -> list[dict[str, str]]:
    text = _decoded(file.read_bytes()).replace("\0", "")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    names = [(name or "").strip().lower() for name in reader.fieldnames or ()]
    reader.fieldnames = [re.sub(r"[\s_]+", "_", name) for name in names]
    if _FIELDS[0] in reader.fieldnames:
        try:
            return list(reader)
        except csv.Error as error:
            raise UserError(f"{file}: not a readable CSV file ({error}); copy it again") from None
    _log.warning(
        "%s: line 1 has no column %s, but %s; its descriptions are not used",
        file, _FIELDS[0], ", ".join(reader.fieldnames)[:120],
    )  # fmt: skip
    return []


def _decoded(content: bytes) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", errors="replace")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.removeprefix(b"\xef\xbb\xbf").decode("cp1252", errors="replace")


def _in_tables(record: Record, where: str) -> dict[ColumnKey, Described]:
    advice = "correct it or fetch it again"
    entry = check(TableNames, record, where=where, advice=advice)
    tables, originals = entry.table_names_original, entry.column_names_original
    types = entry.column_types or [""] * len(originals)
    try:
        return {
            described_key(tables[table], original): Described(natural, kind)
            for (table, original), (_, natural), kind in zip(
                originals, entry.column_names, types, strict=True
            )
            if table >= 0
        }
    except (ValueError, IndexError):
        raise UserError(
            f"{where}: the columns' names and types and the tables do not agree; {advice}"
        ) from None
