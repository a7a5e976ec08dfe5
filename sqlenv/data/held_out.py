"""Databases of the training sources that are set aside, to choose checkpoints by."""

from __future__ import annotations

import hashlib
from collections import Counter

from minirl.exchange import UserError
from sqlenv.config import DataConfig
from sqlenv.data.loading import open_pools, split_by_weight
from sqlenv.data.sources import Check


def validation_of(config: DataConfig, count: int) -> DataConfig:
    """Turn the settings of questions to learn from into those of the questions held out."""
    sources = (source.model_copy(update={"limit": None}) for source in config.sources)
    return config.model_copy(update={"total": count, "sources": tuple(sources)})


def hold_out(
    config: DataConfig, count: int, check: Check | None = None, *, advice: str = ""
) -> frozenset[str]:
    """Choose databases to hold out, by `config.seed` and their names alone.

    Of each source they have as large a share of the questions as the `count` to validate by is of
    those wanted in all, and more where too few of their gold queries may stay. Sources are read
    once to count questions, then until those held out are enough. `advice` is as for `load`.
    """
    own = validation_of(config, count)
    whole = open_pools(own, None, accept=lambda _db_id: True, advice=advice)
    found = [pool.count_by_database() for pool in whole]
    weights = [source.weight for source in config.sources]
    needs = split_by_weight(count, weights)
    shares = split_by_weight(config.total, weights) if config.total else [None] * len(weights)
    targets = []
    for counts, need, share, source in zip(found, needs, shares, config.sources, strict=True):
        bounds = (share, source.limit, counts.total() - need)
        wanted = max(1, min(bound for bound in bounds if bound is not None))
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
        pools = open_pools(own, check, accept=held.__contains__, advice=advice)
        is_short = False
        for place, (counts, need, pool) in enumerate(zip(found, needs, pools, strict=True)):
            missing = need - len(list(pool.draw(need))) if counts else 0
            if missing:
                is_short = True
                targets[place] = sum(counts[name] for name in held) + missing
        if not is_short:
            return held


def _pick(counts: Counter[str], target: float, held: frozenset[str], seed: int) -> frozenset[str]:
    """Add databases in an order by seed while they fit, then the one that exceeds least."""

    def place(name: str) -> bytes:
        return hashlib.sha256(f"{seed} held out {name}".encode()).digest()

    have = sum(counts[name] for name in held)
    rest = sorted(counts.keys() - held, key=place)
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
