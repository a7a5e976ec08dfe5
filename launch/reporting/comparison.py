"""Runs beside the first of them: a table as in the papers, intervals, and paired tests.

Each run is compared with the base: the difference with its 95 % interval, the two-sided p-value of
10,000 paired bootstrap resamples of the questions (EXPO-SQL, paper 001, section 6.7), and McNemar's
counts with the exact p-value. Intervals of rates are Wilson's, those of their differences Tango's;
of other scores by bootstrap.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from rich.table import Table as RichTable

from launch.evaluation.statistics import (
    McNemar,
    Paired,
    mcnemar,
    mean_interval,
    paired_difference,
)
from launch.evaluation.testsets import TEST_SETS
from launch.reporting.runs import Column, Key, Run
from sqlenv.errors import UserError

_log = logging.getLogger(__name__)

LABELS: Mapping[Key, str] = {
    ("bird-dev", "bird_ex"): "BIRD dev",
    ("spider-dev", "spider_ex"): "Spider dev EX",
    ("spider-dev", "spider_ts"): "Spider dev TS",
    ("spider-test", "spider_ex"): "Spider test",
    ("spider-syn", "spider_ex"): "Syn EX",
    ("spider-syn", "spider_ts"): "Syn TS",
    ("spider-realistic", "spider_ex"): "Realistic EX",
    ("spider-realistic", "spider_ts"): "Realistic TS",
    ("spider-dk", "spider_ex"): "DK",
    ("spider2-local", "spider2_local"): "Spider 2 local",
}
"""The columns of the papers' tables (paper 000, tables 1 and 2), in their order; others follow."""
_NONE = "-"
Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A run beside the first one, in one column.

    Attributes:
        paired: The difference of both.
        counts: McNemar's; None where scores are not all 0 or 1.
        questions: Those with different scores: both scores and both answers.
    """

    run: str
    decode: str
    key: Key
    paired: Paired
    counts: McNemar | None
    questions: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs, of which the first is the base, and what sets the others apart from it.

    Attributes:
        seed: Of the resamples.
    """

    runs: tuple[Run, ...]
    keys: tuple[Key, ...]
    differences: tuple[Difference, ...]
    seed: int

    @classmethod
    def of(cls, runs: Sequence[Run], *, seed: int = 0) -> Comparison:
        """Compare runs with the first one.

        Raises:
            UserError: They are not of the same questions, or have nothing in common.
        """
        keys = _keys(runs)
        for key in keys:
            there = [run for run in runs if key in run.columns]
            for run in there[1:]:
                _check_alike(there[0], run, key)
        differences = [each for run in runs[1:] for each in _differences(runs[0], run, seed)]
        if len(runs) > 1 and not differences:
            raise UserError("the runs have no test set and measure in common; evaluate them on one")
        return cls(tuple(runs), tuple(keys), tuple(differences), seed)

    def tables(self, width: int) -> Iterator[RichTable]:
        """Lay the tables out for a terminal of this width."""
        heads, rows = _table(self.runs, self.keys, self.seed)
        yield from _terminal("%, with 95 % intervals", heads, rows, width, fixed=_fixed(heads))
        if self.differences:
            title = f"Beside {_title(self.runs[0])}, in points"
            rows = _difference_rows(self.differences)
            yield from _terminal(title, _BESIDE, rows, width, fixed=3)

    def markdown(self) -> str:
        """Write the tables in Markdown."""
        parts = [_markdown(*_table(self.runs, self.keys, self.seed))]
        if self.differences:
            rows = _difference_rows(self.differences)
            title = f"Beside {_title(self.runs[0])}, in points:\n"
            parts += [title, _markdown(_BESIDE, rows)]
        return "\n".join(parts)

    def lines(self) -> str:
        """Write the questions on which a run and the base differ, as JSON lines."""
        lines = (json.dumps(line) for each in self.differences for line in _lines(each))
        return "".join(f"{line}\n" for line in lines)

    def record(self) -> dict[str, Any]:
        """Give all numbers."""
        return _record(self.runs, self.keys, self.differences, self.seed)


def _keys(runs: Sequence[Run]) -> list[Key]:
    """List the columns, those of the papers first."""
    found = dict.fromkeys(key for run in runs for key in run.columns)
    return [key for key in LABELS if key in found] + [key for key in found if key not in LABELS]


def _label(key: Key) -> str:
    return LABELS.get(key) or " ".join(key)


def _head(key: Key, runs: Sequence[Run]) -> str:
    """Name a column, and how much of a published test set it is of, where that is not all."""
    published = TEST_SETS.get(key[0])
    # Runs of one column are of the same questions.
    count = next(len(run.columns[key].scores) for run in runs if key in run.columns)
    if published is None or count == published.questions:
        return _label(key)
    return f"{_label(key)} ({count:,} of {published.questions:,})"


def _title(run: Run) -> str:
    return f"{run.name} ({run.decode})"


def _differences(first: Run, run: Run, seed: int) -> Iterator[Difference]:
    for key, column in run.columns.items():
        base = first.columns.get(key)
        if base is None:
            continue
        names = list(base.scores)
        pairs = [[one.scores[name] for name in names] for one in (base, column)]
        is_binary = base.is_binary and column.is_binary
        counts = mcnemar(*([score == 1 for score in each] for each in pairs)) if is_binary else None
        yield Difference(
            run.name,
            run.decode,
            key,
            paired_difference(*pairs, seed=seed),
            counts,
            tuple(_question(name, base, column) for name in names if _differs(name, base, column)),
        )


def _differs(name: str, base: Column, column: Column) -> bool:
    return base.scores[name] != column.scores[name]


def _question(name: str, base: Column, column: Column) -> dict[str, Any]:
    return {
        "id": name,
        "scores": [base.scores[name], column.scores[name]],
        "sql": [base.answers[name], column.answers[name]],
    }


_DECIDING = ("questions", "databases", "test suite")


def _check_alike(first: Run, run: Run, key: Key) -> None:
    """Refuse results of other questions; tell of another comparator or SQLite.

    Raises:
        UserError: The questions or databases differ.
    """
    base, column = first.columns[key], run.columns[key]
    if base.scores.keys() != column.scores.keys():
        raise UserError(
            f"{_title(first)} and {_title(run)}: results of other questions of {key[0]} "
            f"({len(base.scores)} and {len(column.scores)}); evaluate both on the same"
        )
    for name, value in base.facts.items():
        other = column.facts.get(name)
        if other == value:
            continue
        if name in _DECIDING:
            raise UserError(
                f"{_title(first)} and {_title(run)}: other {name} under the name {key[0]}; "
                "evaluate both on the same"
            )
        _log.warning(
            "%s and %s: %s is %s there and %s here (%s)",
            _title(first), _title(run), name, value, other, _label(key),
        )  # fmt: skip


def _fixed(heads: Cells) -> int:
    return 4 if heads[1] == "base model" else 2


def _table(runs: Sequence[Run], keys: Sequence[Key], seed: int) -> tuple[Cells, list[Cells]]:
    """Give the papers' table: a row a run, a column a test set and measure."""
    has_origin = any(run.base or run.reward for run in runs)
    origin = ("base model", "reward") if has_origin else ()
    heads = ("run", *origin, "decoding", *(_head(key, runs) for key in keys))
    rows = []
    for run in runs:
        said = (run.base or _NONE, run.reward or _NONE) if has_origin else ()
        cells = (_cell(run.columns[key], seed) if key in run.columns else _NONE for key in keys)
        rows.append((run.name, *said, run.decode, *cells))
    return heads, rows


def _cell(column: Column, seed: int) -> str:
    scores = list(column.scores.values())
    low, high = mean_interval(scores, seed=seed)
    mean = sum(scores) / len(scores)
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


_BESIDE: Cells = (
    *("run", "decoding", "", "gain", "p (bootstrap)"),
    *("only first right", "only this right", "p (McNemar)"),
)


def _difference_rows(differences: Sequence[Difference]) -> list[Cells]:
    return [
        (
            *(each.run, each.decode, _label(each.key)),
            *(_gain(each.paired), _p(each.paired.p)),
            *_counts(each.counts),
        )
        for each in differences
    ]


def _gain(paired: Paired) -> str:
    low, high = paired.ci95
    return f"{100 * paired.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _counts(counts: McNemar | None) -> Cells:
    if counts is None:
        return (_NONE, _NONE, _NONE)
    return (str(counts.only_first), str(counts.only_second), _p(counts.p))


def _terminal(
    title: str, heads: Cells, rows: Sequence[Cells], width: int, *, fixed: int
) -> Iterator[RichTable]:
    """Lay a table out; columns that do not fit beside the others come in tables of their own."""
    sizes = [max(len(line[number]) for line in (heads, *rows)) + 3 for number in range(len(heads))]
    rest = list(range(fixed, len(heads)))
    while rest or fixed == len(heads):
        room = width - 1 - sum(sizes[:fixed])
        count = sum(total <= room for total in accumulate(sizes[number] for number in rest))
        chosen = [*range(fixed), *rest[: max(count, 1)]]
        rest = rest[max(count, 1) :]
        table = RichTable(title=title)
        for number in chosen:
            justify = "left" if number < 2 else "right"
            table.add_column(heads[number], justify=justify, overflow="fold")
        for row in rows:
            table.add_row(*(row[number] for number in chosen))
        yield table
        if not rest:
            return


def _markdown(heads: Cells, rows: Sequence[Cells]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(map(_escaped, line))} |\n" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _lines(difference: Difference) -> Iterator[dict[str, Any]]:
    data, measure = difference.key
    head = {"run": difference.run, "decode": difference.decode, "data": data, "measure": measure}
    return ({**head, **question} for question in difference.questions)


def _record(
    runs: Sequence[Run], keys: Sequence[Key], differences: Sequence[Difference], seed: int
) -> dict[str, Any]:
    def numbers(column: Column) -> dict[str, Any]:
        scores = list(column.scores.values())
        low, high = mean_interval(scores, seed=seed)
        return {"mean": sum(scores) / len(scores), "ci95": [low, high], "questions": len(scores)}

    return {
        "runs": [
            {
                "name": run.name,
                "base": run.base,
                "reward": run.reward,
                "decode": run.decode,
                "columns": {
                    "/".join(key): numbers(run.columns[key]) for key in keys if key in run.columns
                },
            }
            for run in runs
        ],
        "differences": [
            {
                "run": each.run,
                "decode": each.decode,
                "column": "/".join(each.key),
                "difference": each.paired.difference,
                "ci95": list(each.paired.ci95),
                "p": each.paired.p,
                "mcnemar": asdict(each.counts) if each.counts else None,
                "questions": [question["id"] for question in each.questions],
            }
            for each in differences
        ],
    }
