"""A result beside another one: columns are paired by their values, then rows by their cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

Pair = tuple[int | None, int | None]
"""Places in the gold result and in the other one; None where a side has no column or row."""
_SOUGHT = 50  # rows of each side among which the most alike are paired

Rows = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which columns and rows of two results belong together, in the gold result's order; what the
    other one has alone comes last.
    """

    columns: list[Pair]
    rows: list[Pair]

    def differs(self, gold: Rows, own: Rows, row: Pair) -> list[bool]:
        """Tell in which columns a pair of rows differs; where a side has no row, in all."""
        if row[0] is None or row[1] is None:
            return [True] * len(self.columns)
        cells = ((_cell(gold[row[0]], a), _cell(own[row[1]], b)) for a, b in self.columns)
        return [a != b for a, b in cells]


def align(gold: Rows, own: Rows, *, widths: tuple[int, int]) -> Alignment:
    """Pair the columns and rows of two results of these widths.

    Columns with the same bag of values belong together, those at the same place first; then those
    that share most values, and what is left in order. Rows that are equal in the paired columns
    belong together; then those that share most cells, and what is left in order.
    """
    columns = list(_columns(gold, own, widths))
    both = [(a, b) for a, b in columns if a is not None and b is not None]
    left = [tuple(_key(row[a]) for a, _ in both) for row in gold]
    right = [tuple(_key(row[b]) for _, b in both) for row in own]
    rows = dict(_equal(left, right))
    rest = [n for n in range(len(left)) if n not in rows]
    other = [n for n in range(len(right)) if n not in {*rows.values()}]
    rows |= dict(_alike(rest, other, left, right))
    alone = [n for n in range(len(right)) if n not in {*rows.values()}]
    return Alignment(columns, [*((n, rows.get(n)) for n in range(len(left))), *_only_own(alone)])


def _columns(gold: Rows, own: Rows, widths: tuple[int, int]) -> Iterator[Pair]:
    bags, others = (
        [Counter(_key(row[n]) for row in rows) for n in range(width)]
        for rows, width in zip((gold, own), widths, strict=True)
    )
    found: dict[int, int] = {n: n for n in range(min(widths)) if bags[n] == others[n]}
    for n, bag in enumerate(bags):
        free = (m for m in range(len(others)) if m not in {*found.values()} and others[m] == bag)
        if n not in found and (same := next(free, None)) is not None:
            found[n] = same
    for n, bag in enumerate(bags):
        free = [m for m in range(len(others)) if m not in {*found.values()}]
        shared = {m: (bag & others[m]).total() for m in free}
        if n not in found and free and max(shared.values()):
            found[n] = max(free, key=shared.__getitem__)
    rest = [n for n in range(len(bags)) if n not in found]
    left = [m for m in range(len(others)) if m not in {*found.values()}]
    found |= dict(zip(rest, left, strict=False))
    yield from ((n, found.get(n)) for n in range(len(bags)))
    yield from _only_own(left[len(rest) :])


def _equal(left: Sequence[Hashable], right: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    places: dict[Hashable, list[int]] = {}
    for n, row in reversed(list(enumerate(right))):
        places.setdefault(row, []).append(n)
    for n, row in enumerate(left):
        if places.get(row):
            yield n, places[row].pop()


def _alike(
    rest: Sequence[int], other: Sequence[int], left: Sequence[Any], right: Sequence[Any]
) -> Iterator[tuple[int, int]]:
    """Pair each row with the one that shares most cells; two lone rows in any case."""
    near = list(other[:_SOUGHT])
    for n in rest[:_SOUGHT]:
        shared = {m: sum(map(_is_same, left[n], right[m])) for m in near}
        best = max(near, key=shared.__getitem__, default=None)
        if best is not None and (shared[best] or len(left) == len(right) == 1):
            near.remove(best)
            yield n, best


def _only_own(places: Sequence[int]) -> Iterator[Pair]:
    return zip_longest((), places)


def _is_same(one: Hashable, other: Hashable) -> bool:
    return one == other


def _cell(row: Sequence[Any], place: int | None) -> Any:
    return None if place is None else (_key(row[place]),)


def _key(value: Any) -> Hashable:
    """Tell values apart: text from numbers, and what JSON writes as an object by its text."""
    return value if isinstance(value, Hashable) else repr(value)
