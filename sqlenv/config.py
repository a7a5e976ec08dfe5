"""Settings of databases, data, prompts and environments. Defaults are the papers' values."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AwareDatetime, BeforeValidator, Field

from minirl.exchange.settings import Place, Settings, at_home
from sqlenv.types import Dialect, ExecutionMatch, MatchMode, Numbers, Wrapping

Layout = Literal[
    "bird", "spider", "spider-syn", "spider-dk", "spider-realistic", "synsql", "spider2"
]
DatasetSplit = Literal["train", "dev", "test"]
GoldIssue = Literal["blank", "failing", "empty", "varying", "scalar", "duplicate"]
"""What may be wrong with a question: `DataConfig.exclude` explains them."""


class SourceConfig(Settings):
    """One data set on disk."""

    layout: Layout
    """Form of the data set (docs/data.md)."""

    path: Place = Path()
    """Folder below `data.root` (docs/data.md)."""

    split: DatasetSplit = "train"
    """Question file of the layout."""

    file: Annotated[str, BeforeValidator(at_home)] = ""
    """Another question file (.json, .jsonl): a name in the searched folders, or an absolute
    path."""

    corrections: Annotated[str, BeforeValidator(at_home)] = ""
    """Corrected gold queries: FILE or FILE@SHA256 (docs/data.md)."""

    comments: Literal["names", "full"] = "names"
    """Column comments: names (OmniSQL), or BIRD's `full` descriptions (PaVeRL)."""

    dialect: Dialect = "sqlite"
    """Dialect of the gold queries, unless a record names one (docs/data.md)."""

    weight: float = Field(default=1.0, gt=0)
    """Relative share of `total`."""

    levels: tuple[str, ...] = ()
    """SynSQL's levels to take (Simple, Moderate, Complex, Highly Complex); none for all."""

    exclude_styles: tuple[str, ...] = ()
    """SynSQL's styles to leave out, such as Multi-turn Dialogue."""


class DataConfig(Settings):
    """The questions of a run: one source or a mixture of several."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Data sets."""

    total: int | None = Field(default=None, ge=1)
    """Questions sampled from all sources by weight; None for all."""

    seed: int = 0
    """Seed of the sample and of held-out databases."""

    exclude: tuple[GoldIssue, ...] = ("blank", "failing", "empty")
    """Questions to leave out, by their gold query (docs/data.md)."""

    exclude_databases: tuple[str, ...] = ()
    """Databases to leave out, such as a test set's."""

    drop_missing_database: bool = False
    """Leave out questions without a database instead of refusing to start."""


class DemoConfig(Settings):
    """Size and seed of the generated demo data."""

    seed: int = 0
    """The same seed gives the same bytes."""

    train_databases: int = Field(default=120, ge=1)
    """Training databases."""

    validation_databases: int = Field(default=15, ge=1)
    """Validation databases."""

    test_databases: int = Field(default=30, ge=1)
    """Test databases."""

    questions_per_database: int = Field(default=40, ge=1, le=200)
    """Questions for each database."""


FROZEN_NOW = datetime(2031, 5, 17, 9, 26, 53, tzinfo=UTC)
"""What a clock shows that stands still."""


class ExecutorConfig(Settings):
    """How queries run, and their limits."""

    workers: int | None = Field(default=None, ge=1)
    """Concurrent queries, which change no result; None for one per CPU core, at most 16."""

    timeout_s: float = Field(default=30.0, gt=0, le=1_000_000)
    """Wall time of a query, in seconds."""

    max_steps: int = Field(default=1_000_000_000, gt=0, le=10**18)
    """Steps of SQLite's virtual machine (100 to 250 million a second); beyond 2,147 million rounded
    up to a multiple."""

    max_rows: int = Field(default=1_000_000, gt=0)
    """Rows of a result."""

    max_bytes: int = Field(default=64_000_000, gt=0, le=10**12)
    """Memory of a result's rows (some 60 bytes a row, 40 a cell, and the text). A sixth of it,
    divided by the columns, also bounds each value."""

    max_value_bytes: int = Field(default=400_000, ge=1000, le=10**9)
    """Length of a string or blob; 1.25 times the largest cell of a database is enough. The time of
    an uninterruptible call grows with its square."""

    heap_bytes: int = Field(default=96_000_000, ge=8_000_000, le=10**12)
    """SQLite's memory in a process, rows excluded; the largest of several executors counts."""

    now: AwareDatetime | None = FROZEN_NOW
    """The time that queries see; None for the real time (docs/executor.md)."""

    @property
    def threads(self) -> int:
        """Return how many queries run at a time on this machine."""
        return self.workers or min(os.cpu_count() or 1, 16)


OFFICIAL = ExecutorConfig(
    now=None,
    timeout_s=60,
    max_steps=10**15,
    max_bytes=500_000_000,
    max_value_bytes=10_000_000,
    heap_bytes=1_000_000_000,
)
"""Limits for official verdicts. The programs limit nothing but time: Spider's to 60 s, as it says;
BIRD's lower limit is its comparator's. So steps are unlimited, sizes far above those of any gold
query, and queries see the real time."""


class AnswerConfig(Settings):
    """How the query of an answer is found and judged."""

    match: ExecutionMatch = "set"
    """Comparator that decides whether a query is right (docs/evaluation.md)."""

    numbers: Numbers = "close"
    """`close` ignores the last bits of numbers (relative 1e-12) in `match` and in all rewards;
    official comparators stay exact."""

    witnesses: int = Field(default=0, ge=0, le=16)
    """Small databases on which an answer must also give the gold result: 8, where luck is not to be
    paid (docs/rewards.md)."""

    wrapping: Wrapping = "sql_tag"
    """Where the query of a reply is (docs/rewards.md)."""

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
    """Maximum number of attempts (T)."""


class AgenticConfig(AnswerConfig):
    """SQL-ASTRA: the model runs queries with a tool, looks at their results, then answers."""

    kind: Literal["agentic"] = "agentic"
    """Tag of the union."""

    wrapping: Wrapping = "fence"
    """Where the query of the final message is."""

    calls: int = Field(default=3, ge=1)
    """Maximum number of tool calls before the answer."""

    tool: str = Field(default="run_sql_remote", min_length=1)
    """Name of the tool; execute_sql in appendix A."""

    finish_tool: str | None = None
    """Tool whose argument `answer` is the final query (appendix A: finish); None for a final
    message without a call."""

    response_rows: int = Field(default=30, ge=1)
    """Rows of a result that are shown."""

    response_chars: int = Field(default=2000, ge=20)
    """Longest result or error message that is shown."""


EnvConfig = Annotated[
    SingleTurnConfig | DiagnosedConfig | AgenticConfig, Field(discriminator="kind")
]
