"""The questions of a run: read, checked, and sampled by seed from one data set or several."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from random import Random

from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.descriptions import read_descriptions
from sqlenv.data.issues import OTHER_ENGINE, OTHER_KIND, Checked
from sqlenv.data.layouts import locate
from sqlenv.data.prepared import read_databases
from sqlenv.data.sources import Accept, GoldRunner, Pool, SourceReport, by_running
from sqlenv.errors import UserError
from sqlenv.schema.reading import Descriptions
from sqlenv.types import Example

_SPARE_SHARE = 1.0  # candidates of a sampled source beyond the wanted number, since golds may fail
_SPARE_LEAST = 64


@dataclass(frozen=True, slots=True)
class DataReport:
    """What was found in all sources; `fingerprint` is that of the questions that were chosen."""

    sources: tuple[SourceReport, ...]
    wanted: int | None
    fingerprint: str

    @property
    def kept(self) -> int:
        """Count the questions that the run uses."""
        return sum(source.kept for source in self.sources)

    def lines(self) -> list[str]:
        """Say it in a line a source, and one more when there are too few questions."""
        lines = [source.line() for source in self.sources]
        if self.wanted and self.kept < self.wanted:
            lines.append(f"only {self.kept:,} of the {self.wanted:,} questions asked for")
        return lines


@dataclass(frozen=True, slots=True)
class LoadedData:
    """The questions of a run, in the order of the sources and of their files.

    By database: what columns hold (for `read_schema`), and files of schemas that were read before.
    """

    examples: tuple[Example, ...]
    report: DataReport
    descriptions: Mapping[Path, Descriptions]
    schemas: Mapping[Path, Path]


def load(
    config: DataConfig,
    *,
    executor: GoldRunner | None = None,
    section: str = "",
    accept: Accept = lambda _example: True,
) -> LoadedData:
    """Read, check and sample the questions of a run; the same settings give the same questions.

    Files are streamed and at most the sample is held in memory. With a `total`, each source gives
    its share by weight, and sources that run short are made up for by the others.

    Without an `executor`, which runs the gold queries that come into the choice, all are trusted.
    `section` is what a job's config calls these settings, such as `data.train`, for messages.

    Raises:
        UserError: A source is not as its layout says, or no question is left.
    """
    pools = make_pools(config, accept, executor=executor, section=section)
    chosen = [checked.example for checked in choose(pools, config)]
    reports = tuple(pool.report for pool in pools)
    if not chosen:
        raise UserError(f"no question is left; {'; '.join(r.line() for r in reports)}")
    names = Counter(example.id for example in chosen)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(f"the same questions come twice in sources, the first is {twice[0]}")
    descriptions: dict[Path, Descriptions] = {}
    schemas: dict[Path, Path] = {}
    for pool in pools:
        kept = [checked.example for _, checked in pool.kept]
        if pool.location.layout == "prepared":
            used = {example.database: example.id for example in kept}
            schemas |= read_databases(pool.location.root, used)
        else:
            by_name = {example.db_id: example.database for example in kept}
            descriptions |= read_descriptions(pool.location, pool.source, by_name)
    report = DataReport(reports, config.total, fingerprint(chosen))
    return LoadedData(tuple(chosen), report, descriptions, schemas)


def make_pools(
    config: DataConfig,
    accept: Accept,
    *,
    executor: GoldRunner | None = None,
    section: str = "",
) -> list[Pool]:
    """Open the sources of a mixture; the arguments are those of `load`."""
    key = f"{section}.drop_missing_database".lstrip(".")
    advice = f"set {key}=true to leave such questions out"
    look = by_running(executor) if executor else None
    return [Pool(source, locate(source), config, look, advice, accept) for source in config.sources]


def choose(pools: Sequence[Pool], config: DataConfig) -> list[Checked]:
    """Draw the questions of a mixture, in the order of the sources and of their files."""
    for pool in pools:
        _open(pool)
    _fill(pools, config.total)
    return [checked for pool in pools for _, checked in sorted(pool.kept, key=itemgetter(0))]


def read_all(source: SourceConfig) -> tuple[Example, ...]:
    """Read every question of a source in the order of its files, whatever its gold query."""
    advice = "take such questions out of the file"
    pool = Pool(source, locate(source), DataConfig(sources=(source,)), None, advice)
    pool.drops = {OTHER_ENGINE, OTHER_KIND}
    if examples := tuple(checked.example for checked in pool.questions()):
        return examples
    raise UserError(f"no question is left; {pool.report.line()}")


def _open(pool: Pool) -> None:
    """Read a source: all of it in file order, or a sample in the order of the draw."""
    wanted = min(pool.source.limit or math.inf, pool.config.total or math.inf)
    if wanted == math.inf:
        pool.waiting.extend(enumerate(pool.questions()))
        return
    spare = 0 if pool.check is None else max(_SPARE_LEAST, int(wanted * _SPARE_SHARE))
    open_sample(pool, int(wanted) + spare)


def open_sample(pool: Pool, most: int | None) -> None:
    """Read a source in the order of the draw; at most so many candidates are held, None for all."""
    # One random number a question, the smallest win: one pass, and a larger sample contains a
    # smaller one.
    rng = Random(f"{pool.config.seed} {pool.name}")
    numbered = ((rng.random(), *pair) for pair in enumerate(pool.questions()))
    key = itemgetter(0, 1)
    drawn = sorted(numbered, key=key) if most is None else heapq.nsmallest(most, numbered, key=key)
    pool.waiting.extend((position, checked) for _, position, checked in drawn)


def _fill(pools: Sequence[Pool], total: int | None) -> None:
    if total is None:
        for pool in pools:
            pool.draw(len(pool.waiting))
        return
    while missing := total - sum(len(pool.kept) for pool in pools):
        open_pools = [pool for pool in pools if not pool.spent]
        if not open_pools:
            return
        shares = split_by_weight(missing, [pool.source.weight for pool in open_pools])
        for pool, share in zip(open_pools, shares, strict=True):
            pool.draw(share)


def split_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Split a whole number by weight, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def fingerprint(examples: Iterable[Example]) -> str:
    """Hash questions and gold queries: the same on every machine, whatever the paths."""
    digest = Fingerprint()
    for example in examples:
        digest.add(example)
    return digest.text


class Fingerprint:
    """A fingerprint of questions that come one by one."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, e: Example) -> None:
        """Take another question in."""
        other = [e.dialect] if e.dialect != "sqlite" else []
        fields = [e.id, e.db_id, e.question, e.evidence, e.gold_sql, *other, *e.value_matches]
        self._digest.update(json.dumps(fields).encode())

    @property
    def text(self) -> str:
        """Write it."""
        return self._digest.hexdigest()[:16]
