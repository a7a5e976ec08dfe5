"""The questions of a run: read, checked, sampled by seed from one data set or several, and held out
to choose checkpoints by.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import apsw

from minirl.exchange import UserError
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.descriptions import read_descriptions
from sqlenv.data.layouts import locate
from sqlenv.data.questions import attach
from sqlenv.data.sources import Accept, Check, Pool
from sqlenv.schema.reading import Descriptions
from sqlenv.types import Example


@dataclass(frozen=True, slots=True)
class LoadedData:
    """The questions of a run, in the order of the sources and of their files.

    `pools` count what was found in each source; `descriptions` is what is said of columns, by
    database, as `read_schema` takes it.
    """

    examples: tuple[Example, ...]
    pools: Sequence[Pool]
    wanted: int | None
    descriptions: Mapping[Path, Descriptions]

    def lines(self) -> list[str]:
        """Say what was found: a line a source, and one more when there are too few questions."""
        lines = [pool.line() for pool in self.pools]
        if self.wanted and len(self.examples) < self.wanted:
            lines.append(f"only {len(self.examples):,} of the {self.wanted:,} questions asked for")
        return lines


def load(
    config: DataConfig, *, check: Check | None = None, accept: Accept = lambda _db_id: True
) -> LoadedData:
    """Read, check and sample the questions of a run; the same settings give the same questions.

    At most the sample is read and held in memory. With a `total`, each source gives its share by
    weight, and sources that run short are made up for by the others.

    Without a `check` of the gold queries that come into the choice, all are trusted.

    Raises:
        UserError: A source is not as its layout says, or no question is left.
    """
    pools = open_pools(config, check, accept)
    chosen: list[Example] = []
    descriptions: dict[Path, Descriptions] = {}
    for pool, examples in zip(pools, _draw(pools, config.total), strict=True):
        chosen += examples
        by_name = {example.db_id: example.database for example in examples}
        descriptions |= read_descriptions(pool.location, pool.source, by_name)
    if not chosen:
        raise UserError(f"no question is left; {'; '.join(pool.line() for pool in pools)}")
    names = Counter(example.id for example in chosen)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(f"{twice[0]} comes twice: name its file once in sources, or rename a file")
    return LoadedData(tuple(chosen), pools, config.total, descriptions)


def open_pools(config: DataConfig, check: Check | None, accept: Accept) -> list[Pool]:
    """Open the sources of a mixture."""
    db = apsw.Connection("")
    return [Pool(source, config, check, accept=accept, db=db) for source in config.sources]


def _draw(pools: Sequence[Pool], total: int | None) -> list[list[Example]]:
    """Draw a mixture: the questions of each source in the order of its files."""
    drawn: list[list[tuple[int, Example]]] = [[] for _ in pools]
    most = total or sum(pool.left for pool in pools)
    while missing := most - sum(map(len, drawn)):
        rest = [place for place, pool in enumerate(pools) if pool.left]
        if not rest:
            break
        shares = split_by_weight(missing, [pools[place].source.weight for place in rest])
        for place, share in zip(rest, shares, strict=True):
            drawn[place] += pools[place].draw(share)
    return [[example for _, example in sorted(part)] for part in drawn]


def asked_in(source: SourceConfig) -> frozenset[tuple[str, int]]:
    """Return database name and `text_digest` of each question, also where databases are missing."""
    db = apsw.Connection("")
    table = attach(db, locate(source).files, source.layout)
    return frozenset(db.execute(f"SELECT db_id, text FROM {table} WHERE is_local"))


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


def hold_out(config: DataConfig, count: int, check: Check | None = None) -> frozenset[str]:
    """Choose databases to hold out, by `config.seed` and their names alone.

    Each source gives the share of its questions that `count` is of all questions wanted, and more
    if too many of their gold queries are left out. Sources are read once to count questions, and
    again until enough are held out.
    """
    own = config.model_copy(update={"total": count})
    whole = open_pools(own, None, lambda _db_id: True)
    found = [pool.count_by_database() for pool in whole]
    weights = [source.weight for source in config.sources]
    needs = split_by_weight(count, weights)
    shares = split_by_weight(config.total, weights) if config.total else None
    targets = []
    for place, (counts, need) in enumerate(zip(found, needs, strict=True)):
        rest = counts.total() - need
        wanted = max(1, min(shares[place], rest) if shares else rest)
        targets.append(counts.total() * need / (need + wanted))
    while True:
        held: frozenset[str] = frozenset()
        for counts, target in zip(found, targets, strict=True):
            held |= _pick(counts, target, held, config.seed)
        spent = [place for place, counts in enumerate(found) if held.issuperset(counts)]
        if not any(found) or any(found[place] for place in spent):
            counts = sum((found[place] for place in spent), Counter())
            there = f"{counts.total():,} questions of {len(counts):,} databases"
            names = " and ".join(whole[place].name for place in spent)
            raise UserError(
                f"{count:,} are too many: there are {there} to learn from in {names}; "
                "set fewer aside"
            )
        pools = open_pools(own, check, held.__contains__)
        drawn = [len(list(pool.draw(need))) for pool, need in zip(pools, needs, strict=True)]
        short = [place for place, need in enumerate(needs) if found[place] and drawn[place] < need]
        if not short:
            return held
        for place in short:
            have = sum(found[place][name] for name in held)
            targets[place] = have + needs[place] - drawn[place]


def _pick(counts: Counter[str], target: float, held: frozenset[str], seed: int) -> frozenset[str]:
    """Add databases in an order by seed while they fit, then the one that exceeds least."""
    have = sum(counts[name] for name in held)
    rest = sorted(
        counts.keys() - held,
        key=lambda name: hashlib.sha256(f"{seed} held out {name}".encode()).digest(),
    )
    taken = []
    while rest and have < target:
        name = rest[0]
        if have + counts[name] > target:
            enough = [one for one in rest if have + counts[one] >= target]
            name = min(enough, key=counts.__getitem__)
        rest.remove(name)
        taken.append(name)
        have += counts[name]
    return frozenset(taken)
