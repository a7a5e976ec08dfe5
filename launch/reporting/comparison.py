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
from typing import Any

from rich.table import Table as RichTable

from launch.evaluation.statistics import mcnemar, mean_interval, paired_difference
from launch.evaluation.testsets import TEST_SETS
from launch.reporting.runs import Key, Run
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
_DECIDING = ("questions", "databases", "test suite")
_BESIDE = (
    *("run", "decoding", "", "gain", "p (bootstrap)"),
    *("only base right", "only run right", "p (McNemar)"),
)
_NAMING = ("run", "decoding", "")
"""Heads of the columns that say what a row is of."""
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
    """A run beside the first one in one column: what `gain` says, and the questions with different
    scores, each with both scores and both answers.
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
        keys = dict.fromkeys([*(key for key in LABELS if key in found), *found])
        for key in keys:
            first, *others = (run for run in runs if key in run.columns)
            for run in others:
                _check_alike(first, run, key)
        differences = [
            _difference(runs[0], run, key, seed)
            for run in runs[1:]
            for key in run.columns
            if key in runs[0].columns
        ]
        if len(runs) > 1 and not differences:
            raise UserError("the runs have no test set and measure in common; evaluate them on one")
        return cls(tuple(runs), tuple(keys), tuple(differences), seed)

    def tables(self, *, width: int) -> list[RichTable]:
        """Lay the tables out for a terminal of this width; columns that do not fit beside the
        others come in tables of their own.
        """
        return [table for part in self._tables() for table in _fitting(*part, width)]

    def markdown(self) -> str:
        """Write the tables in Markdown."""
        (_, first), *more = self._tables()
        parts = [_markdown(first), *(f"{title}:\n\n{_markdown(lines)}" for title, lines in more)]
        return "\n".join(parts)

    def lines(self) -> str:
        """Write the questions on which a run and the base differ, as JSON lines."""
        names = ("run", "decode", "data", "measure")
        lines = []
        for each in self.differences:
            shared = dict(zip(names, (each.run.name, each.run.decode, *each.key), strict=True))
            lines += [json.dumps({**shared, **question}) + "\n" for question in each.questions]
        return "".join(lines)

    def record(self) -> dict[str, Any]:
        """Give all numbers."""
        return {
            "runs": [
                {
                    **{name: getattr(run, name) for name in ("name", "base", "reward", "decode")},
                    "columns": {
                        "/".join(key): self._summary(run, key)
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

    def _summary(self, run: Run, key: Key) -> dict[str, Any]:
        return summary([*run.columns[key].scores.values()], seed=self.seed)

    def _tables(self) -> list[tuple[str, list[Cells]]]:
        """Give the papers' table (a row a run, a column a test set and measure) and the gains, as a
        title and lines, of which the first has the heads.
        """
        origin = (
            ("base model", "reward") if any(run.base or run.reward for run in self.runs) else ()
        )
        lines: list[Cells] = [("run", *origin, "decoding", *map(self._head, self.keys))]
        for run in self.runs:
            said = (run.base or "-", run.reward or "-") if origin else ()
            cells = (self._cell(run, key) for key in self.keys)
            lines.append((run.name, *said, run.decode, *cells))
        tables = [("%, with 95 % intervals", lines)]
        if self.differences:
            title = f"Beside {self.runs[0].title}, in points"
            tables.append((title, [_BESIDE, *map(_row, self.differences)]))
        return tables

    def _head(self, key: Key) -> str:
        """Name a column, and how much of a published test set it is of, where that is not all."""
        published = TEST_SETS.get(key[0])
        # Runs of one column are of the same questions.
        count = next(len(run.columns[key].scores) for run in self.runs if key in run.columns)
        if published is None or count == published.questions:
            return _label(key)
        return f"{_label(key)} ({count:,} of {published.questions:,})"

    def _cell(self, run: Run, key: Key) -> str:
        if key not in run.columns:
            return "-"
        found = self._summary(run, key)
        return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in (found["mean"], *found["ci95"])))


def _fitting(title: str, lines: Sequence[Cells], width: int) -> Iterator[RichTable]:
    columns = list(zip(*lines, strict=True))
    naming = [column for column in columns if column[0] in _NAMING]
    rest = [column for column in columns if column[0] not in _NAMING]
    while rest:
        shown = [*naming, rest.pop(0)]
        while rest and _width([*shown, rest[0]]) <= width:
            shown.append(rest.pop(0))
        table = RichTable(title=title)
        for column in shown:
            table.add_column(column[0], overflow="fold")
        for row in zip(*(column[1:] for column in shown), strict=True):
            table.add_row(*row)
        yield table


def _width(columns: Sequence[Cells]) -> int:
    return 1 + sum(max(map(len, column)) + 3 for column in columns)


def _row(each: Difference) -> Cells:
    test = each.test
    points = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in (test["gain"], *test["ci95"])))
    tested = ("-",) * 3
    if counts := test["mcnemar"]:
        tested = (str(counts["only_first"]), str(counts["only_second"]), _p(counts["p"]))
    return (each.run.name, each.run.decode, _label(each.key), points, _p(test["p"]), *tested)


def _label(key: Key) -> str:
    return LABELS.get(key) or " ".join(key)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _difference(first: Run, run: Run, key: Key, seed: int) -> Difference:
    base, column = first.columns[key], run.columns[key]
    scores = {name: [base.scores[name], column.scores[name]] for name in base.scores}
    test = gain(*map(list, zip(*scores.values(), strict=True)), seed=seed)
    questions = tuple(
        {"id": name, "scores": pair, "sql": [base.answers[name], column.answers[name]]}
        for name, pair in scores.items()
        if pair[0] != pair[1]
    )
    return Difference(run, key, test, questions)


def _check_alike(first: Run, run: Run, key: Key) -> None:
    """Refuse results of other questions or databases; warn of another comparator or SQLite."""
    base, column = first.columns[key], run.columns[key]
    who = f"{first.title} and {run.title}"
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


def _markdown(lines: Sequence[Cells]) -> str:
    ruled = [lines[0], ("---",) * len(lines[0]), *lines[1:]]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in ruled)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
