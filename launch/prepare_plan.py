"""Which questions go into which set: whole data sets, samples, and databases held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.config import JobConfig
from launch.inspection import Preparation
from launch.samples import SAMPLES
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.held_out import hold_out, validation_of
from sqlenv.data.issues import Checked
from sqlenv.data.layouts import SETS, locate
from sqlenv.data.loading import choose
from sqlenv.data.sources import Accept, Check, Pool
from sqlenv.errors import UserError
from sqlenv.types import Example

BATCH = 2_048
"""Questions that are looked at together: what memory holds of a set that is not sampled."""

VALIDATION = "validation"
"""The set of questions that are held out."""

Survey = Counter[tuple[str, Path]]
"""Questions of each database, by `db_id` and file."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be prepared.

    Attributes:
        sources: Data sets by name.
        sample: Of `SAMPLES`; empty to prepare whole sets.
        validation: Questions to set aside, with their databases, from those to learn from.
        drop_missing: Leave out questions whose database is not there or cannot be read.
    """

    sources: Mapping[str, SourceConfig]
    preparation: Preparation
    sample: str
    validation: int
    seed: int
    drop_missing: bool

    @property
    def job(self) -> JobConfig:
        """Return the settings of the job that the data is for."""
        return self.preparation.job

    @property
    def folder(self) -> Path:
        """Return where all is written."""
        return self.preparation.folder

    @property
    def learned(self) -> list[str]:
        """Name the data sets to learn from."""
        if self.sample:
            return list(dict.fromkeys(part.name for part in SAMPLES[self.sample].parts))
        return [name for name in self.sources if SETS[name].split == "train"]

    @property
    def learned_sets(self) -> list[str]:
        """Name the sets to learn from that are written."""
        return ["train"] if self.sample else self.learned

    @property
    def measured(self) -> list[str]:
        """Name the data sets to measure by."""
        return [name for name in self.sources if SETS[name].split != "train"]


Part = tuple[list[Pool], Iterable[Checked]]
"""The pools of a set, and its questions as they come."""


def plan_sets(
    request: Request,
    held_out: frozenset[str],
    check: Check,
    broken: Mapping[Path, str],
) -> dict[str, Part]:
    """Say what goes into each set, those to measure by first."""

    def usable(example: Example) -> bool:
        return example.database not in broken

    def to_learn(example: Example) -> bool:
        return usable(example) and example.db_id not in held_out

    def to_validate(example: Example) -> bool:
        return usable(example) and example.db_id in held_out

    sources = request.sources
    plan = {
        name: _whole(make_pool(sources[name], request, check, accept=usable))
        for name in request.measured
    }
    if held_out:
        config = validation_of(_learned_config(request), request.validation)
        plan[VALIDATION] = _sampled(config, request, check, to_validate)
    if request.sample:
        plan["train"] = _sampled(_learned_config(request), request, check, to_learn)
    else:
        for name in request.learned:
            plan[name] = _whole(make_pool(sources[name], request, check, accept=to_learn))
    return plan


def check_validation(request: Request, surveys: Mapping[str, Survey]) -> None:
    """Refuse to set aside all that there is, before anything is run.

    Raises:
        UserError: Nothing would be left to learn from.
    """
    everything = sum(surveys[name].total() for name in request.learned)
    if request.validation and request.validation >= everything:
        raise UserError(
            f"--validation {request.validation}: there are {everything:,} questions to learn from; "
            "set fewer aside"
        )


def held_out_databases(
    request: Request, check: Check, broken: Mapping[Path, str]
) -> frozenset[str]:
    """Choose the databases whose questions validate, and are not learned from.

    Raises:
        UserError: So many questions leave nothing to learn from.
    """
    if not request.validation:
        return frozenset()

    def make_pools(config: DataConfig, accept: Accept) -> list[Pool]:
        def usable(example: Example) -> bool:
            return example.database not in broken and accept(example)

        return _pools(config, request, check, usable)

    try:
        return hold_out(_learned_config(request), request.validation, make_pools)
    except UserError as error:
        raise UserError(f"--validation {error}") from None


def _learned_config(request: Request) -> DataConfig:
    more = {
        "seed": request.seed,
        "drop_missing_database": request.drop_missing,
        "exclude_databases": request.job.data.train.exclude_databases,
    }
    if request.sample:
        return SAMPLES[request.sample].data(request.sources, **more)
    sources = tuple(request.sources[name] for name in request.learned)
    return DataConfig.model_validate({"sources": sources, **more})


def _whole(pool: Pool) -> Part:
    return [pool], pool.stream()


def _sampled(config: DataConfig, request: Request, check: Check, accept: Accept) -> Part:
    pools = _pools(config, request, check, accept)

    def drawn() -> Iterator[Checked]:
        yield from choose(pools, config)

    return pools, drawn()


def _pools(config: DataConfig, request: Request, check: Check, accept: Accept) -> list[Pool]:
    return [
        make_pool(source, request, check, config=config, accept=accept) for source in config.sources
    ]


def make_pool(
    source: SourceConfig,
    request: Request,
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
