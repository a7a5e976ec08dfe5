"""Settings of databases, data, prompts and environments. Defaults are the papers' values."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of all settings here: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Layout = Literal[
    "spider", "spider_syn", "spider_dk", "spider_realistic", "spider2", "bird", "synsql"
]


class SourceConfig(Settings):
    """One data set on disk."""

    layout: Layout
    """How the folder is laid out; this project's demo data has Spider's layout."""

    path: Path
    """The data set's own folder, or OmniSQL's `data/` folder, which holds all of them."""

    split: Literal["train", "dev", "test"] = "train"
    """Which of the layout's question files to read."""

    file: str = ""
    """Question file to read instead (.json or .jsonl), relative to `path`."""

    comments: Literal["names", "full"] = "names"
    """Column comments: the natural names of tables.json (as OmniSQL), or BIRD's whole
    descriptions where there are any (as PaVeRL)."""

    weight: float = Field(default=1.0, gt=0)
    """Share of `DataConfig.total`, relative to the other sources' weights."""

    limit: int | None = Field(default=None, ge=1)
    """Most questions to take of this source, sampled by seed; None for all."""


class DataConfig(Settings):
    """The questions of a run: one source or a mixture of several."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Where the questions come from."""

    total: int | None = Field(default=None, ge=1)
    """Questions to sample from all sources together, by their weights; None for all."""

    seed: int = 0
    """Seed of the sample."""

    drop_missing_database: bool = False
    """Leave out questions whose database is not there, instead of refusing to start."""

    drop_failing_gold: bool = True
    """Leave out questions whose gold query is blank or does not run."""

    drop_empty_gold: bool = True
    """Leave out questions whose gold query returns no rows: a match there proves little."""
