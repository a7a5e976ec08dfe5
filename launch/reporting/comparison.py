"""Runs beside the first of them: a table as in the papers, and paired differences."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
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


_Name = tuple[str, str]
"""What a run is called, and its decoding: of a row of the table."""
_Row = dict[str, Report]
"""The results of one name by column: test set and measure, such as `spider-dev/spider_ex`."""


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs with the first one.

    Raises:
        UserError: They are not of the same questions, or have nothing in common.
    """
    rows = _rows(runs)
    (base, known), *others = rows.items()
    differences = [
        _difference(column, (base, known[column]), (name, report))
        for name, row in others
        for column, report in row.items()
        if column in known
    ]
    if others and not differences:
        raise UserError("the runs have no test set and measure in common; evaluate them on one")
    told = [
        {
            "name": name,
            "base": _origin(row, "base"),
            "reward": _origin(row, "reward"),
            "decode": decode,
            "columns": {one: row[one].measures[one.partition("/")[2]] for one in _in_order(row)},
        }
        for (name, decode), row in rows.items()
    ]
    return {"runs": told, "differences": differences}


def _origin(row: _Row, name: str) -> str:
    """Name the `base` model or the `reward` that it learned from; empty where unknown."""
    found = (getattr(report.settings.model, name) for report in row.values())
    return next(filter(None, found), "")


def _in_order(columns: Iterable[str]) -> list[str]:
    """Order columns as Progress-SQL's tables 1 and 2 do (`TEST_SETS`); others follow."""
    known = (f"{name}/{each}" for name, one in TEST_SETS.items() for each in one.comparators)
    found = dict.fromkeys(columns)
    return [*dict.fromkeys([*(one for one in known if one in found), *found])]


def _rows(runs: Sequence[Run]) -> dict[_Name, _Row]:
    rows: dict[_Name, _Row] = {}
    for run in runs:
        report = run.final()
        said = report.settings
        # A training run's own name for its model is none that it has on the page.
        own = f"{run.name}/after" if run.is_training else said.model.name
        name = run.row or own
        row = rows.setdefault((name, said.decode), {})
        columns = {f"{said.data}/{measure}": report for measure in report.measures}
        if row.keys() & columns:
            raise UserError(
                f"two results are called {name} and are of {said.data}; give each by its own path "
                "and name: NAME=PATH"
            )
        row |= columns
    return rows


def _difference(
    column: str, base: tuple[_Name, Report], other: tuple[_Name, Report]
) -> dict[str, Any]:
    """Compare two results; refuse those of other questions or databases, and warn of another
    comparator or SQLite.
    """
    (first_name, first), (name, second) = base, other
    who = " and ".join(f"{run} ({decode})" for run, decode in (first_name, name))
    data, _, measure = column.partition("/")
    facts = _facts(second, measure)
    for what, value in _facts(first, measure).items():
        if value == facts[what]:
            continue
        if what in _DECIDING:
            raise UserError(f"{who}: other {what} under the name {data}; evaluate both on the same")
        told = f"{what} is {value} there and {facts[what]} here"
        _log.warning("%s: %s (%s)", who, told, column)
    test = gain(first, second, measure)
    assert test is not None  # they are of the same questions
    before, after = scores_of(first, measure), scores_of(second, measure)
    differing = [asked[0] for asked, score in before.items() if score != after[asked]]
    where = {"run": name[0], "decode": name[1], "column": column}
    return {**where, **asdict(test), "questions": differing}


def _facts(report: Report, measure: str) -> dict[str, Any]:
    """Name what has to be equal for scores to be comparable."""
    said = report.settings
    return {
        "questions": (said.fingerprint, scores_of(report, measure).keys()),
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
