"""The questions of a run: read, checked, and sampled by seed from one data set or several."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from random import Random

from exchange import UserError
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.descriptions import read_descriptions
from sqlenv.data.sources import (
    OTHER_ENGINE,
    OTHER_KIND,
    Accept,
    Check,
    Checked,
    Pool,
    SourceReport,
)
from sqlenv.schema.reading import Descriptions
from sqlenv.types import Example

_SPARE_SHARE = 1.0  # candidates of a sampled source beyond the wanted number, since golds may fail
_SPARE_LEAST = 64


@dataclass(frozen=True, slots=True)
class LoadedData:
    """The questions of a run, in the order of the sources and of their files.

    `descriptions` is what is said of columns, by database, as `read_schema` takes it.
    """

    examples: tuple[Example, ...]
    reports: tuple[SourceReport, ...]
    wanted: int | None
    descriptions: Mapping[Path, Descriptions]

    def lines(self) -> list[str]:
        """Say what was found: a line a source, and one more when there are too few questions."""
        lines = [report.line() for report in self.reports]
        if self.wanted and len(self.examples) < self.wanted:
            many = len(self.examples)
            lines.append(f"only {many:,} of the {self.wanted:,} questions asked for")
        return lines


def load(
    config: DataConfig,
    *,
    check: Check | None = None,
    accept: Accept = lambda _db_id: True,
    advice: str = "set drop_missing_database=true to leave such questions out",
) -> LoadedData:
    """Read, check and sample the questions of a run; the same settings give the same questions.

    At most the sample is read and held in memory. With a `total`, each source gives its share by
    weight, and sources that run short are made up for by the others.

    Without a `check` of the gold queries that come into the choice, all are trusted. `advice` says
    what to do about a missing database, but unpacking it.

    Raises:
        UserError: A source is not as its layout says, or no question is left.
    """
    pools = open_pools(config, check, accept=accept, advice=advice)
    chosen: list[Example] = []
    descriptions: dict[Path, Descriptions] = {}
    for pool, part in zip(pools, choose(pools, config), strict=True):
        examples = [checked.example for checked in part]
        chosen += examples
        by_name = {example.db_id: example.database for example in examples}
        descriptions |= read_descriptions(pool.location, pool.source, by_name)
    reports = tuple(pool.report for pool in pools)
    if not chosen:
        raise UserError(f"no question is left; {'; '.join(r.line() for r in reports)}")
    names = Counter(example.id for example in chosen)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(f"the same questions come twice in sources, the first is {twice[0]}")
    return LoadedData(tuple(chosen), reports, config.total, descriptions)


def open_pools(
    config: DataConfig, check: Check | None, *, accept: Accept, advice: str
) -> list[Pool]:
    """Open the sources of a mixture."""
    seen = set[int]()
    return [Pool(source, config, check, accept, advice, seen) for source in config.sources]


def choose(pools: Sequence[Pool], config: DataConfig) -> Iterator[Iterable[Checked]]:
    """Draw a mixture; yield the questions of each source in the order of its files.

    Sources that are not sampled are streamed: what is yielded of them is read only once.
    """
    sampled = [pool for pool in pools if pool.most is not None]
    for pool in sampled:
        wanted = pool.most or 0
        spare = 0 if pool.check is None else max(_SPARE_LEAST, int(wanted * _SPARE_SHARE))
        open_sample(pool, wanted + spare)
    _fill(sampled, config.total)
    for pool in pools:
        drawn = (checked for _, checked in sorted(pool.kept, key=itemgetter(0)))
        yield pool.stream() if pool.most is None else drawn


def read_all(source: SourceConfig) -> tuple[Example, ...]:
    """Read every question of a source in the order of its files, whatever its gold query."""
    pool = Pool(source, DataConfig(sources=(source,)), advice="take such questions out of the file")
    pool.drops = {OTHER_ENGINE, OTHER_KIND}
    if examples := tuple(checked.example for checked in pool.stream()):
        return examples
    raise UserError(f"no question is left; {pool.report.line()}")


def open_sample(pool: Pool, most: int | None) -> None:
    """Put a source in the order of the draw; at most so many candidates are held, None for all."""
    # One random number a question, the smallest win: a larger sample contains a smaller one.
    rng = Random(f"{pool.config.seed} {pool.name}")
    numbered = ((rng.random(), position) for position, _ in pool.candidates())
    drawn = sorted(numbered) if most is None else heapq.nsmallest(most, numbered)
    pool.waiting.extend(position for _, position in drawn)


def _fill(pools: Sequence[Pool], total: int | None) -> None:
    if total is None:
        for pool in pools:
            pool.draw(len(pool.waiting))
        return
    while missing := total - sum(len(pool.kept) for pool in pools):
        open_ones = [pool for pool in pools if not pool.spent]
        if not open_ones:
            return
        shares = split_by_weight(missing, [pool.source.weight for pool in open_ones])
        for pool, share in zip(open_ones, shares, strict=True):
            pool.draw(share)


def split_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Split a whole number by weight, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def question_digest(examples: Iterable[Example]) -> str:
    """Hash questions and gold queries: the same on every machine, whatever the paths."""
    digest = hashlib.sha256()
    for e in examples:
        other = [e.dialect] if e.dialect != "sqlite" else []
        other += [*e.alternatives, *filter(None, [e.grading_method])]
        fields = [e.id, e.db_id, e.question, e.evidence, e.gold_sql, *other]
        digest.update(json.dumps(fields).encode())
    return digest.hexdigest()[:16]
