"""The folder that `launch.prepare` writes: sets of questions, checked once, and their databases.

prepared.json     number and fingerprint of the questions of each set
<set>.jsonl       a question a line, with its issues, value matches and the fingerprint of all that
databases.jsonl   a database a line: where it is, its size and fingerprint, its schema's file
schemas/          what `read_schema` read, as JSON, and the text that prompts show
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from sqlenv.data.issues import Checked
from sqlenv.data.layouts import MANIFEST
from sqlenv.data.records import Record, check, read_records
from sqlenv.errors import UserError
from sqlenv.schema.reading import DatabaseSchema, Described, Descriptions, described_key
from sqlenv.types import Example

_Kind = TypeVar("_Kind")

DATABASES = "databases.jsonl"
SCHEMAS = "schemas"
_AGAIN = "run launch.prepare again"


class DatabaseEntry(BaseModel):
    """A line of databases.jsonl; `shape` is a hash of the names of its tables and columns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    db_id: str
    database: str
    bytes: int
    fingerprint: str
    shape: str
    schema_file: str


class Manifest(BaseModel):
    """What a reader needs of prepared.json."""

    class SetEntry(BaseModel):
        """A set."""

        questions: int

    sets: dict[str, SetEntry]


def write_question(checked: Checked) -> str:
    """Write a question as a line, without the line's end."""
    e = checked.example
    record = {
        "id": e.id,
        "db_id": e.db_id,
        "database": str(e.database),
        "question": e.question,
        "evidence": e.evidence,
        "query": e.gold_sql,
        "difficulty": e.difficulty,
        "dialect": e.dialect,
        "source": e.source,
        "style": checked.style,
        "hints": e.value_matches,
        "flaws": checked.issues,
        "note": checked.note,
        "rows": checked.rows,
        "prompt_tokens": checked.prompt_tokens,
    }
    record["fingerprint"] = _digest(record)
    return json.dumps(record, ensure_ascii=False)


def read_question(file: Path, index: int, record: Record) -> Checked:
    """Read a line of a set."""
    told = {key: value for key, value in record.items() if key != "fingerprint"}
    if _digest(told) != record.get("fingerprint"):
        raise UserError(f"{file}: line {index + 1} was changed after it was prepared; {_AGAIN}")
    example = Example(
        id=told["id"],
        question=told["question"],
        db_id=told["db_id"],
        database=Path(told["database"]),
        gold_sql=told["query"],
        evidence=told["evidence"],
        difficulty=told["difficulty"],
        dialect=told["dialect"],
        source=told["source"],
        value_matches=tuple((table, column, value) for table, column, value in told["hints"]),
    )
    kept = told["note"], told["style"], told["rows"], told["prompt_tokens"]
    return Checked(example, tuple(told["flaws"]), *kept)


def _digest(record: Mapping[str, Any]) -> str:
    # Where the database lies is not the question's: the same data has one fingerprint anywhere.
    told = {key: value for key, value in record.items() if key != "database"}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def check_count(folder: Path, file: Path, count: int) -> None:
    """Refuse a set that is not whole."""
    entry = _read_json(folder / MANIFEST, _MANIFEST).sets.get(file.stem)
    if entry is None:
        raise UserError(f"{file}: is no set of {folder / MANIFEST}; {_AGAIN}")
    if entry.questions != count:
        raise UserError(
            f"{file}: {count:,} questions, but {entry.questions:,} were prepared; it is cut off or "
            f"was added to: {_AGAIN}"
        )


def read_databases(folder: Path, used: Mapping[Path, str]) -> dict[Path, Path]:
    """Find the schema files of databases in use, each given with a question that needs it."""
    found: dict[Path, Path] = {}
    for index, record in enumerate(read_records(folder / DATABASES)):
        where = f"{folder / DATABASES}: line {index + 1}"
        entry = check(DatabaseEntry, record, where=where, advice=_AGAIN)
        database = Path(entry.database)
        if database not in used:
            continue
        size = os.path.getsize(database) if database.is_file() else None  # noqa: PTH202
        if size != entry.bytes:
            is_there = "is not there any more" if size is None else f"has {size:,} bytes now"
            raise UserError(
                f"{database} {is_there}, but question {used[database]} was prepared with its "
                f"{entry.bytes:,} bytes; bring it back, or {_AGAIN}"
            )
        found[database] = folder / entry.schema_file
    if missing := [path for path in used if path not in found]:
        raise UserError(f"{folder / DATABASES}: has no line for {missing[0]}; {_AGAIN}")
    return found


@dataclass(frozen=True, slots=True)
class StoredSchema:
    """A schema as `read_schema` read it and `render_schema` wrote it."""

    schema: DatabaseSchema
    examples: int
    profile: bool
    text: str

    def descriptions(self) -> Descriptions:
        """Return what is said of columns, as `read_schema` takes it."""
        return {
            described_key(table.name, column.name): Described(column.description, column.told_type)
            for table in self.schema.tables
            for column in table.columns
        }


_MANIFEST, _STORED = TypeAdapter(Manifest), TypeAdapter(StoredSchema)


def write_schema(path: Path, stored: StoredSchema) -> None:
    """Write a schema's file, whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    scratch.write_text(json.dumps(asdict(stored), ensure_ascii=False), encoding="utf-8")
    scratch.replace(path)


def read_stored_schema(path: Path) -> StoredSchema:
    """Read a schema's file."""
    return _read_json(path, _STORED)


def _read_json(path: Path, kind: TypeAdapter[_Kind]) -> _Kind:
    try:
        return kind.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        problem = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: cannot be read ({problem}); {_AGAIN}") from None
