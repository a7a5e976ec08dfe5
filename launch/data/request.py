"""What `launch.prepare` is asked for, and which questions go into which set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from launch.config import JobConfig
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.held_out import validation_of
from sqlenv.data.prepared import SCHEMAS
from sqlenv.executor.database import identify

TRAIN, VALIDATION = "train", "validation"
"""The sets of a sample, and of questions that are held out."""
VALUES = "values"
"""Folder of the value indexes."""


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """What is to be prepared: data sets by name, for a job with its wording, schemas and limits.

    Attributes:
        learned: Names of the data sets to learn from.
        mixture: How they are learned from; None where there are none.
        sample: One of `SAMPLES`, whose mixture is drawn; empty to prepare whole sets.
        validation: Questions to set aside, with their databases, from those to learn from.
    """

    sources: Mapping[str, SourceConfig]
    folder: Path
    job: JobConfig
    learned: tuple[str, ...]
    mixture: DataConfig | None
    value_matches: bool
    slow_s: float
    tokenizer: Path | None
    sample: str
    validation: int
    seed: int
    drop_missing: bool

    @property
    def learned_sets(self) -> tuple[str, ...]:
        """Name the sets to learn from that are written."""
        return (TRAIN,) if self.sample else self.learned

    @property
    def measured(self) -> list[str]:
        """Name the data sets to measure by."""
        return [name for name, source in self.sources.items() if source.split != "train"]

    def whole(self, name: str) -> DataConfig:
        """Ask for every question of a data set that has a database; of one to learn from, but those
        whose databases the job leaves out.
        """
        source = self.sources[name]
        excluded = self.job.data.train.exclude_databases if source.split == "train" else ()
        return DataConfig(
            sources=(source,),
            drop_failing_gold=False,
            drop_empty_gold=False,
            drop_missing_database=self.drop_missing,
            exclude_databases=excluded,
        )

    def plan(self, *, holds_out: bool) -> dict[str, DataConfig]:
        """Say what goes into each set, those to measure by first."""
        plan = {name: self.whole(name) for name in self.measured}
        if self.mixture and holds_out:
            plan[VALIDATION] = validation_of(self.mixture, self.validation)
        if self.mixture and self.sample:
            return {**plan, TRAIN: self.mixture}
        return plan | {name: self.whole(name) for name in self.learned}

    def files_of(self, database: Path) -> tuple[Path, Path]:
        """Name the files of a database's schema and value index; another version has others."""
        prompt = self.job.prompt
        return _files_of(self.folder, database, f"{prompt.example_values} {prompt.schema_style}")


@lru_cache(maxsize=4_096)
def _files_of(folder: Path, database: Path, settings: str) -> tuple[Path, Path]:
    key = json.dumps([*identify(database), settings])
    name = f"{database.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return folder / SCHEMAS / f"{name}.json", folder / VALUES / f"{name}.sqlite"
