"""Results compared column by column: PaVeRL-SQL's EX_f and EX_b, SQL-ASTRA's CSMR.

All take whatever execution gave: what is no table scores 0.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlenv.evaluators.equality import matches
from sqlenv.types import MatchMode, Result, Table, Value

Variant = Literal["paper", "code"]

# Blanks are those of ASCII: `int` does not know all the others.
_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*", re.ASCII)
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*", re.ASCII)
# Nobody writes longer numbers, and reading a very long one takes time.
_NUMBER_CHARS = 64


def fractional_accuracy(predicted: Result, gold: Result) -> float:
    """Return the share of gold columns that the prediction reproduces (EX_f, paper 003, III-A).

    A gold column is reproduced by a predicted column, used once, with the same values as often,
    in any order. NULL equals NULL alone, text that is a number is that number, numbers agree to
    three decimals. Further columns neither help nor hurt; names are ignored.

    Args:
        predicted: What the prediction gave.
        gold: What the gold query gave.

    Returns:
        In [0, 1]; 0.0 where either gave no table.
    """
    if not isinstance(predicted, Table) or not isinstance(gold, Table) or not gold.width:
        return 0.0
    if predicted.rows == gold.rows and predicted.width == gold.width:
        return 1.0
    if len(predicted.rows) != len(gold.rows):
        return 0.0
    wanted, found = Counter(_bags(gold)), Counter(_bags(predicted))
    return (wanted & found).total() / gold.width


def binary_accuracy(predicted: Result, gold: Result, *, extra_columns: int = 5) -> float:
    """Tell whether all gold columns are there, with few others (EX_b, paper 003, III-A).

    Args:
        predicted: What the prediction gave.
        gold: What the gold query gave.
        extra_columns: As many columns more than the gold has are too many (tau).

    Returns:
        1.0 or 0.0.
    """
    share = fractional_accuracy(predicted, gold)
    return binary_of(share, predicted, gold, extra_columns=extra_columns)


def binary_of(share: float, predicted: Result, gold: Result, *, extra_columns: int = 5) -> float:
    """Tell what `binary_accuracy` does where the `fractional_accuracy` is known."""
    if share < 1 or not isinstance(predicted, Table) or not isinstance(gold, Table):
        return 0.0
    return float(predicted.width - gold.width < extra_columns)


def csmr(
    predicted: Result,
    gold: Result,
    *,
    alpha: float = 0.8,
    match: MatchMode = "set",
    gold_sql: str = "",
) -> float:
    """Score how many gold columns the prediction reproduces (CSMR, paper 004, algorithm 1).

    Args:
        predicted: What the prediction gave.
        gold: What the gold query gave.
        alpha: The most that anything but a match earns.
        match: What counts as a match (step 0 of the algorithm).
        gold_sql: The gold query; only `bag_ordered` and `test_suite` read it.

    Returns:
        1.0 for a match; else alpha * M^2 / (gold columns * predicted columns), where M counts the
        sets of values that are a column's on both sides; 0.0 where either gave no table.

    Note:
        Equal columns collapse in M but not in the divisor, as printed. Values compare as Python's
        do: 1 equals 1.0 and not '1'; NULL is a value.
    """
    if matches(predicted, gold, mode=match, gold_sql=gold_sql):
        return 1.0
    if not isinstance(predicted, Table) or not isinstance(gold, Table):
        return 0.0
    pairs = gold.width * predicted.width
    if not pairs:
        return 0.0
    gold_sets = {frozenset(column) for column in _columns(gold)}
    matched = len(gold_sets & {frozenset(column) for column in _columns(predicted)})
    return alpha * matched**2 / pairs


def released_accuracy(predicted: Result, gold: Result, *, row_cutoff: int = 5) -> float:
    """Score columns and rows as PaVeRL-SQL's released code does (its `accuracy_reward.py`).

    Numbers of rows may differ: a key column picks the rows that both sides have. Rows too many then
    cost nothing, missing rows cost their share. Two predicted columns of one name make the program
    fail, which is no match. Floats agree within 0.005; in a column of numbers NULL is -1e10, in one
    of text 'none'.

    Args:
        predicted: What the prediction gave.
        gold: What the gold query gave.
        row_cutoff: The largest difference of numbers of rows.

    Returns:
        In [0, 1]: matched columns times common rows, over the cells of the gold; 0.0 where either
        gave no table.

    Note:
        The program compares data frames, the gold's read from CSV; this keeps its rules and not its
        accidents. Where rows are missing and the gold has one column it can pay more than for a
        right answer; here 1 is the most.
    """
    if not isinstance(predicted, Table) or not isinstance(gold, Table) or not gold.width:
        return 0.0
    surplus = len(predicted.rows) - len(gold.rows)
    if abs(surplus) > row_cutoff or len(set(predicted.columns)) < predicted.width:
        return 0.0
    found, wanted = _typed(predicted), _typed(gold)
    if surplus > 0:
        found = _common_rows(wanted, found)
    elif surplus < 0:
        if gold.width == 1 and any(_is_part(column, wanted[0]) for column in found):
            return len(predicted.rows) / len(gold.rows)
        wanted = _common_rows(found, wanted)
    rows = len(wanted[0].values) if wanted else 0
    if not wanted or not found or len(found[0].values) != rows:
        return 0.0
    return _matched(wanted, found) / gold.width * (rows / len(gold.rows) if gold.rows else 1.0)


def _columns(table: Table) -> list[tuple[Value, ...]]:
    """List the columns, also those of a table without rows."""
    return list(zip(*table.rows, strict=True)) if table.rows else [()] * table.width


def _bags(table: Table) -> list[frozenset[tuple[Hashable, int]]]:
    """Return for each column its values and how often each is there."""
    return [frozenset(Counter(map(_comparable, column)).items()) for column in _columns(table)]


def _comparable(value: Value) -> Hashable:
    """Bring a value into the form that is compared.

    Numbers are numbers, NULL is None, and text is in a tuple, so that it is never a number.
    """
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return round(value, 3)
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    number = _number(text)
    return (text,) if number is None else round(number, 3)


def _number(text: str) -> int | float | None:
    """Read a text that is a decimal number."""
    if len(text) > _NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return None
    return int(text) if _INTEGER.fullmatch(text) else float(text)


# The released program.

_TOLERANCE = 0.005
_NO_NUMBER = -10_000_000_000


@dataclass(frozen=True, slots=True)
class _Column:
    """A column as a data frame types it."""

    kind: Literal["text", "float", "int"]
    values: tuple[Any, ...]


def _typed(table: Table) -> list[_Column]:
    return [_type(column) for column in _columns(table)]


def _type(column: Sequence[Value]) -> _Column:
    """Take a column for numbers if all its values are; a NULL among integers makes them floats."""
    numbers: list[Any] = [_number(v) if isinstance(v, str) else v for v in column]
    for value, number in zip(column, numbers, strict=True):
        if isinstance(value, bytes) or (number is None and value is not None):
            text = ("none" if each is None else _text(each) for each in column)
            return _Column("text", tuple(text))
    if all(isinstance(number, int) for number in numbers):
        return _Column("int", tuple(numbers))
    return _Column("float", tuple(_NO_NUMBER if n is None else round(n, 3) for n in numbers))


def _text(value: Value) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _common_rows(key_side: Sequence[_Column], other: Sequence[_Column]) -> list[_Column]:
    """Keep the rows of `other` whose key is one of the other side's.

    The key is the first column of text, else of floats, else of integers; its counterpart is the
    first of that kind that has all its values.

    Returns:
        The columns of `other` with the rows that are left; no column where there is no key.
    """
    kinds = ("text", "float", "int")
    key = next((one for kind in kinds for one in key_side if one.kind == kind), None)
    if key is None or not key.values:
        return []
    wanted = set(key.values)
    for column in other:
        if column.kind != key.kind:
            continue
        rows = _rows_among(column, wanted)
        if len(rows) >= len(wanted):
            return [_Column(one.kind, tuple(one.values[row] for row in rows)) for one in other]
    return []


def _rows_among(column: _Column, wanted: set[Any]) -> list[int]:
    """List the rows of a column whose value is wanted; floats need only be near one."""
    if column.kind != "float":
        return [row for row, value in enumerate(column.values) if value in wanted]
    ordered = sorted(wanted)

    def is_near(value: float) -> bool:
        at = bisect_left(ordered, value)
        return any(_near(value, each) for each in ordered[max(at - 1, 0) : at + 1])

    return [row for row, value in enumerate(column.values) if is_near(value)]


def _near(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _TOLERANCE  # the former: infinities


def _is_part(column: _Column, whole: _Column) -> bool:
    return column.kind == whole.kind and Counter(column.values) <= Counter(whole.values)


def _matched(wanted: Sequence[_Column], found: Sequence[_Column]) -> int:
    """Count gold columns, each of which takes the first equal column that is left."""
    left = [_Column(one.kind, tuple(sorted(one.values))) for one in found]
    matched = 0
    for column in wanted:
        values = _Column(column.kind, tuple(sorted(column.values)))
        equal = next((one for one in left if _agree(values, one)), None)
        if equal is not None:
            left.remove(equal)
            matched += 1
    return matched


def _agree(a: _Column, b: _Column) -> bool:
    """Compare two sorted columns."""
    if a.kind == b.kind == "float":
        return all(map(_near, a.values, b.values))
    return a.values == b.values
