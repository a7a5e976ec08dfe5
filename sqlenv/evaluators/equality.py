"""The one definition of when two results are the same."""

from __future__ import annotations

import marshal
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise

from sqlenv.sql.lexer import tokenize
from sqlenv.types import MatchMode, Numbers, Result, Row, Table, Value

_Column = tuple[Value, ...]
_Bag = frozenset[tuple[Value, int]]
_Number = tuple[type, int | float]

_ROWS_AT_ONCE = 1_000
_NUMBERS_EACH, _FEW_NUMBERS = 10, 10_000
"""How many different numbers of a result are compared: so many for each of the gold result's, and
so many in any case. A result with more is wrong, and comparing all would take seconds."""

_SEARCHED_CELLS = 10_000_000
"""Cells that a search for the order of columns looks at, some seconds of work; a result that needs
more is no match. Only tables of many columns with the same few values come near it."""


CLOSE = 1e-12
"""How far apart close numbers are at most, relative to the larger one. 4,500 units in the last
place of a double: more than sums, quotients and moderate differences lose to rounding, and less
than what data tell apart, such as the seconds of a julianday (4.7e-12)."""


def like_gold(predicted: Result, gold: Result, numbers: Numbers) -> Result:
    """Write a result's numbers as the gold result has them, where they are the same (`numbers`).

    After this, equality of Python's values decides everything: matches, columns, differences. A
    float becomes the nearest close number of the gold result, an integer only a float's. A result
    with far more numbers than the gold result stays as it is (`_NUMBERS_EACH`).
    """
    if numbers == "exact" or not isinstance(predicted, Table) or not isinstance(gold, Table):
        return predicted
    if predicted.rows == gold.rows:
        return replace(predicted, rows=gold.rows)
    known = _numbers(gold.rows) or set()
    own = _numbers(predicted.rows, most=_NUMBERS_EACH * len(known) + _FEW_NUMBERS)
    if own is None or not any(kind is float for kind, _ in own | known):
        return predicted
    ordered = sorted(value for _, value in known)
    named = {value: _nearest(value, ordered) for _, value in own - known}
    changed = {value: near for value, near in named.items() if near is not value}
    if not changed:
        return predicted
    # Text that is written as a number is no key, and neither are bytes.
    rows = tuple([tuple([changed.get(value, value) for value in row]) for row in predicted.rows])
    return replace(predicted, rows=rows)


def _numbers(rows: Sequence[Row], *, most: float = math.inf) -> set[_Number] | None:
    """List the numbers of rows, of which 6 and 6.0 are two; None where there are more."""
    found: set[_Number] = set()
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        values = chain.from_iterable(rows[at : at + _ROWS_AT_ONCE])
        found |= {(type(value), value) for value in values if isinstance(value, int | float)}
        if len(found) > most:
            return None
    return found


def _nearest(value: int | float, ordered: Sequence[int | float]) -> int | float:
    """Return the nearest of close numbers in order; the value itself where none is close."""
    at = bisect_left(ordered, value)
    near = [
        other
        for other in ordered[max(at - 1, 0) : at + 1]
        if float in (type(value), type(other)) and math.isclose(value, other, rel_tol=CLOSE)
    ]
    return min(near, key=lambda other: abs(other - value), default=value)


def matches(predicted: Result, gold: Result, *, mode: MatchMode, gold_sql: str = "") -> bool:
    """Say whether a prediction is right; never where either did not give a table.

    Values compare as Python's do: 1 equals 1.0 and not '1', with no tolerance. Column names are
    ignored, column order is not, except by `test_suite`. Two empty tables match, whatever their
    columns.

    Modes: `set` ignores order and duplicates (BIRD's evaluator); `bag` ignores order; `bag_ordered`
    ignores it unless the gold query orders its rows; `test_suite` (Spider's evaluator on one
    database, DISTINCT left as it is) ignores the order of columns, and that of rows unless `order
    by` stands anywhere in the gold query. Only the last two read `gold_sql`.
    """
    if not isinstance(predicted, Table) or not isinstance(gold, Table):
        return False
    if mode == "test_suite":
        return _matches_suite(predicted, gold, in_order="order by" in gold_sql.lower())
    if predicted.rows == gold.rows:
        return True
    if mode == "set":
        wanted = set(gold.rows)  # a row that is not there ends it
        return wanted.issuperset(predicted.rows) and len(set(predicted.rows)) == len(wanted)
    if len(predicted.rows) != len(gold.rows) or (mode == "bag_ordered" and is_ordered(gold_sql)):
        return False
    return Counter(predicted.rows) == Counter(gold.rows)


def is_ordered(sql: str) -> bool:
    """Say whether a query has an ORDER BY of its own, outside all parentheses."""
    return any(
        first.depth == 0 and first.is_word("order") and second.is_word("by")
        for first, second in pairwise(tokenize(sql))
    )


def _matches_suite(predicted: Table, gold: Table, *, in_order: bool) -> bool:
    # Most results that match are equal to the bit, which takes one look.
    if predicted is gold or marshal.dumps(predicted.rows, 2) == marshal.dumps(gold.rows, 2):
        return True
    if predicted.rows != gold.rows and not _matches_permuted(predicted, gold, in_order=in_order):
        return False
    return not _is_rejected(predicted, gold, in_order=in_order)


def _is_rejected(predicted: Table, gold: Table, *, in_order: bool) -> bool:
    """Say whether the program's quick look rejects results that are equal.

    It compares rows whose values are sorted by how they are written, in which 1 and 1.0 differ.
    """
    values = chain.from_iterable(chain(predicted.rows, gold.rows))
    if gold.width < 2 or float not in set(map(type, values)):
        return False
    found, wanted = ([_by_writing(row) for row in table.rows] for table in (predicted, gold))
    return found != wanted if in_order else set(found) != set(wanted)


def _by_writing(row: Row) -> Row:
    return tuple(sorted(row, key=lambda value: f"{value}{type(value)}"))


def _matches_permuted(predicted: Table, gold: Table, *, in_order: bool) -> bool:
    if len(predicted.rows) != len(gold.rows) or predicted.width != gold.width:
        return False
    wanted, found = gold.by_column(), predicted.by_column()
    if in_order:
        return Counter(wanted) == Counter(found)
    if Counter(predicted.rows) == Counter(gold.rows):
        return True
    if Counter(map(_bag, wanted)) != Counter(map(_bag, found)):
        return False
    return _can_permute(wanted, found)


def _can_permute(wanted: list[_Column], found: list[_Column]) -> bool:
    """Search for an order of the columns, gold column by gold column, depth first.

    Rows that agree in the columns placed so far have one number on both sides, so that a start
    which leads nowhere is given up at its first wrong column.
    """
    wanted = sorted(wanted, key=lambda column: -len(set(column)))
    by_bag: defaultdict[_Bag, list[int]] = defaultdict(list)
    for at, column in enumerate(found):
        by_bag[_bag(column)].append(at)
    fitting = [by_bag[_bag(column)] for column in wanted]
    # Equal columns share a number: one is as good as the other.
    seen: dict[_Column, int] = {}
    alike = [seen.setdefault(column, at) for at, column in enumerate(found)]
    row_count = len(wanted[0])
    tries = len(wanted) + _SEARCHED_CELLS // row_count
    start = (0,) * row_count
    # Columns placed, and the numbers of the rows on both sides before the last of them.
    stack: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [((), start, start)]
    while stack and tries > 0:
        placed, left, right = stack.pop()
        tries -= 1
        if placed:
            column = wanted[len(placed) - 1]
            numbered = _number_rows(left, column, right, found[placed[-1]])
            if numbered is None:
                continue
            left, right = numbered
        if len(placed) == len(wanted):
            return True
        free = {alike[at]: at for at in fitting[len(placed)] if at not in placed}
        stack += [((*placed, at), left, right) for at in free.values()]
    return False


def _number_rows(
    left: tuple[int, ...], wanted: _Column, right: tuple[int, ...], found: _Column
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Number rows by their number so far and one more value; None where the sides differ."""
    numbers: dict[tuple[int, Value], int] = {}
    ours = tuple(
        [numbers.setdefault(pair, len(numbers)) for pair in zip(left, wanted, strict=True)]
    )
    theirs = tuple([numbers.get(pair, -1) for pair in zip(right, found, strict=True)])
    return (ours, theirs) if Counter(ours) == Counter(theirs) else None


def _bag(column: _Column) -> _Bag:
    return frozenset(Counter(column).items())
