"""What `launch.prepare` finds out of a database and of a question, in each process of its pool."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import apsw

from launch.data.contamination import shape_of
from launch.data.gold_checks import check_golds, open_both
from launch.data.prompts import Prompts
from launch.data.request import PrepareRequest
from minirl.run.files import naming
from sqlenv.config import ExecutorConfig
from sqlenv.data.issues import Checked
from sqlenv.data.prepared import DatabaseEntry, StoredSchema, read_stored_schema, write_schema
from sqlenv.errors import UserError
from sqlenv.executor.database import check_contents, fingerprint
from sqlenv.schema.reading import Descriptions, read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.schema.values import ValueIndex, build_index, with_matches
from sqlenv.types import Example

_KEPT = 64  # value indexes that a process keeps open, and schemas that it keeps


@dataclass(frozen=True, slots=True)
class DatabaseJob:
    """A database to read, and what its data set says of its columns."""

    db_id: str
    database: Path
    descriptions: Descriptions


@contextmanager
def open_inspector(
    request: PrepareRequest, config: ExecutorConfig
) -> Generator[Callable[[DatabaseJob | Sequence[Example]], Any]]:
    """Make what reads a database, and what checks the gold queries of some questions and finds
    their values and lengths.

    Of a database that cannot be read the error is returned, so that others are read too.
    """
    count = _counter(request)

    @lru_cache(maxsize=_KEPT)
    def index_of(database: Path) -> ValueIndex:
        return ValueIndex(request.files_of(database)[1])

    def describe(checked: Checked) -> Checked:
        example = checked.example
        if request.value_matches:
            example = replace(example, value_matches=index_of(example.database).matches(example))
        return replace(checked, example=example, prompt_tokens=count(example))

    with open_both(config) as both:

        def inspect(
            job: DatabaseJob | Sequence[Example],
        ) -> DatabaseEntry | UserError | list[Checked]:
            if isinstance(job, DatabaseJob):
                try:
                    return _read(request, job)
                except UserError as error:
                    return error
            return [describe(one) for one in check_golds(job, *both, slow_s=request.slow_s)]

        yield inspect


def _read(request: PrepareRequest, job: DatabaseJob) -> DatabaseEntry:
    database, prompt = job.database, request.job.prompt
    check_contents(database)
    schema_file, index = request.files_of(database)
    examples, profile = prompt.example_values, prompt.schema_style == "profile"
    schema = read_schema(
        database, examples=examples, profile=profile, descriptions=job.descriptions
    )
    text = render_schema(schema, style=prompt.schema_style)
    with naming(schema_file):
        write_schema(schema_file, StoredSchema(schema, examples, profile, text))
    if request.value_matches and not index.exists():
        try:
            build_index(database, schema, index)
        except apsw.Error as error:
            raise UserError(f"{database}: is not a readable SQLite database ({error})") from None
    return DatabaseEntry(
        db_id=job.db_id,
        database=str(database),
        bytes=database.stat().st_size,
        fingerprint=fingerprint(database),
        shape=shape_of(schema),
        schema_file=str(schema_file.relative_to(request.folder)),
    )


def _counter(request: PrepareRequest) -> Callable[[Example], int | None]:
    if request.tokenizer is None:
        return lambda _example: None
    # Of the learner's extra, and seconds to import.
    from minirl.model.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(request.tokenizer)
    prompts = Prompts(request.job.prompt, request.job.env)

    @lru_cache(maxsize=_KEPT)
    def schema_of(database: Path) -> StoredSchema:
        return read_stored_schema(request.files_of(database)[0])

    def count(example: Example) -> int:
        stored, matches = schema_of(example.database), example.value_matches
        text = prompts.render(with_matches(stored.schema, matches)) if matches else stored.text
        return len(tokenizer.encode_chat(prompts.training(example, text)))

    return count
