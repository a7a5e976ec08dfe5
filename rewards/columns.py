"""Results compared column by column: PaVeRL-SQL's EX_f, EX_b and reward, SQL-ASTRA's CSMR.

All take whatever execution gave: a failed query scores 0.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

from minirl.exchange import Score
from rewards.config import PaverlConfig
from rewards.execution import is_correct, is_executable, is_right_by_its_own, results_of
from sqlenv.evaluators.equality import matches
from sqlenv.executor import Executor
from sqlenv.types import Attempt, Episode, Result, Table, Value

TAU = PaverlConfig().extra_columns
ALL_COLUMNS = 10.0  # reward of all gold columns; of some, times EX_f (section III-C)
EXECUTED = 0.5  # reward of a query that runs without a gold column
_SHORTEST_SQL = 16  # the released program never runs a shorter query
# The largest difference of numbers of rows in the released reward, and in the released evaluator.
_ROW_CUTOFF, _EVALUATED_ROW_CUTOFF = 5, 30
# Only ASCII blanks: `int` does not strip all others.
_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*", re.ASCII)
# Nobody writes longer numbers, and reading a very long one takes time.
_NUMBER_CHARS = 64


class PaverlReward:
    """Pays for the gold columns in the result of the answer (PaVeRL-SQL, section III-C)."""

    def __init__(self, config: PaverlConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor

    def __call__(self, episode: Episode) -> Score:
        """Score an episode by its answer; see `payment`."""
        answer = episode.final_attempt
        shortest = _SHORTEST_SQL if self._config.ex_f == "code" else 0
        if answer is None or not is_executable(answer) or len(answer.sql) < shortest:
            parts = payment(0.0, ran=False)
        else:
            parts = payment(self._share(episode, answer), ran=True)
        return Score(sum(parts.values()), is_correct(episode), parts)

    def diagnostics(self, episode: Episode) -> dict[str, float]:
        """Name numbers for the metrics: EX_f and EX_b of the answer, 0 without one."""
        functions = {"columns/ex_f": fractional_accuracy, "columns/ex_b": binary_accuracy}
        if (answer := episode.final_attempt) is None:
            return dict.fromkeys(functions, 0.0)
        results = results_of(self._executor, episode.example, answer)
        return {name: function(*results) for name, function in functions.items()}

    def _share(self, episode: Episode, answer: Attempt) -> float:
        if is_right_by_its_own(episode.example, answer):
            return 1.0
        results = results_of(self._executor, episode.example, answer)
        if self._config.payoff == "binary":
            return binary_accuracy(*results, extra_columns=self._config.extra_columns)
        if self._config.ex_f == "code":
            return released_accuracy(*results)
        return fractional_accuracy(*results)


def payment(share: float, *, ran: bool) -> dict[str, float]:
    """Pay a share of gold columns; without any, for a query that ran (III-C)."""
    return {"columns": ALL_COLUMNS * share, "executed": EXECUTED if ran and not share else 0.0}


def fractional_accuracy(predicted: Result, gold: Result) -> float:
    """Return the share of gold columns that the prediction reproduces (EX_f, PaVeRL-SQL, III-A).

    A gold column is reproduced where some predicted column has the same values as often, in any
    order. NULL equals NULL alone, text that is a number is that number, numbers agree to three
    decimals. Further columns and names do not count. 0.0 where either gave no table.
    """
    if not isinstance(predicted, Table) or not isinstance(gold, Table) or not gold.width:
        return 0.0
    if predicted.rows == gold.rows and predicted.width == gold.width:
        return 1.0
    if len(predicted.rows) != len(gold.rows):
        return 0.0
    found = set(_bags(predicted))
    return sum(column in found for column in _bags(gold)) / gold.width


def binary_accuracy(predicted: Result, gold: Result, *, extra_columns: int = TAU) -> float:
    """Tell whether all gold columns are there, with few others (EX_b, PaVeRL-SQL, III-A).

    Others are those that equal no gold column: fewer than `extra_columns` (tau) of them.
    """
    if not isinstance(predicted, Table) or not isinstance(gold, Table):
        return 0.0
    if fractional_accuracy(predicted, gold) < 1:
        return 0.0
    known = set(_bags(gold))
    return float(sum(column not in known for column in _bags(predicted)) < extra_columns)


def csmr(predicted: Result, gold: Result, *, alpha: float = 0.8) -> float:
    """Score how many gold columns the prediction reproduces (CSMR, SQL-ASTRA, algorithm 1).

    Returns:
        1.0 for equal sets of rows; else alpha * M^2 / (gold columns * predicted columns), where M
        counts the sets of values that are a column's on both sides; 0.0 where either gave no table.

    Note:
        Equal columns collapse in M but not in the divisor, as printed.
    """
    if not isinstance(predicted, Table) or not isinstance(gold, Table):
        return 0.0
    if matches(predicted, gold, mode="set"):
        return 1.0
    pairs = gold.width * predicted.width
    if not pairs:
        return 0.0
    gold_sets, columns = {*map(frozenset, gold.by_column())}, predicted.by_column()
    # `issuperset` ends at the first value that is missing.
    found = sum(any(one.issuperset(c) and one == {*c} for c in columns) for one in gold_sets)
    return alpha * found**2 / pairs


def _bags(table: Table) -> list[frozenset[tuple[Hashable, int]]]:
    return [frozenset(Counter(map(_comparable, column)).items()) for column in table.by_column()]


def _comparable(value: Value) -> Hashable:
    """Bring a value into the form that is compared: texts are tuples, and so are never numbers."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return round(value, 3)
    text = _text(value)
    number = _number(text)
    return (text,) if number is None else round(number, 3)


def _number(text: str) -> int | float | None:
    if len(text) > _NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return None
    return int(text) if text.strip().lstrip("+-").isdigit() else float(text)


# The released program (its `accuracy_reward.py`).

_TOLERANCE = 0.005
_NO_NUMBER = -10_000_000_000


class _TypedColumn(NamedTuple):
    kind: Literal["text", "float", "int"]
    values: tuple[Any, ...]


def released_accuracy(predicted: Result, gold: Result, *, row_cutoff: int = _ROW_CUTOFF) -> float:
    """Score columns and rows as PaVeRL-SQL's released code does: the share of the gold's cells.

    Numbers of rows may differ by the cutoff: a key column picks the rows that both sides have. Rows
    too many then cost nothing, missing rows cost their share. Two predicted columns of one name are
    no match.
    Floats agree within 0.005; in a column of numbers NULL is -1e10, in one of text 'none'. At most
    1, unlike in the program, which compares data frames read from CSV: this keeps its rules and not
    its accidents.
    """
    if not isinstance(predicted, Table) or not isinstance(gold, Table) or not gold.width:
        return 0.0
    surplus = len(predicted.rows) - len(gold.rows)
    if abs(surplus) > row_cutoff or len(set(predicted.columns)) < predicted.width:
        return 0.0
    found, wanted = ([*map(_typed, table.by_column())] for table in (predicted, gold))
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


def evaluated_accuracy(predicted: Result, gold: Result) -> float:
    """Score as the released code's evaluator does, whose numbers of rows may differ by 30."""
    return released_accuracy(predicted, gold, row_cutoff=_EVALUATED_ROW_CUTOFF)


def _typed(column: Sequence[Value]) -> _TypedColumn:
    """Take a column for numbers if all its values are; a NULL among integers makes them floats."""
    numbers: list[Any] = [_number(v) if isinstance(v, str) else v for v in column]
    for value, number in zip(column, numbers, strict=True):
        if isinstance(value, bytes) or (number is None and value is not None):
            text = ("none" if each is None else _text(each) for each in column)
            return _TypedColumn("text", tuple(text))
    if all(isinstance(number, int) for number in numbers):
        return _TypedColumn("int", tuple(numbers))
    return _TypedColumn("float", tuple(_NO_NUMBER if n is None else round(n, 3) for n in numbers))


def _text(value: Value) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _common_rows(
    key_side: Sequence[_TypedColumn], other: Sequence[_TypedColumn]
) -> list[_TypedColumn]:
    """Keep the rows of `other` whose key the other side has; no column without a key.

    The key is the first column of text, else of floats, else of integers; its counterpart is the
    first of that kind that has all its values.
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
            return [_TypedColumn(one.kind, tuple(one.values[row] for row in rows)) for one in other]
    return []


def _rows_among(column: _TypedColumn, wanted: set[Any]) -> list[int]:
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


def _is_part(column: _TypedColumn, whole: _TypedColumn) -> bool:
    return column.kind == whole.kind and Counter(column.values) <= Counter(whole.values)


def _matched(wanted: Sequence[_TypedColumn], found: Sequence[_TypedColumn]) -> int:
    """Count the gold columns that equal a predicted one; each of these counts once."""
    left = [_TypedColumn(one.kind, tuple(sorted(one.values))) for one in found]
    matched = 0
    for column in wanted:
        values = _TypedColumn(column.kind, tuple(sorted(column.values)))
        equal = next((one for one in left if _agree(values, one)), None)
        if equal is not None:
            left.remove(equal)
            matched += 1
    return matched


def _agree(a: _TypedColumn, b: _TypedColumn) -> bool:
    if a.kind == b.kind == "float":
        return all(map(_near, a.values, b.values))
    return a.values == b.values
