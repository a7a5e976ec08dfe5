"""What `launch.prepare` is asked for, and which questions go into which set."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from launch.config import JobConfig
from launch.data.samples import SAMPLES
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.held_out import hold_out, validation_of
from sqlenv.data.issues import Checked
from sqlenv.data.layouts import locate
from sqlenv.data.loading import choose
from sqlenv.data.prepared import SCHEMAS
from sqlenv.data.sources import Accept, Check, Pool
from sqlenv.errors import UserError
from sqlenv.executor.database import identify
from sqlenv.types import Example

BATCH = 2_048
"""Questions that are checked together: what memory holds of a set that is not sampled."""
VALIDATION = "validation"
"""The set of questions that are held out."""
VALUES = "values"
"""Folder of the value indexes."""

Survey = Counter[tuple[str, Path]]
"""Questions of each database, by `db_id` and file."""
Part = tuple[list[Pool], Iterable[Checked]]
"""The pools of a set, and its questions as they come."""


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """What is to be prepared: data sets by name, for a job with its wording, schemas and limits.

    The sample is one of `SAMPLES`, or empty to prepare whole sets; `validation` is the number of
    questions to set aside, with their databases, from those to learn from.
    """

    sources: Mapping[str, SourceConfig]
    folder: Path
    job: JobConfig
    value_matches: bool
    slow_s: float
    tokenizer: Path | None
    sample: str
    validation: int
    seed: int
    drop_missing: bool

    @property
    def learned(self) -> list[str]:
        """Name the data sets to learn from."""
        if self.sample:
            return list(dict.fromkeys(part.name for part in SAMPLES[self.sample].parts))
        return [name for name, source in self.sources.items() if source.split == "train"]

    @property
    def learned_sets(self) -> list[str]:
        """Name the sets to learn from that are written."""
        return ["train"] if self.sample else self.learned

    @property
    def measured(self) -> list[str]:
        """Name the data sets to measure by."""
        return [name for name, source in self.sources.items() if source.split != "train"]

    def files_of(self, database: Path) -> tuple[Path, Path]:
        """Name the files of a database's schema and value index; another version has others."""
        prompt = self.job.prompt
        return _files_of(self.folder, database, f"{prompt.example_values} {prompt.schema_style}")


@lru_cache(maxsize=4_096)
def _files_of(folder: Path, database: Path, settings: str) -> tuple[Path, Path]:
    key = json.dumps([*identify(database), settings])
    name = f"{database.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return folder / SCHEMAS / f"{name}.json", folder / VALUES / f"{name}.sqlite"


def plan_sets(
    request: PrepareRequest, held_out: frozenset[str], check: Check, broken: Mapping[Path, str]
) -> dict[str, Part]:
    """Say what goes into each set, those to measure by first."""

    def usable(example: Example) -> bool:
        return example.database not in broken

    def to_learn(example: Example) -> bool:
        return usable(example) and example.db_id not in held_out

    def to_validate(example: Example) -> bool:
        return usable(example) and example.db_id in held_out

    def whole(name: str, accept: Accept) -> Part:
        pool = make_pool(request.sources[name], request, check, accept=accept)
        return [pool], pool.stream()

    def sampled(config: DataConfig, accept: Accept) -> Part:
        pools = _pools(config, request, check, accept)

        def drawn() -> Iterator[Checked]:
            yield from choose(pools, config)

        return pools, drawn()

    plan = {name: whole(name, usable) for name in request.measured}
    learned = _learned_config(request)
    if held_out and learned is not None:
        plan[VALIDATION] = sampled(validation_of(learned, request.validation), to_validate)
    if request.sample and learned is not None:
        plan["train"] = sampled(learned, to_learn)
    else:
        plan |= {name: whole(name, to_learn) for name in request.learned}
    return plan


def held_out_databases(
    request: PrepareRequest, check: Check, broken: Mapping[Path, str]
) -> frozenset[str]:
    """Choose the databases whose questions validate, and are not learned from."""
    learned = _learned_config(request)
    if not request.validation or learned is None:
        return frozenset()

    def make_pools(config: DataConfig, accept: Accept) -> list[Pool]:
        def usable(example: Example) -> bool:
            return example.database not in broken and accept(example)

        return _pools(config, request, check, usable)

    try:
        return hold_out(learned, request.validation, make_pools)
    except UserError as error:
        raise UserError(f"--validation {error}") from None


def _learned_config(request: PrepareRequest) -> DataConfig | None:
    more = {
        "seed": request.seed,
        "drop_missing_database": request.drop_missing,
        "exclude_databases": request.job.data.train.exclude_databases,
    }
    if request.sample:
        return SAMPLES[request.sample].data(request.sources, **more)
    sources = tuple(request.sources[name] for name in request.learned)
    return DataConfig.model_validate({"sources": sources, **more}) if sources else None


def _pools(config: DataConfig, request: PrepareRequest, check: Check, accept: Accept) -> list[Pool]:
    return [
        make_pool(source, request, check, config=config, accept=accept) for source in config.sources
    ]


def make_pool(
    source: SourceConfig,
    request: PrepareRequest,
    check: Check | None,
    *,
    config: DataConfig | None = None,
    accept: Accept = lambda _example: True,
) -> Pool:
    """Make the pool of a source; without a config every question with a database stays, but those
    to learn from whose databases the job leaves out.
    """
    is_learned = source.split == "train"
    everything = DataConfig(
        sources=(source,),
        drop_failing_gold=False,
        drop_empty_gold=False,
        drop_missing_database=request.drop_missing,
        exclude_databases=request.job.data.train.exclude_databases if is_learned else (),
    )
    advice = "add --drop-missing to leave such questions out"
    return Pool(source, locate(source), config or everything, check, advice, accept, BATCH)
