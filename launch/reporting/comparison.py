"""Runs beside the first of them: a table as in the papers, intervals, and paired tests.

Each run is compared with the base: the difference with its 95 % interval, the two-sided p-value of
10,000 paired bootstrap resamples of the questions (EXPO-SQL, paper 001, section 6.7), and McNemar's
counts with the exact p-value.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from rich.table import Table as RichTable

from launch.evaluation.statistics import mcnemar, mean_interval, paired_difference
from launch.evaluation.testsets import TEST_SETS
from launch.reporting.runs import Key, Run, ScoreColumn
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
_DECIDING = ("questions", "databases", "test suite")
_BESIDE = (
    *("run", "decoding", "", "gain", "p (bootstrap)"),
    *("only first right", "only this right", "p (McNemar)"),
)
Cells = tuple[str, ...]


def gain(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """Compare two lists of scores of the same questions, as a record; empty where there are none.

    McNemar's counts need scores that are all 0 or 1.
    """
    if not first:
        return {}
    found = paired_difference(first, second, seed=seed)
    is_binary = {*first, *second} <= {0.0, 1.0}
    counts = mcnemar(*([score == 1 for score in each] for each in (first, second)))
    tested = {"mcnemar": asdict(counts) if is_binary else None}
    return {"gain": found.difference, "ci95": list(found.ci95), "p": found.p, **tested}


def summary(scores: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """Give a mean with its interval, as a record."""
    interval = list(mean_interval(scores, seed=seed))
    return {"mean": sum(scores) / len(scores), "ci95": interval, "questions": len(scores)}


@dataclass(frozen=True, slots=True)
class Difference:
    """A run beside the first one, in one column.

    Attributes:
        test: What `gain` says.
        questions: Those with different scores: both scores and both answers.
    """

    run: Run
    key: Key
    test: Mapping[str, Any]
    questions: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs, of which the first is the base, and what sets the others apart from it."""

    runs: tuple[Run, ...]
    keys: tuple[Key, ...]
    differences: tuple[Difference, ...]
    seed: int

    @classmethod
    def of(cls, runs: Sequence[Run], *, seed: int = 0) -> Comparison:
        """Compare runs with the first one; the seed is that of the resamples.

        Raises:
            UserError: They are not of the same questions, or have nothing in common.
        """
        found = dict.fromkeys(key for run in runs for key in run.columns)
        keys = [
            *(key for key in LABELS if key in found),
            *(key for key in found if key not in LABELS),
        ]
        for key in keys:
            first, *others = (run for run in runs if key in run.columns)
            for run in others:
                _check_alike(first, run, key)
        base = runs[0].columns
        differences = [
            Difference(run, key, *_difference(base[key], column, seed))
            for run in runs[1:]
            for key, column in run.columns.items()
            if key in base
        ]
        if len(runs) > 1 and not differences:
            raise UserError("the runs have no test set and measure in common; evaluate them on one")
        return cls(tuple(runs), tuple(keys), tuple(differences), seed)

    def tables(self, width: int) -> Iterator[RichTable]:
        """Lay the tables out for a terminal of this width."""
        heads, rows = self._table()
        fixed = 4 if heads[1] == "base model" else 2
        yield from _terminal("%, with 95 % intervals", heads, rows, width, fixed=fixed)
        if self.differences:
            yield from _terminal(self._title(), _BESIDE, self._rows(), width, fixed=3)

    def markdown(self) -> str:
        """Write the tables in Markdown."""
        parts = [_markdown(*self._table())]
        if self.differences:
            parts += [f"{self._title()}:\n", _markdown(_BESIDE, self._rows())]
        return "\n".join(parts)

    def lines(self) -> str:
        """Write the questions on which a run and the base differ, as JSON lines."""
        lines = []
        for each in self.differences:
            data, measure = each.key
            run = {
                "run": each.run.name,
                "decode": each.run.decode,
                "data": data,
                "measure": measure,
            }
            lines += [json.dumps({**run, **question}) + "\n" for question in each.questions]
        return "".join(lines)

    def record(self) -> dict[str, Any]:
        """Give all numbers."""
        return {
            "runs": [
                {
                    **{name: getattr(run, name) for name in ("name", "base", "reward", "decode")},
                    "columns": {
                        "/".join(key): summary([*run.columns[key].scores.values()], seed=self.seed)
                        for key in self.keys
                        if key in run.columns
                    },
                }
                for run in self.runs
            ],
            "differences": [
                {
                    "run": each.run.name,
                    "decode": each.run.decode,
                    "column": "/".join(each.key),
                    "difference": each.test["gain"],
                    **{name: each.test[name] for name in ("ci95", "p", "mcnemar")},
                    "questions": [question["id"] for question in each.questions],
                }
                for each in self.differences
            ],
        }

    def _title(self) -> str:
        return f"Beside {_title(self.runs[0])}, in points"

    def _table(self) -> tuple[Cells, list[Cells]]:
        """Give the papers' table: a row a run, a column a test set and measure."""
        has_origin = any(run.base or run.reward for run in self.runs)
        origin = ("base model", "reward") if has_origin else ()
        heads = ("run", *origin, "decoding", *map(self._head, self.keys))
        rows = []
        for run in self.runs:
            said = (run.base or _NONE, run.reward or _NONE) if has_origin else ()
            cells = (self._cell(run.columns.get(key)) for key in self.keys)
            rows.append((run.name, *said, run.decode, *cells))
        return heads, rows

    def _head(self, key: Key) -> str:
        """Name a column, and how much of a published test set it is of, where that is not all."""
        published = TEST_SETS.get(key[0])
        # Runs of one column are of the same questions.
        count = next(len(run.columns[key].scores) for run in self.runs if key in run.columns)
        if published is None or count == published.questions:
            return _label(key)
        return f"{_label(key)} ({count:,} of {published.questions:,})"

    def _cell(self, column: ScoreColumn | None) -> str:
        if column is None:
            return _NONE
        found = summary([*column.scores.values()], seed=self.seed)
        low, high = found["ci95"]
        return f"{100 * found['mean']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    def _rows(self) -> list[Cells]:
        rows = []
        for each in self.differences:
            test, (low, high) = each.test, each.test["ci95"]
            points = f"{100 * test['gain']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
            counts = test["mcnemar"]
            tested = (_NONE,) * 3
            if counts:
                tested = (str(counts["only_first"]), str(counts["only_second"]), _p(counts["p"]))
            head = (each.run.name, each.run.decode, _label(each.key))
            rows.append((*head, points, _p(test["p"]), *tested))
        return rows


def _label(key: Key) -> str:
    return LABELS.get(key) or " ".join(key)


def _title(run: Run) -> str:
    return f"{run.name} ({run.decode})"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _difference(
    base: ScoreColumn, column: ScoreColumn, seed: int
) -> tuple[Mapping[str, Any], tuple]:
    pairs = [[one.scores[name] for name in base.scores] for one in (base, column)]
    return gain(*pairs, seed=seed), tuple(
        {
            "id": name,
            "scores": [base.scores[name], column.scores[name]],
            "sql": [base.answers[name], column.answers[name]],
        }
        for name in base.scores
        if base.scores[name] != column.scores[name]
    )


def _check_alike(first: Run, run: Run, key: Key) -> None:
    """Refuse results of other questions; warn of another comparator or SQLite.

    Raises:
        UserError: The questions or databases differ.
    """
    base, column = first.columns[key], run.columns[key]
    who = f"{_title(first)} and {_title(run)}"
    if base.scores.keys() != column.scores.keys():
        raise UserError(
            f"{who}: results of other questions of {key[0]} "
            f"({len(base.scores)} and {len(column.scores)}); evaluate both on the same"
        )
    for name, value in base.facts.items():
        other = column.facts.get(name)
        if other != value and name in _DECIDING:
            raise UserError(
                f"{who}: other {name} under the name {key[0]}; evaluate both on the same"
            )
        if other != value:
            _log.warning(
                "%s: %s is %s there and %s here (%s)", who, name, value, other, _label(key)
            )


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
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
