"""Settings of databases, data, prompts and environments. Defaults are the papers' values."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AwareDatetime, Field

from exchange import Settings
from sqlenv.types import Dialect, ExecutionMatch, MatchMode, Numbers, Wrapping

Layout = Literal[
    "bird", "spider", "spider-syn", "spider-dk", "spider-realistic", "synsql", "spider2"
]
Split = Literal["train", "dev", "test"]
GoldIssue = Literal["blank", "failing", "empty", "varying", "tied", "scalar", "duplicate"]
"""What may be wrong with a question: `sqlenv.data.issues` explains them."""


class SourceConfig(Settings):
    """One data set on disk."""

    layout: Layout
    """How the data set is laid out; this project's demo data has Spider's layout."""

    path: Path = Path()
    """Folder that the data set is searched in: its own, OmniSQL's `data/`, or one with downloads at
    most two levels below it."""

    split: Split = "train"
    """Which of the layout's question files to read."""

    file: str = ""
    """Question file to read instead (.json or .jsonl): a name in the folders that are searched, or
    an absolute path."""

    corrections: str = ""
    """File of corrected gold queries, questions and evidence by question id, laid over the data
    set: FILE, or FILE@SHA256 with the first digits of its hash."""

    comments: Literal["names", "full"] = "names"
    """Column comments: the natural names of tables.json (as OmniSQL), or BIRD's whole
    descriptions where there are any (as PaVeRL)."""

    dialect: Dialect = "sqlite"
    """What the gold queries are written in, unless a record says it (`dialect`). Those of MySQL and
    PostgreSQL are transpiled for SQLite; questions for which that could change the meaning are
    left out and counted."""

    weight: float = Field(default=1.0, gt=0)
    """Share of `DataConfig.total`, relative to the other sources' weights."""

    limit: int | None = Field(default=None, ge=1)
    """Most questions to take of this source, sampled by seed; None for all."""

    levels: tuple[str, ...] = ()
    """Only questions of these levels of difficulty (SynSQL: Simple, Moderate, Complex, Highly
    Complex); none for all."""

    exclude_styles: tuple[str, ...] = ()
    """Styles of SynSQL's questions to leave out, such as Multi-turn Dialogue."""


class DataConfig(Settings):
    """The questions of a run: one source or a mixture of several."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Where the questions come from."""

    total: int | None = Field(default=None, ge=1)
    """Questions to sample from all sources together, by their weights; None for all."""

    seed: int = 0
    """Seed of the sample, and of the databases that are held out of it."""

    exclude: tuple[GoldIssue, ...] = ("blank", "failing", "empty")
    """Questions to leave out by what is wrong with them, as `launch.prepare` counts it: the gold
    query is `blank`, `failing`, or `empty` (no rows: a match proves little); its result is
    `varying`, `tied` (left open by ties under its ORDER BY), or `scalar` (a single value, which
    many wrong queries give too); the question is a `duplicate`."""

    exclude_databases: tuple[str, ...] = ()
    """Names of databases whose questions are left out, such as those of a test set."""

    drop_missing_database: bool = False
    """Leave out questions whose database is not there, instead of refusing to start."""


class DemoConfig(Settings):
    """How much demo data to make, and from which seed."""

    seed: int = 0
    """Source of every choice; the same seed gives the same bytes."""

    train_databases: int = Field(default=120, ge=1)
    """Databases of the training split."""

    validation_databases: int = Field(default=15, ge=1)
    """Databases of the validation split."""

    test_databases: int = Field(default=30, ge=1)
    """Databases of the test split."""

    questions_per_database: int = Field(default=40, ge=1, le=200)
    """Questions for each database; the smallest databases afford a few hundred."""


STILL = datetime(2031, 5, 17, 9, 26, 53, tzinfo=UTC)
"""What a clock shows that stands still."""


class ExecutorConfig(Settings):
    """How queries run, and what one of them may use up."""

    isolation: Literal["thread", "process"] = "thread"
    """`thread`: inside this process, on as many threads as ask. `process`: in worker processes, for
    files of unknown origin, since a crash of SQLite ends a worker alone; and where comparing many
    large results takes all cores."""

    workers: int = Field(default_factory=lambda: min(os.cpu_count() or 1, 16), ge=1)
    """Queries that run at a time; with `process` the number of workers. Default: one a CPU core, at
    most 16. Of two or more, single queries leave one to those that end quickly."""

    timeout_s: float = Field(default=30.0, gt=0, le=1_000_000)
    """Wall time of one query, in seconds, from when it starts. The papers use 30. A worker process
    that is silent for twice this ends."""

    max_steps: int = Field(default=1_000_000_000, gt=0, le=10**18)
    """Steps of SQLite's virtual machine: stops a query at the same place on every machine. A core
    makes some 100 to 250 million a second. SQLite counts up to 2,147 million at once: from there on
    the place is the next multiple."""

    max_rows: int = Field(default=1_000_000, gt=0)
    """Rows of one result."""

    max_bytes: int = Field(default=64_000_000, gt=0, le=10**12)
    """Memory that the rows of one result take, in bytes: some 60 a row, 40 a cell, and the text. A
    sixth of it, divided by the columns, also bounds each value where that is less than
    `max_value_bytes`."""

    max_value_bytes: int = Field(default=400_000, ge=1000, le=10**9)
    """Length of one string or blob. The time of one call that nothing can interrupt grows with its
    square. Raise it to 1.25 times the largest cell if a database holds larger ones."""

    max_sql_chars: int = Field(default=100_000, gt=0, le=1_000_000)
    """Length of the query text."""

    heap_bytes: int = Field(default=96_000_000, ge=8_000_000, le=10**12)
    """SQLite's memory in one process; the rows (`max_bytes`) come on top. Of several executors in a
    process the largest limit holds."""

    reverse_unordered: bool = False
    """Read tables from their ends, which no query may rely on: one without ORDER BY gives its rows
    in another order. Golds whose answer depends on that are found with it."""

    now: AwareDatetime | None = STILL
    """What every query is told the time is, whenever it runs, so that one that asks for it has the
    same result each time. The default is a day that no data set knows and nobody guesses: who
    writes today's date out is wrong. None is the time itself; such results are then marked."""


OFFICIAL = ExecutorConfig(
    isolation="process",
    now=None,
    timeout_s=60,
    max_steps=10**15,
    max_bytes=500_000_000,
    max_value_bytes=10_000_000,
    heap_bytes=1_000_000_000,
)
"""For verdicts that are to be those of official programs, which know time alone: 60 s are what
Spider's says, and the lower limits of BIRD's and OmniSQL's are their comparators' own. Of steps
there are as many as time allows, of size what no gold query comes near, and the time is what it
is."""


class AnswerConfig(Settings):
    """How the query of an answer is found and judged."""

    match: ExecutionMatch = "set"
    """The comparator that says which query is right (`sqlenv.evaluators.comparators`)."""

    numbers: Numbers = "close"
    """When two numbers are the same, for `match` and all rewards: `close` ignores last bits, so
    that `avg(x)*100` is `100.0*sum(x)/count(*)` (relative 1e-12); or `exact`. Where `match` names
    an official program, numbers are as exact as there."""

    witnesses: int = Field(default=0, ge=0, le=16)
    """Small databases of each question on which a right query has to give the gold's result too:
    queries near the gold that mean something else do not (`sqlenv.witness`)."""

    wrapping: Wrapping = "sql_tag"
    """Where the SQL of an answer is: in the last `<sql>…</sql>`; in the last `fence` marked `sql`
    (or as a dialect, or unmarked); or `any`: the tag, else the fence, else a reply that is one
    query."""

    @property
    def compared(self) -> Numbers:
        """Return how numbers are compared: exactly where `match` is an official program."""
        return self.numbers if self.match in get_args(MatchMode) else "exact"


class SingleTurnConfig(AnswerConfig):
    """One question, one reply."""

    kind: Literal["single_turn"] = "single_turn"
    """Tag of the union."""


class DiagnosedConfig(AnswerConfig):
    """Progress-SQL: several attempts, with a diagnosis between them."""

    kind: Literal["diagnosed"] = "diagnosed"
    """Tag of the union."""

    turns: int = Field(default=4, ge=1)
    """Most attempts (T)."""

    feedback_exec_error: bool = False
    """Whether the model is told the database's error message; the paper's template has no place
    for it."""


class AgenticConfig(AnswerConfig):
    """SQL-ASTRA: the model runs queries with a tool, looks at their results, then answers."""

    kind: Literal["agentic"] = "agentic"
    """Tag of the union."""

    wrapping: Wrapping = "fence"
    """Where the SQL of the final message is."""

    calls: int = Field(default=3, ge=1)
    """Most calls of the tool; one more reply holds the answer."""

    tool: str = Field(default="run_sql_remote", min_length=1)
    """Name of the tool that runs its argument `query`; appendix A of the paper has execute_sql."""

    finish_tool: str | None = None
    """Name of a tool whose argument `answer` is the final query (appendix A: finish). None: the
    final query stands in a message without a call."""

    response_rows: int = Field(default=30, ge=1)
    """Rows of a result that the model is shown, the first ones."""

    response_chars: int = Field(default=2000, ge=20)
    """Length of what it is shown of a result or of an error message."""


EnvConfig = Annotated[
    SingleTurnConfig | DiagnosedConfig | AgenticConfig, Field(discriminator="kind")
]
