"""Databases of the training sources that are set aside, to choose checkpoints by."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping

from exchange import UserError
from sqlenv.config import DataConfig
from sqlenv.data.loading import open_pools, open_sample, split_by_weight
from sqlenv.data.sources import Check, Pool


def validation_of(config: DataConfig, count: int) -> DataConfig:
    """Turn the settings of questions to learn from into those of the questions held out."""
    sources = (source.model_copy(update={"limit": None}) for source in config.sources)
    return config.model_copy(update={"total": count, "sources": tuple(sources)})


def hold_out(
    config: DataConfig,
    count: int,
    check: Check | None = None,
    *,
    advice: str = "",
) -> frozenset[str]:
    """Choose databases to hold out, by `config.seed` and their names alone.

    Of each source they have as large a share of the questions as the `count` to validate by is of
    those wanted in all, and more where too few of their gold queries may stay. Sources are read
    once to count questions, then until those held out are enough. `advice` is as for `load`.
    """
    own = validation_of(config, count)
    whole = open_pools(own, None, accept=lambda _db_id: True, advice=advice)
    found = [Counter(db_id for _, db_id in pool.candidates()) for pool in whole]
    needs = split_by_weight(count, [source.weight for source in config.sources])
    targets = [
        _target(counts.total(), need, wanted)
        for counts, need, wanted in zip(found, needs, _training_shares(config), strict=True)
    ]
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

        def is_held(db_id: str, names: Collection[str] = held) -> bool:
            return db_id in names

        pools = open_pools(own, check, accept=is_held, advice=advice)
        short = [
            _shortage(pool, need) if counts else 0
            for counts, need, pool in zip(found, needs, pools, strict=True)
        ]
        if not any(short):
            return held
        targets = [
            _have(counts, held) + missing if missing else target
            for counts, missing, target in zip(found, short, targets, strict=True)
        ]


def _shortage(pool: Pool, need: int) -> int:
    open_sample(pool, None)
    pool.draw(need)
    return need - len(pool.kept)


def _training_shares(config: DataConfig) -> list[float]:
    """Return how many questions each source is to give to learn from; infinite for all."""
    total = config.total
    weights = [source.weight for source in config.sources]
    shares = [float("inf")] * len(weights) if total is None else split_by_weight(total, weights)
    limits = (source.limit or float("inf") for source in config.sources)
    return [min(share, limit) for share, limit in zip(shares, limits, strict=True)]


def _target(everything: int, need: int, wanted: float) -> float:
    wanted = max(1, min(wanted, everything - need))
    return everything * need / (need + wanted)


def _have(counts: Mapping[str, int], names: Collection[str]) -> int:
    return sum(counts[name] for name in names if name in counts)


def _pick(counts: Counter[str], target: float, held: frozenset[str], seed: int) -> frozenset[str]:
    """Add databases in an order by seed while they fit, then the one that exceeds least."""

    def place(name: str) -> bytes:
        return hashlib.sha256(f"{seed} held out {name}".encode()).digest()

    have = _have(counts, held)
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
