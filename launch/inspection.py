"""What `launch.prepare` finds out of a database and of a question, in each process of the crew."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import apsw

from launch.config import JobConfig
from launch.leaks import shape_of
from launch.lint import Flaw, Look, look, open_both
from launch.prompts import Prompts
from sqlenv.config import ExecutorConfig
from sqlenv.data.issues import (
    BLANK_GOLD,
    EMPTY_GOLD,
    FAILING_GOLD,
    SLOW_GOLD,
    UNSTABLE_GOLD,
    Checked,
)
from sqlenv.data.prepared import (
    SCHEMAS,
    DatabaseEntry,
    StoredSchema,
    read_stored_schema,
    write_schema,
)
from sqlenv.data.sources import gold
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents, fingerprint, identify
from sqlenv.executor.gold import TRANSIENT
from sqlenv.schema.reading import Descriptions, read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.schema.values import ValueIndex, build_index
from sqlenv.types import Example, Table

VALUES = "values"
"""Folder of the value indexes."""
_OPEN_INDEXES = 64
"""Value indexes that a process keeps open."""
_WORTH_KEEPING_S = 0.1
"""Gold results of a lot that took less are as quickly computed as read from their files."""
_FLAWS: dict[Flaw, str] = {
    "fails": FAILING_GOLD,
    "empty": EMPTY_GOLD,
    "slow": SLOW_GOLD,
    "varies": UNSTABLE_GOLD,
    "row_order": UNSTABLE_GOLD,
    "ties": UNSTABLE_GOLD,
}


@dataclass(frozen=True, slots=True)
class DatabaseJob:
    """A database to look at, and what its data set says of its columns."""

    db_id: str
    database: Path
    descriptions: Descriptions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is made of databases and questions.

    Attributes:
        folder: Where it is kept.
        job: Gives wording, form of the schema and limits of queries.
        hints: Whether values that questions name are looked up.
        slow_s: A gold query that takes longer is slow.
        tokenizer: Folder of the tokenizer that prompts are counted with.
    """

    folder: Path
    job: JobConfig
    hints: bool
    slow_s: float
    tokenizer: Path | None = None

    def names(self, database: Path) -> tuple[Path, Path]:
        """Name the files of a database's schema and value index; another version has others."""
        prompt = self.job.prompt
        return _names(self.folder, database, f"{prompt.example_values} {prompt.schema_style}")


@lru_cache(maxsize=4_096)
def _names(folder: Path, database: Path, settings: str) -> tuple[Path, Path]:
    told = json.dumps([*identify(database), settings])
    name = f"{database.stem}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    return folder / SCHEMAS / f"{name}.json", folder / VALUES / f"{name}.sqlite"


@dataclass(frozen=True, slots=True)
class DatabaseReader:
    """Makes what reads a database, in each process of the crew."""

    preparation: Preparation

    @contextmanager
    def __call__(
        self, _config: ExecutorConfig
    ) -> Generator[Callable[[DatabaseJob], DatabaseEntry | UserError]]:
        """Answer an error instead of raising it, so that others are read too."""

        def read(job: DatabaseJob) -> DatabaseEntry | UserError:
            try:
                return _read(self.preparation, job)
            except UserError as error:
                return error

        yield read


def _read(preparation: Preparation, job: DatabaseJob) -> DatabaseEntry:
    """Read schema, profile and values of a database, where its files are not there yet."""
    database, prompt = job.database, preparation.job.prompt
    check_contents(database)
    schema_file, index = preparation.names(database)
    profile = prompt.schema_style == "profile"
    schema = read_schema(
        database, examples=prompt.example_values, profile=profile, descriptions=job.descriptions
    )
    text = render_schema(schema, style=prompt.schema_style)
    stored = StoredSchema(schema, prompt.example_values, profile, prompt.schema_style, text)
    write_schema(schema_file, stored)
    if preparation.hints and not index.exists():
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
        schema_file=str(schema_file.relative_to(preparation.folder)),
    )


@dataclass(frozen=True, slots=True)
class Inspector:
    """Makes what looks at a question, in each process of the crew."""

    preparation: Preparation

    @contextmanager
    def __call__(
        self, config: ExecutorConfig
    ) -> Generator[Callable[[Sequence[Example]], list[Checked]]]:
        """Open executors, indexes and the tokenizer."""
        with ExitStack() as stack:
            both = stack.enter_context(open_both(config))
            hints = stack.enter_context(_hints(self.preparation))
            count = _counter(self.preparation)

            def inspect(examples: Sequence[Example]) -> list[Checked]:
                found = _look(examples, *both, slow_s=self.preparation.slow_s)
                hinted = (replace(one, example=hints(one.example)) for one in found)
                return [replace(one, prompt_tokens=count(one.example)) for one in hinted]

            yield inspect


def _look(
    examples: Sequence[Example], plain: Executor, backwards: Executor, *, slow_s: float
) -> list[Checked]:
    """Run gold queries in all ways; keep results that took their time."""
    asked = [example for example in examples if example.gold_sql]
    looks = look(asked, plain, backwards, slow_s=slow_s)
    if any(one.seconds > _WORTH_KEEPING_S for one in looks):
        for example, one in zip(asked, looks, strict=True):
            plain.keep_gold(example.database, str(gold(example)), one.result)
    found = iter(looks)
    return [
        _checked(example, next(found)) if example.gold_sql else Checked(example, (BLANK_GOLD,))
        for example in examples
    ]


def _checked(example: Example, seen: Look) -> Checked:
    flaws = tuple(dict.fromkeys(_FLAWS[finding.flaw] for finding in seen.findings))
    # How long it took is of this machine, and not said of the question.
    details = (f"{one.flaw}: {one.detail}" for one in seen.findings if one.flaw in _TOLD)
    rows = len(seen.result.rows) if isinstance(seen.result, Table) else None
    is_final = seen.result not in TRANSIENT
    return Checked(example, flaws, "; ".join(details), rows=rows, is_final=is_final)


_TOLD: tuple[Flaw, ...] = ("fails", "varies", "row_order", "ties")


@contextmanager
def _hints(preparation: Preparation) -> Generator[Callable[[Example], Example]]:
    """Open what finds the values that a question names; a few indexes stay open."""
    opened: dict[Path, ValueIndex] = {}

    def find(example: Example) -> Example:
        index = preparation.names(example.database)[1]
        if index not in opened:
            if len(opened) >= _OPEN_INDEXES:
                opened.pop(next(iter(opened))).close()
            opened[index] = ValueIndex(index)
        else:
            opened[index] = opened.pop(index)  # used last
        return replace(example, value_matches=opened[index].matches(example))

    try:
        yield find if preparation.hints else lambda example: example
    finally:
        for index in opened.values():
            index.close()


def _counter(preparation: Preparation) -> Callable[[Example], int | None]:
    """Make what counts the tokens of a question's prompt."""
    if preparation.tokenizer is None:
        return lambda _example: None
    # Of the learner's extra, and seconds to import.
    from minirl.model.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(preparation.tokenizer)
    prompts = Prompts(preparation.job.prompt, preparation.job.env)

    @lru_cache(maxsize=_OPEN_INDEXES)
    def schema_of(database: Path) -> StoredSchema:
        return read_stored_schema(preparation.names(database)[0])

    def count(example: Example) -> int:
        text = prompts.with_values(schema_of(example.database), example)
        return len(tokenizer.encode_chat(prompts.training(example, text)))

    return count
