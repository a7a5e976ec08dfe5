"""Runs beside the first of them: a table as in the papers, and paired differences."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launch.evaluation.questions import SUITED
from launch.evaluation.results import Report
from launch.evaluation.statistics import Paired
from launch.reporting.runs import Run, gain, scores_of
from launch.tables import flips, interval, percent, show_table
from minirl.exchange import UserError
from sqlenv.data.layouts import TEST_SETS

_log = logging.getLogger(__name__)

MeasureKey = tuple[str, str]
"""A test set and a measure, such as ("spider-dev", "spider_ts")."""
LABELS: Mapping[MeasureKey, str] = {
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
"""The columns of Progress-SQL's tables 1 and 2, in their order; others follow."""
_DECIDING = ("questions", "databases", "test suite")
_BESIDE = ("gain", "over databases", "p", "won, lost")
Lines = list[Sequence[str]]
"""Rows of a table, of which the first has the heads."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A row of the papers' table: results of one name and one decoding, by column."""

    name: str
    decode: str
    reports: dict[MeasureKey, Report] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name the row in a message."""
        return f"{self.name} ({self.decode})"

    def origin(self, name: str) -> str:
        """Name the `base` model or the `reward` that it learned from; empty where unknown."""
        found = (getattr(report.settings.model, name) for report in self.reports.values())
        return next(filter(None, found), "")

    def scores(self, key: MeasureKey) -> dict[str, float]:
        """Give the scores of a column by question."""
        return scores_of(self.reports[key], key[1])


@dataclass(frozen=True, slots=True)
class Gain:
    """A row beside the first one in one column, and the questions with different scores."""

    row: ComparisonRow
    key: MeasureKey
    test: Paired
    questions: Sequence[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows, of which the first is the base, and what sets the others apart from it."""

    rows: Sequence[ComparisonRow]
    keys: Sequence[MeasureKey]
    gains: Sequence[Gain]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Comparison:
        """Compare runs with the first one.

        Raises:
            UserError: They are not of the same questions, or have nothing in common.
        """
        rows = _rows(runs)
        found = dict.fromkeys(key for row in rows for key in row.reports)
        keys = list(dict.fromkeys([*(key for key in LABELS if key in found), *found]))
        for key in keys:
            first, *others = (row for row in rows if key in row.reports)
            for row in others:
                _check_alike(first, row, key)
        base, *others = rows
        gains = [
            _gain(base, row, key) for row in others for key in row.reports if key in base.reports
        ]
        if others and not gains:
            raise UserError("the runs have no test set and measure in common; evaluate them on one")
        return cls(rows, keys, gains)

    def show(self) -> None:
        """Print the tables."""
        for title, naming, lines in self._tables():
            show_table(title, lines, naming=naming)

    def markdown(self) -> str:
        """Write the tables in Markdown."""
        (_, _, first), *more = self._tables()
        return "\n".join([_markdown(first), *(f"{t}:\n\n{_markdown(one)}" for t, _, one in more)])

    def record(self) -> dict[str, Any]:
        """Give all numbers."""
        return {
            "runs": [
                {
                    "name": row.name,
                    "base": row.origin("base"),
                    "reward": row.origin("reward"),
                    "decode": row.decode,
                    "columns": {
                        "/".join(key): row.reports[key].measures[key[1]]
                        for key in self.keys
                        if key in row.reports
                    },
                }
                for row in self.rows
            ],
            "differences": [
                {
                    "run": each.row.name,
                    "decode": each.row.decode,
                    "column": "/".join(each.key),
                    **asdict(each.test),
                    "questions": each.questions,
                }
                for each in self.gains
            ],
        }

    def differences(self) -> list[dict[str, Any]]:
        """Give the differences from the base, for the page."""
        base = self.rows[0].name
        return [
            {"base": base, "run": f"{each.row.name}, {' '.join(each.key)}", **asdict(each.test)}
            for each in self.gains
        ]

    def _tables(self) -> list[tuple[str, int, Lines]]:
        """Give the papers' table (a row a run, a column a test set and measure) and the gains:
        title, number of columns that name a row, and lines.
        """
        said = {"base model": "base", "reward": "reward"}
        has_origin = any(row.origin(name) for row in self.rows for name in said.values())
        heads = (*(said if has_origin else ()), "decoding")
        lines: Lines = [("run", *heads, *map(self._head, self.keys))]
        for row in self.rows:
            origins = [row.origin(name) or "-" for name in said.values()] if has_origin else []
            cells = (self._cell(row, key) for key in self.keys)
            lines.append((row.name, *origins, row.decode, *cells))
        tables = [("%, with 95 % intervals", 1 + len(heads), lines)]
        if self.gains:
            rows = [("run", "decoding", "", *_BESIDE), *map(_beside, self.gains)]
            tables.append((f"Beside {self.rows[0].title}, in points", 3, rows))
        return tables

    def _head(self, key: MeasureKey) -> str:
        """Name a column, and how much of a published test set it is of, where that is not all."""
        published = TEST_SETS.get(key[0])
        # Reports of one column are of the same questions.
        count = next(len(row.scores(key)) for row in self.rows if key in row.reports)
        if published is None or count == published.questions:
            return _label(key)
        return f"{_label(key)} ({count:,} of {published.questions:,})"

    def _cell(self, row: ComparisonRow, key: MeasureKey) -> str:
        if key not in row.reports:
            return "-"
        found = row.reports[key].measures[key[1]]
        return percent(found["mean"], found["ci95"])


def _rows(runs: Sequence[Run]) -> list[ComparisonRow]:
    rows: dict[tuple[str, str], ComparisonRow] = {}
    for run in runs:
        report = run.final()
        said = report.settings
        name = (run.row or said.model.name, said.decode)
        row = rows.setdefault(name, ComparisonRow(*name))
        if both := [data for data, _ in row.reports if data == said.data]:
            raise UserError(
                f"two results are called {row.name} and are of {both[0]}; give each by its own "
                "path and name: NAME=PATH"
            )
        row.reports.update(((said.data, measure), report) for measure in report.measures)
    return list(rows.values())


def _gain(base: ComparisonRow, row: ComparisonRow, key: MeasureKey) -> Gain:
    first, second = base.scores(key), row.scores(key)
    test = gain(base.reports[key], row.reports[key], key[1])
    assert test is not None  # `_check_alike` has seen that they are of the same questions
    return Gain(row, key, test, [name for name, score in first.items() if score != second[name]])


def _check_alike(base: ComparisonRow, row: ComparisonRow, key: MeasureKey) -> None:
    """Refuse results of other questions or databases; warn of another comparator or SQLite."""
    who, (first, second) = (
        f"{base.title} and {row.title}",
        (_facts(each, key) for each in (base, row)),
    )
    for name, value in first.items():
        if value == second[name]:
            continue
        if name in _DECIDING:
            raise UserError(
                f"{who}: other {name} under the name {key[0]}; evaluate both on the same"
            )
        what = f"{name} is {value} there and {second[name]} here"
        _log.warning("%s: %s (%s)", who, what, _label(key))


def _facts(row: ComparisonRow, key: MeasureKey) -> dict[str, Any]:
    """Name what has to be equal for scores to be comparable."""
    said = row.reports[key].settings
    return {
        "questions": (said.fingerprint, row.scores(key).keys()),
        "gold queries": said.golds,
        "databases": said.databases,
        "test suite": said.suite if key[1] in SUITED else None,
        "comparator": said.comparators.get(key[1]),
        "SQLite": said.versions.get("sqlite"),
        "time limit": said.timeout_s,
    }


def _beside(each: Gain) -> Sequence[str]:
    test = each.test
    points = percent(test.difference, test.ci95, sign="+")
    over = interval(test.ci95_databases, sign="+") or "-"
    return (each.row.name, each.row.decode, _label(each.key), points, over, _p(test.p), flips(test))


def _label(key: MeasureKey) -> str:
    return LABELS.get(key) or " ".join(key)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _markdown(lines: Lines) -> str:
    ruled = [lines[0], ("---",) * len(lines[0]), *lines[1:]]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in ruled)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
