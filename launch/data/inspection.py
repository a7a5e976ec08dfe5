"""What `launch.prepare` finds out of a database and of a question, in each process of its pool."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import apsw

from launch.data.contamination import shape_of
from launch.data.gold_checks import check_golds, open_both
from launch.data.mixtures import PrepareRequest
from launch.data.prompts import Prompts
from sqlenv.config import ExecutorConfig
from sqlenv.data.issues import BLANK_GOLD, Checked
from sqlenv.data.prepared import DatabaseEntry, StoredSchema, read_stored_schema, write_schema
from sqlenv.data.sources import gold
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents, fingerprint
from sqlenv.executor.gold import TRANSIENT
from sqlenv.schema.reading import Descriptions, read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.schema.values import ValueIndex, build_index
from sqlenv.types import Example, Table

_OPEN_INDEXES = 64  # value indexes that a process keeps open
_WORTH_KEEPING_S = 0.1
"""Gold results of a batch that took less are as quickly computed as read from their files."""


@dataclass(frozen=True, slots=True)
class DatabaseJob:
    """A database to read, and what its data set says of its columns."""

    db_id: str
    database: Path
    descriptions: Descriptions = field(default_factory=dict)


@contextmanager
def open_reader(
    request: PrepareRequest, _config: ExecutorConfig
) -> Generator[Callable[[DatabaseJob], DatabaseEntry | UserError]]:
    """Make what reads a database; it returns an error, so that others are read too."""

    def read(job: DatabaseJob) -> DatabaseEntry | UserError:
        try:
            return _read(request, job)
        except UserError as error:
            return error

    yield read


def _read(request: PrepareRequest, job: DatabaseJob) -> DatabaseEntry:
    database, prompt = job.database, request.job.prompt
    check_contents(database)
    schema_file, index = request.files_of(database)
    examples, profile = prompt.example_values, prompt.schema_style == "profile"
    schema = read_schema(
        database, examples=examples, profile=profile, descriptions=job.descriptions
    )
    text = render_schema(schema, style=prompt.schema_style)
    write_schema(schema_file, StoredSchema(schema, examples, profile, prompt.schema_style, text))
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


@contextmanager
def open_inspector(
    request: PrepareRequest, config: ExecutorConfig
) -> Generator[Callable[[Sequence[Example]], list[Checked]]]:
    """Make what checks the gold queries of some questions, and finds their values and lengths."""
    with ExitStack() as stack:
        both = stack.enter_context(open_both(config))
        match = stack.enter_context(_matcher(request))
        count = _counter(request)

        def inspect(examples: Sequence[Example]) -> list[Checked]:
            found = _check(examples, *both, slow_s=request.slow_s)
            matched = (replace(one, example=match(one.example)) for one in found)
            return [replace(one, prompt_tokens=count(one.example)) for one in matched]

        yield inspect


def _check(
    examples: Sequence[Example], plain: Executor, backwards: Executor, *, slow_s: float
) -> list[Checked]:
    """Check gold queries, and keep results that took their time."""
    asked = [example for example in examples if example.gold_sql]
    checks = check_golds(asked, plain, backwards, slow_s=slow_s)
    if any(one.seconds > _WORTH_KEEPING_S for one in checks):
        for example, one in zip(asked, checks, strict=True):
            plain.keep_gold(example.database, str(gold(example)), one.result)
    found = {id(example): Checked(example, (BLANK_GOLD,)) for example in examples}
    for example, one in zip(asked, checks, strict=True):
        rows = len(one.result.rows) if isinstance(one.result, Table) else None
        is_final = one.result not in TRANSIENT
        found[id(example)] = Checked(example, one.issues, one.note, rows=rows, is_final=is_final)
    return [found[id(example)] for example in examples]


@contextmanager
def _matcher(request: PrepareRequest) -> Generator[Callable[[Example], Example]]:
    """Make what finds the values that a question names; a few indexes stay open."""
    opened: dict[Path, ValueIndex] = {}

    def match(example: Example) -> Example:
        index = request.files_of(example.database)[1]
        if index not in opened and len(opened) >= _OPEN_INDEXES:
            opened.pop(next(iter(opened))).close()
        opened[index] = opened.pop(index, None) or ValueIndex(index)  # used last
        return replace(example, value_matches=opened[index].matches(example))

    try:
        yield match if request.value_matches else lambda example: example
    finally:
        for index in opened.values():
            index.close()


def _counter(request: PrepareRequest) -> Callable[[Example], int | None]:
    if request.tokenizer is None:
        return lambda _example: None
    # Of the learner's extra, and seconds to import.
    from minirl.model.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(request.tokenizer)
    prompts = Prompts(request.job.prompt, request.job.env)

    @lru_cache(maxsize=_OPEN_INDEXES)
    def schema_of(database: Path) -> StoredSchema:
        return read_stored_schema(request.files_of(database)[0])

    def count(example: Example) -> int:
        text = prompts.schema_text(example, schema_of(example.database))
        return len(tokenizer.encode_chat(prompts.training(example, text)))

    return count
