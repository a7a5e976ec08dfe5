"""The questions of the study in `claims.py`: generated, then put in other words, then renamed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import apsw
import sqlglot
from sqlglot import exp

from sqlenv.config import DemoConfig
from sqlenv.demo import generate
from sqlenv.demo.vocabulary import CATEGORIES, DOMAINS, NUMBERS, VOCABULARY, plural

DATA = "data"
"""Folder of the generated data set: databases to learn from, to choose by, to test on."""
VARIANTS = ("plain", "synonyms", "renamed")
"""Folders of the test questions, each in a file of that name: as generated; with synonyms in the
question; with columns renamed to synonyms in the database and the gold query."""
QUESTIONS = 500


def _both_ways(pairs: Mapping[str, str]) -> dict[str, str]:
    return {other: one for one, other in pairs.items()} | dict(pairs)


_COLUMNS = _both_ways(
    {
        concept: meaning.synonym
        for concept, meaning in (NUMBERS | CATEGORIES).items()
        if meaning.synonym
    }
)
_TABLES = _both_ways(
    {
        entity.names[0]: entity.names[1]
        for entities in DOMAINS.values()
        for entity in entities
        if len(entity.names) > 1
    }
)
# "show" is a table's synonym, and what most questions begin with.
_VERBS = {word.lower() for word in VOCABULARY.show}

Record = dict[str, Any]


def prepare(folder: Path, config: DemoConfig) -> None:
    """Write the data set and the variants of `QUESTIONS` of its test questions."""
    generate(folder / DATA, config)
    records: list[Record] = json.loads((folder / DATA / "test.json").read_text())
    chosen = sorted(Random(0).sample(range(len(records)), QUESTIONS))
    plain = [records[number] for number in chosen]
    schemas: list[Record] = json.loads((folder / DATA / "tables.json").read_text())
    used = {record["db_id"] for record in plain}
    kept = [schema for schema in schemas if schema["db_id"] in used]
    words = {schema["db_id"]: _other_words(schema) for schema in kept}
    names = {schema["db_id"]: _other_columns(schema) for schema in kept}
    spoken = [
        {**one, "question": in_other_words(one["question"], words[one["db_id"]])} for one in plain
    ]
    renamed = [
        {**one, "query": with_other_columns(one["query"], names[one["db_id"]])} for one in plain
    ]
    as_is: dict[str, Mapping[str, str]] = {db_id: {} for db_id in used}
    for variant, asked, changes in zip(
        VARIANTS, (plain, spoken, renamed), (as_is, as_is, names), strict=True
    ):
        _write(folder / variant, folder / DATA, asked, kept, changes)


def in_other_words(question: str, words: Mapping[str, str]) -> str:
    """Put each of these nouns, singular or plural, in its other word."""
    both = {**words, **{plural(noun): plural(other) for noun, other in words.items()}}
    if not both:
        return question
    known = "|".join(sorted(map(re.escape, both), key=len, reverse=True))
    return re.sub(rf"\b(?:{known})\b", lambda match: both[match[0]], question)


def with_other_columns(sql: str, names: Mapping[str, str]) -> str:
    """Rename the columns of a query."""
    tree = sqlglot.parse_one(sql, dialect="sqlite")
    for column in tree.find_all(exp.Column):
        column.set("this", exp.to_identifier(names.get(column.name, column.name)))
    return tree.sql(dialect="sqlite")


def _other_words(schema: Record) -> dict[str, str]:
    tables = {name: _TABLES[name] for name in schema["table_names_original"] if name in _TABLES}
    swaps = _other_columns(schema) | tables
    spoken = {name.replace("_", " "): other.replace("_", " ") for name, other in swaps.items()}
    return {name: other for name, other in spoken.items() if not {name, other} & _VERBS}


def _other_columns(schema: Record) -> dict[str, str]:
    """Map each column to its synonym, but where the database uses that for something else."""
    names = {name for _, name in schema["column_names_original"]}
    taken = names | set(schema["table_names_original"])
    swaps = {name: _COLUMNS[name] for name in sorted(names & _COLUMNS.keys())}
    return {name: other for name, other in swaps.items() if other not in taken}


def _write(
    folder: Path,
    source: Path,
    records: list[Record],
    schemas: list[Record],
    changes: Mapping[str, Mapping[str, str]],
) -> None:
    questions = folder / f"{folder.name}.json"
    if questions.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    renamed = []
    for schema in schemas:
        db_id, names = schema["db_id"], changes[schema["db_id"]]
        path = Path("database", db_id, f"{db_id}.sqlite")
        (folder / path).parent.mkdir(parents=True)
        shutil.copy(source / path, folder / path)
        _rename(folder / path, names)
        columns = [
            [table, names.get(name, name)] for table, name in schema["column_names_original"]
        ]
        spoken = [[table, name.replace("_", " ")] for table, name in columns]
        renamed.append({**schema, "column_names_original": columns, "column_names": spoken})
    (folder / "tables.json").write_text(json.dumps(renamed, indent=1) + "\n")
    # Written last: its presence marks a complete folder.
    questions.write_text(json.dumps(records, indent=1) + "\n")


def _rename(path: Path, names: Mapping[str, str]) -> None:
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema")]
        for table in tables:
            columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
            for column in columns:
                if column in names:
                    connection.execute(
                        f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{names[column]}"'
                    )
