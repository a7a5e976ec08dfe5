"""A result beside another one: columns are paired by their values, then rows by their cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

IndexPair = tuple[int | None, int | None]
"""Places in the gold result and in the other one; None where a side has no column or row."""
_ALIKE = 10**6  # more than all distances together: results have few rows, of at most 100 columns

ResultRows = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which columns and rows of two results belong together, in the gold result's order; what the
    other one has alone comes last.
    """

    columns: list[IndexPair]
    rows: list[IndexPair]

    def differs(self, gold: ResultRows, own: ResultRows, row: IndexPair) -> list[int]:
        """List the columns in which a pair of rows differs; none where a side has no row."""
        if row[0] is None or row[1] is None:
            return []
        cells = ((_cell(gold[row[0]], a), _cell(own[row[1]], b)) for a, b in self.columns)
        return [n for n, (a, b) in enumerate(cells) if a != b]


def pair_results(gold: ResultRows, own: ResultRows, *, widths: tuple[int, int]) -> Pairing:
    """Pair the columns and rows of two results of these widths.

    Columns that share most values belong together, and what is left in order. Rows that share most
    cells of the paired columns belong together, and two lone rows in any case.
    """
    bags, others = (
        [Counter(_key(row[n]) for row in rows) for n in range(width)]
        for rows, width in zip((gold, own), widths, strict=True)
    )
    found = _matched([[2 * (a & b).total() + (a == b) for b in others] for a in bags])
    found |= dict(zip(*_free(found, widths), strict=False))
    columns = _in_order(found, widths)
    both = [(a, b) for a, b in columns if a is not None and b is not None]
    left = [tuple(_key(row[a]) for a, _ in both) for row in gold]
    right = [tuple(_key(row[b]) for _, b in both) for row in own]
    sizes, is_lone = (len(left), len(right)), len(left) == len(right) == 1
    rows = _matched([[2 * sum(map(eq, a, b)) + (a == b or is_lone) for b in right] for a in left])
    return Pairing(columns, _in_order(rows, sizes))


def _matched(alike: Sequence[Sequence[int]]) -> dict[int, int]:
    """Pair what is most alike together, of equals what is nearest; what has nothing in common stays
    alone.
    """
    found = np.array(alike)
    if not found.size:
        return {}
    n, m = np.indices(found.shape)
    worth = np.where(found > 0, _ALIKE * found - (n - m) ** 2, 0)
    pairs = np.transpose(linear_sum_assignment(worth, maximize=True)).tolist()
    return {n: m for n, m in pairs if found[n, m]}


def _free(found: Mapping[int, int], sizes: tuple[int, int]) -> tuple[list[int], list[int]]:
    """List what is not paired yet on either side."""
    taken = {*found.values()}
    left, right = sizes
    return [n for n in range(left) if n not in found], [m for m in range(right) if m not in taken]


def _in_order(found: Mapping[int, int], sizes: tuple[int, int]) -> list[IndexPair]:
    alone = _free(found, sizes)[1]
    return [*((n, found.get(n)) for n in range(sizes[0])), *((None, m) for m in alone)]


def _cell(row: Sequence[Any], place: int | None) -> Any:
    return None if place is None else (_key(row[place]),)


def _key(value: Any) -> Hashable:
    """Tell values apart: text from numbers, and what JSON writes as an object by its text."""
    return value if isinstance(value, Hashable) else repr(value)
