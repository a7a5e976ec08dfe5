"""A result beside another one: columns are paired by their values, then rows by their cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import eq
from typing import Any

IndexPair = tuple[int | None, int | None]
"""Places in the gold result and in the other one; None where a side has no column or row."""
_SOUGHT = 50  # rows of each side among which the most alike are paired

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

    Columns with the same bag of values belong together, those at the same place first; then those
    that share most values, and what is left in order. Rows that are equal in the paired columns
    belong together; then those that share most cells, and two lone rows in any case.
    """
    columns = _columns(gold, own, widths)
    both = [(a, b) for a, b in columns if a is not None and b is not None]
    left = [tuple(_key(row[a]) for a, _ in both) for row in gold]
    right = [tuple(_key(row[b]) for _, b in both) for row in own]
    sizes, is_lone = (len(left), len(right)), len(left) == len(right) == 1
    rows = _equal(left, right)
    rest, other = _free(rows, sizes)
    near = product(rest[:_SOUGHT], other[:_SOUGHT])
    rows |= _matched({(n, m): is_lone + sum(map(eq, left[n], right[m])) for n, m in near})
    return Pairing(columns, _in_order(rows, sizes))


def _columns(gold: ResultRows, own: ResultRows, sizes: tuple[int, int]) -> list[IndexPair]:
    bags, others = (
        [Counter(_key(row[n]) for row in rows) for n in range(width)]
        for rows, width in zip((gold, own), sizes, strict=True)
    )
    places = product(*map(range, sizes))
    found = _matched({(n, m): 1 + (n == m) for n, m in places if bags[n] == others[m]})
    near = product(*_free(found, sizes))
    found |= _matched({(n, m): (bags[n] & others[m]).total() for n, m in near})
    found |= dict(zip(*_free(found, sizes), strict=False))
    return _in_order(found, sizes)


def _equal(left: Sequence[Hashable], right: Sequence[Hashable]) -> dict[int, int]:
    places: dict[Hashable, list[int]] = {}
    for n, row in reversed(list(enumerate(right))):
        places.setdefault(row, []).append(n)
    return {n: places[row].pop() for n, row in enumerate(left) if places.get(row)}


def _matched(alike: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """Pair what is most alike first; what has nothing in common stays alone."""
    found: dict[int, int] = {}
    taken = set[int]()
    for n, m in sorted(alike, key=alike.__getitem__, reverse=True):
        if alike[n, m] and n not in found and m not in taken:
            found[n] = m
            taken.add(m)
    return found


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
