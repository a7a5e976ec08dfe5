"""BIRD's soft F1, and the rules that corrected golds come with, where cells compare as the text
that Python prints: BIRD-Platinum's strict one, and ReViSQL's, a question each.

Sources: bird-bench/mini_dev, evaluation/evaluation_f1.py, at 4d970a9a97b1;
uiuc-kang-lab/BIRD-Platinum, evaluation/grade.py, at d6e0e96; bifrost17/ReViSQL,
tinker_cookbook/recipes/sql_rl/grader.py, at 7b79b16.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from sqlenv.types import Row, Table, Value

_FORM = re.compile(r"(?:set|multiset|list|subset(?:,>?=,\d+)?)?")
_WITHIN = 0.01


def checked_method(text: str | None) -> str:
    """Return a question's own rule, empty where it has none.

    It is `set`, `multiset`, `list`, `subset`, or `subset` with a number of rows, exact as in
    `subset,=,3` or at least as in `subset,>=,3`. The published program fails at `subset` alone,
    which two of its records say: here any number of rows will do.

    Raises:
        ValueError: The text is none of these.
    """
    text = (text or "").strip()
    if not _FORM.fullmatch(text):
        kinds = "set, multiset, list, subset, subset,=,K and subset,>=,K"
        raise ValueError(f"{text!r} is none of {kinds}")
    return text


def is_strictly_equal(predicted: Table, gold: Table) -> bool:
    """Say whether two results are the same but for the order of rows and of cells in a row."""
    return _is_comparable(predicted.rows, gold.rows) and _bag(predicted.rows) == _bag(gold.rows)


def is_graded_right(predicted: Table, gold: Table, method: str) -> bool:
    """Say whether a result is right by a question's own rule (`checked_method`), or as a set.

    Rows without anything in them do not count, and a single number may be off by a hundredth.
    """
    found, wanted = _filled(predicted.rows), _filled(gold.rows)
    if not _is_comparable(found, wanted):
        return False
    is_single = len(found) == len(wanted) == 1 == len(found[0])
    if is_single and _is_near(found[0][0], wanted[0][0]):
        return True
    kind, *number = (checked_method(method) or "set").split(",")
    if kind == "multiset":
        return _bag(found) == _bag(wanted)
    if kind == "list":
        return [_text(row) for row in found] == [_text(row) for row in wanted]
    texts, gold_texts = set(map(_text, found)), set(map(_text, wanted))
    if kind == "set":
        return texts == gold_texts
    sign, count = number or (">=", "0")
    # Rows of numbers can be made whose hashes are all equal: those that are not the gold's wait.
    distinct = len(set(found)) if texts <= gold_texts else -1
    return distinct == int(count) if sign == "=" else distinct >= int(count)


def _is_comparable(found: Sequence[Row], wanted: Sequence[Row]) -> bool:
    """Say whether both are empty, or neither is and they are as wide."""
    return (not found and not wanted) or bool(found and wanted and len(found[0]) == len(wanted[0]))


def _filled(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if any(cell is not None and str(cell).strip() for cell in row)]


def _is_near(found: Value, wanted: Value) -> bool:
    try:
        # Python reads numbers in text and in bytes.
        numbers = [float(value) for value in (wanted, found) if value is not None]
        return len(numbers) == 2 and abs((numbers[0] - numbers[1]) / numbers[0]) < _WITHIN
    except (ValueError, ZeroDivisionError, OverflowError):
        return False


def _text(row: Row) -> tuple[str, ...]:
    return tuple(sorted(map(str, row)))


def _bag(rows: Sequence[Row]) -> Counter[tuple[str, ...]]:
    return Counter(map(_text, rows))


def soft_f1(predicted: Table, gold: Table) -> float:
    """Score the cells that two results share, row by row.

    Duplicate rows go first; then the first row stands beside the first, and so on. A row pair
    counts, as shares of the gold row's width, predicted cells that the gold row has, that it has
    not, and gold cells that the predicted row has not; a row without partner counts 1. Two empty
    results score 1.
    """
    found, wanted = list(dict.fromkeys(predicted.rows)), list(dict.fromkeys(gold.rows))
    if not found and not wanted:
        return 1.0
    shares = [_shares(*pair) for pair in zip(found, wanted, strict=False)]
    both = sum(share[0] for share in shares)
    extra = sum(share[1] for share in shares) + max(0, len(found) - len(wanted))
    missing = sum(share[2] for share in shares) + max(0, len(wanted) - len(found))
    precision = both / (both + extra) if both + extra else 0.0
    recall = both / (both + missing) if both + missing else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _shares(found: Row, wanted: Row) -> tuple[float, float, float]:
    both = sum(value in wanted for value in found)
    missing = sum(value not in found for value in wanted)
    return both / len(wanted), (len(found) - both) / len(wanted), missing / len(wanted)
