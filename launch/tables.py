"""Tables for a terminal: rows in as many parts as its width takes, and results of queries."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from unicodedata import category

from rich.console import Group, RenderableType
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from launch import cli
from launch.evaluation.results import Report
from sqlenv.types import Result, Table, describe_failure

_log = logging.getLogger(__name__)

SHOWN_ROWS = 20
Cells = Sequence[str]


def clean(text: str) -> str:
    """Replace what a terminal would obey, such as escape sequences; line ends and blanks stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" or category(c) == "Zs" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def result_view(result: Result) -> RenderableType:
    """Show the first rows of a query's result, and how many more there are; or why it has none."""
    if not isinstance(result, Table):
        return Text(clean(describe_failure(result)), style="red")
    shown = RichTable(*(clean(name) for name in result.columns))
    for row in result.rows[:SHOWN_ROWS]:
        shown.add_row(*(Text(clean("NULL" if value is None else str(value))) for value in row))
    more = len(result.rows) - SHOWN_ROWS
    return Group(shown, Text(f"… {more:,} more rows")) if more > 0 else shown


def show_table(
    title: str, lines: Sequence[Cells], *, naming: int = 1, sections: Sequence[int] = ()
) -> None:
    """Print rows, of which the first has the heads, so that they fit the terminal: columns that do
    not come in tables of their own, which all have the first `naming` ones. Sections end after
    these rows.
    """
    columns = list(zip(*lines, strict=True))
    names, rest = columns[:naming], columns[naming:]
    while rest:
        shown = [*names, rest.pop(0)]
        while rest and _width([*shown, rest[0]]) <= cli.output.width:
            shown.append(rest.pop(0))
        heads = [
            Column(column[0], overflow="fold", justify="left" if n < naming else "right")
            for n, column in enumerate(shown)
        ]
        table = RichTable(*heads, title=title)
        for number, row in enumerate(zip(*(column[1:] for column in shown), strict=True), 1):
            table.add_row(*row, end_section=number in sections)
        cli.output.print(table, soft_wrap=False)


def _width(columns: Sequence[Cells]) -> int:
    return 1 + sum(max(map(len, column)) + 3 for column in columns)


_SHOWN_MEASURES = 3


def show_report(report: Report, by: Collection[str] = ()) -> None:
    """Print the numbers of a report, and its parts under these headings."""
    if report.measures:
        _show_measures(report, by)
    if report.mismatch and "tag" in by:
        shares = ", ".join(f"{name} {_percent(rate)}" for name, rate in report.mismatch.items())
        cli.output.print(f"Structural mismatch with the gold query, %: {shares}")
    if report.pass_at:
        shares = ", ".join(f"pass@{k} {_percent(share)}" for k, share in report.pass_at.items())
        cli.output.print(f"{report.first}: {shares}")
    notes, outcomes = report.notes, report.outcomes
    cli.output.print(outcomes.line())
    if advice := notes.get("hint"):
        _log.warning("%s", advice)
    for kind, cost in notes.get("cost", {}).items():
        told = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in cost.items())
        cli.output.print(f"{kind}: {told}")
    if "attempts" in notes:
        cli.output.print(
            f"{notes['attempts']:,} attempts, {notes['executable']:,} with a query that ran; "
            f"{notes['judged']:,} judgements, {notes['left_out']:,} left out"
        )
    if lost := notes.get("refused", 0) or outcomes.failed:
        cli.output.print(f"{lost:,} requests without an answer: the same command asks those again.")
    cli.warn_of(report.failing_golds, "gold queries do not run, and nothing is right there")
    cli.warn_of(report.late, "verdicts met a limit of time and may vary with load")


def _show_measures(report: Report, by: Collection[str]) -> None:
    count = report.measures[report.first]["questions"]
    heads = {"ci95": "95 % interval", "ci95_databases": "over databases"}
    kinds = [key for key in heads if any(key in one for one in report.measures.values())]
    lines = [("", "%", *(heads[key] for key in kinds))]
    for name, one in report.measures.items():
        bounds = (" to ".join(map(_percent, one.get(key, ()))) for key in kinds)
        lines.append((name, _percent(one["mean"]), *bounds))
    title = f"{report.settings.data}, {report.settings.decode}, {count:,} questions"
    show_table(title, lines)
    names = list(report.measures)[:_SHOWN_MEASURES]
    for heading, values in report.parts.items():
        rows = [(heading, "questions", "share", *names)]
        for name, part in values.items():
            shares = (_percent(part[measure]) if measure in part else "-" for measure in names)
            rows.append((name, f"{part['questions']:,}", _percent(part["share"]), *shares))
        if heading in by:
            show_table(f"%, by {heading}", rows)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def percent(share: float, ci95: Sequence[float], unit: str = "", sign: str = "") -> str:
    """Write a share or a difference in percent, with its interval."""
    return f"{100 * share:{sign}.1f}{unit} {interval(ci95, sign)}"


def interval(ci95: Sequence[float] | None, sign: str = "") -> str:
    """Write an interval in percent; nothing where there is none."""
    if ci95 is None:
        return ""
    low, high = (f"{100 * bound:{sign}.1f}" for bound in ci95)
    return f"[{low}, {high}]"
