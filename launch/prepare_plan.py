"""Which questions go into which set: whole data sets, samples, and databases held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

from launch.config import JobConfig
from launch.inspection import Preparation
from launch.samples import SAMPLES
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.datasets import choose
from sqlenv.errors import UserError
from sqlenv.flaws import Checked
from sqlenv.layouts import SETS, locate
from sqlenv.sources import Check, Pool
from sqlenv.types import Example

BATCH = 2_048
"""Questions that are looked at together: what memory holds of a set that is not sampled."""

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


def hold_out(request: Request, surveys: Mapping[str, Survey]) -> frozenset[str]:
    """Choose databases by seed whose questions are not learned from.

    They are as large a share of all questions as the questions to validate by are of those that are
    wanted in all.
    """
    if not request.validation:
        return frozenset()
    counts: Counter[str] = Counter()
    for name in request.learned:
        for (db_id, _), count in surveys[name].items():
            counts[db_id] += count
    everything = sum(counts.values())
    total = SAMPLES[request.sample].total if request.sample else None
    wanted = min(total or everything, everything - request.validation)
    if wanted < 1 or len(counts) < 2:
        raise UserError(
            f"--validation {request.validation}: there are {everything:,} questions of "
            f"{len(counts)} databases to learn from; set fewer aside"
        )
    share = everything * request.validation / (request.validation + wanted)
    names = sorted(counts)
    Random(f"{request.seed} validation").shuffle(names)
    before = accumulate((counts[name] for name in names), initial=0)
    return frozenset(name for name, held in zip(names[:-1], before, strict=False) if held < share)


Part = tuple[list[Pool], Iterable[Checked]]
"""The pools of a set, and its questions as they come."""


def plan_sets(
    request: Request,
    surveys: Mapping[str, Survey],
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
    drops = {"seed": request.seed, "drop_missing_database": request.drop_missing}
    if held_out:
        config = _learned_config(request, total=request.validation, **drops)
        plan["validation"] = _sampled(config, request, check, to_validate)
    if request.sample:
        config = SAMPLES[request.sample].data(sources, **drops)
        plan["train"] = _sampled(config, request, check, to_learn)
    else:
        for name in request.learned:
            plan[name] = _whole(make_pool(sources[name], request, check, accept=to_learn))
    return plan


def _learned_config(request: Request, **more: object) -> DataConfig:
    if request.sample:
        return SAMPLES[request.sample].data(request.sources, **more)
    sources = tuple(request.sources[name] for name in request.learned)
    return DataConfig.model_validate({"sources": sources, **more})


def _whole(pool: Pool) -> Part:
    return [pool], pool.stream()


def _sampled(
    config: DataConfig, request: Request, check: Check, accept: Callable[[Example], bool]
) -> Part:
    pools = [
        make_pool(source, request, check, config=config, accept=accept) for source in config.sources
    ]

    def drawn() -> Iterator[Checked]:
        yield from choose(pools, config)

    return pools, drawn()


def make_pool(
    source: SourceConfig,
    request: Request,
    check: Check | None,
    *,
    config: DataConfig | None = None,
    accept: Callable[[Example], bool] = lambda _example: True,
) -> Pool:
    """Make the pool of a source; without a config every question with a database stays."""
    everything = DataConfig(
        sources=(source,),
        drop_failing_gold=False,
        drop_empty_gold=False,
        drop_missing_database=request.drop_missing,
    )
    advice = "add --drop-missing to leave such questions out"
    return Pool(source, locate(source), config or everything, check, advice, accept, BATCH)
