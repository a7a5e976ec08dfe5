"""Runs beside the first of them: a table as in the papers, and paired differences."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launch.evaluation.questions import SUITED
from launch.evaluation.results import Report
from launch.reporting.runs import Run, gain, scores_of
from launch.tables import interval, percent, show_table
from minirl.exchange import UserError
from sqlenv.data.layouts import TEST_SETS

_log = logging.getLogger(__name__)

_DECIDING = ("questions", "databases", "test suite")
_BESIDE = ("gain", "over databases", "p", "won, lost")
Lines = list[Sequence[str]]
"""Rows of a table, of which the first has the heads."""
Comparison = Mapping[str, Any]
"""A comparison as `--json` writes it: `runs` by name and decoding, of which the first is the base,
and `differences`, what sets each of the others apart from it in each column."""
NOTHING: Comparison = {"runs": [], "differences": []}


@dataclass(frozen=True, slots=True)
class _Row:
    """The results of one name and one decoding, by column."""

    name: str
    decode: str
    reports: dict[str, Report] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Name the `base` model or the `reward` that it learned from; empty where unknown."""
        found = (getattr(report.settings.model, name) for report in self.reports.values())
        return next(filter(None, found), "")

    def scores(self, column: str) -> dict[str, float]:
        """Give the scores of a column by question."""
        return scores_of(self.reports[column], column.partition("/")[2])


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs with the first one.

    Raises:
        UserError: They are not of the same questions, or have nothing in common.
    """
    rows = _rows(runs)
    columns = _in_order(column for row in rows for column in row.reports)
    for column in columns:
        first, *others = (row for row in rows if column in row.reports)
        for row in others:
            _check_alike(first, row, column)
    base, *others = rows
    differences = [
        _difference(base, row, column)
        for row in others
        for column in row.reports
        if column in base.reports
    ]
    if others and not differences:
        raise UserError("the runs have no test set and measure in common; evaluate them on one")
    told = [
        {
            "name": row.name,
            "base": row.origin("base"),
            "reward": row.origin("reward"),
            "decode": row.decode,
            "columns": {
                column: row.reports[column].measures[column.partition("/")[2]]
                for column in columns
                if column in row.reports
            },
        }
        for row in rows
    ]
    return {"runs": told, "differences": differences}


def _in_order(columns: Iterable[str]) -> list[str]:
    """Order columns as Progress-SQL's tables 1 and 2 do (`TEST_SETS`); others follow."""
    known = (f"{name}/{each}" for name, one in TEST_SETS.items() for each in one.comparators)
    found = dict.fromkeys(columns)
    return [*dict.fromkeys([*(one for one in known if one in found), *found])]


def _rows(runs: Sequence[Run]) -> list[_Row]:
    rows: dict[tuple[str, str], _Row] = {}
    for run in runs:
        report = run.final()
        said = report.settings
        # A training run's own name for its model is none that it has on the page.
        own = f"{run.name}/after" if run.is_training else said.model.name
        name = (run.row or own, said.decode)
        row = rows.setdefault(name, _Row(*name))
        if any(column.startswith(f"{said.data}/") for column in row.reports):
            raise UserError(
                f"two results are called {row.name} and are of {said.data}; give each by its own "
                "path and name: NAME=PATH"
            )
        row.reports.update((f"{said.data}/{measure}", report) for measure in report.measures)
    return list(rows.values())


def _difference(base: _Row, row: _Row, column: str) -> dict[str, Any]:
    first, second = base.scores(column), row.scores(column)
    test = gain(base.reports[column], row.reports[column], column.partition("/")[2])
    assert test is not None  # `_check_alike` has seen that they are of the same questions
    where = {"run": row.name, "decode": row.decode, "column": column}
    differing = [name for name, score in first.items() if score != second[name]]
    return {**where, **asdict(test), "questions": differing}


def _check_alike(base: _Row, row: _Row, column: str) -> None:
    """Refuse results of other questions or databases; warn of another comparator or SQLite."""
    who = " and ".join(f"{one.name} ({one.decode})" for one in (base, row))
    first, second = _facts(base, column), _facts(row, column)
    for name, value in first.items():
        if value == second[name]:
            continue
        if name in _DECIDING:
            data = column.partition("/")[0]
            raise UserError(f"{who}: other {name} under the name {data}; evaluate both on the same")
        what = f"{name} is {value} there and {second[name]} here"
        _log.warning("%s: %s (%s)", who, what, column)


def _facts(row: _Row, column: str) -> dict[str, Any]:
    """Name what has to be equal for scores to be comparable."""
    said, measure = row.reports[column].settings, column.partition("/")[2]
    return {
        "questions": (said.fingerprint, row.scores(column).keys()),
        "gold queries": said.golds,
        "databases": said.databases,
        "test suite": said.suite if measure in SUITED else None,
        "comparator": said.comparators.get(measure),
        "SQLite": said.versions.get("sqlite"),
        "time limit": said.timeout_s,
    }


def show(found: Comparison) -> None:
    """Print the tables of a comparison."""
    for title, naming, lines in _tables(found):
        show_table(title, lines, naming=naming)


def markdown(found: Comparison) -> str:
    """Write the tables of a comparison in Markdown."""
    (_, _, first), *more = _tables(found)
    return "\n".join([_markdown(first), *(f"{t}:\n\n{_markdown(one)}" for t, _, one in more)])


def _tables(found: Comparison) -> list[tuple[str, int, Lines]]:
    """Give the papers' table (a row a run, a column a test set and measure) and the differences:
    title, number of columns that name a row, and lines.
    """
    rows, columns = found["runs"], _in_order(one for row in found["runs"] for one in row["columns"])
    said = {"base model": "base", "reward": "reward"}
    origins = said if any(row[key] for row in rows for key in said.values()) else {}
    heads = (*origins, "decoding")
    lines: Lines = [("run", *heads, *(_head(rows, column) for column in columns))]
    for row in rows:
        cells = (row["columns"].get(column) for column in columns)
        shown = (percent(one["mean"], one["ci95"]) if one else "-" for one in cells)
        own = (row[key] or "-" for key in origins.values())
        lines.append((row["name"], *own, row["decode"], *shown))
    tables = [("%, with 95 % intervals", 1 + len(heads), lines)]
    if found["differences"]:
        beside = [("run", "decoding", "", *_BESIDE), *map(_beside, found["differences"])]
        tables.append((f"Beside {rows[0]['name']} ({rows[0]['decode']}), in points", 3, beside))
    return tables


def _head(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    """Name a column, and how much of a published test set it is of, where that is not all."""
    published = TEST_SETS.get(column.partition("/")[0])
    # Reports of one column are of the same questions.
    count = next(row["columns"][column]["questions"] for row in rows if column in row["columns"])
    if published is None or count == published.questions:
        return column
    return f"{column} ({count:,} of {published.questions:,})"


def _beside(each: Mapping[str, Any]) -> Sequence[str]:
    points = percent(each["difference"], each["ci95"], sign="+")
    over = interval(each["ci95_databases"], sign="+") or "-"
    lost, won, p = (each[name] for name in ("only_first", "only_second", "p"))
    flips = "-" if lost is None else f"{won:,}, {lost:,}"
    chance = "< 0.001" if p < 0.001 else f"{p:.3f}"
    return (each["run"], each["decode"], each["column"], points, over, chance, flips)


def _markdown(lines: Lines) -> str:
    ruled = [lines[0], ("---",) * len(lines[0]), *lines[1:]]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in ruled)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
