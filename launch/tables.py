"""Tables for a terminal: rows in as many parts as its width takes, and results of queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from launch import cli
from sqlenv.types import Result, Table, describe_failure

SHOWN_ROWS = 20
Cells = Sequence[str]


def clean(text: str) -> str:
    """Replace what a terminal would obey, such as escape sequences; line ends stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def result_view(result: Result) -> RenderableType:
    """Show the first rows of a query's result, and how many more there are; or why it has none."""
    if not isinstance(result, Table):
        return Text(clean(describe_failure(result)), style="red")
    shown = RichTable(*(escape(clean(name)) for name in result.columns))
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
            Column(escape(column[0]), overflow="fold", justify="left" if n < naming else "right")
            for n, column in enumerate(shown)
        ]
        table = RichTable(*heads, title=title)
        for number, row in enumerate(zip(*(column[1:] for column in shown), strict=True), 1):
            table.add_row(*map(escape, row), end_section=number in sections)
        cli.output.print(table)


def _width(columns: Sequence[Cells]) -> int:
    return 1 + sum(max(map(len, column)) + 3 for column in columns)


_Interval = tuple[float, float]


class Accuracies(BaseModel):
    """What result.json says of accuracy before and after by one measure."""

    ex_before: float
    ex_before_ci95: _Interval
    ex_after: float
    ex_after_ci95: _Interval
    gain: float
    gain_ci95: _Interval

    def rows(self, name: str) -> list[Cells]:
        """Show accuracy, called so, and below it the gain."""
        before = percent(self.ex_before, self.ex_before_ci95, " %")
        after = percent(self.ex_after, self.ex_after_ci95, " %")
        gain = percent(self.gain, self.gain_ci95)
        return [(f"{name} [95 %]", before, after), ("gain in points [95 %]", "", gain)]


class RunResult(Accuracies):
    """What result.json holds that the terminal shows."""

    questions: int
    rule: str
    official: Mapping[str, Accuracies]
    mean_turns_first: float
    mean_turns: float
    rewards_first: Mapping[str, float]
    rewards: Mapping[str, float]
    refuted_share_first: float | None = None
    refuted_share: float | None = None


def show_run(found: RunResult, folder: Path) -> None:
    """Print what a run learned, where it is, and the command that shows more."""
    turns = (f"{mean:.2f}" for mean in (found.mean_turns_first, found.mean_turns))
    rows: list[Cells] = [("", "before", "after"), *found.rows("execution accuracy")]
    for name, one in found.official.items():
        rows += one.rows(f"by {name}")
    sections = (len(rows) - 1,)
    rows.append(("turns, first and last steps", *turns))
    if found.refuted_share is not None and found.refuted_share_first is not None:
        luck = (f"{100 * one:.1f} %" for one in (found.refuted_share_first, found.refuted_share))
        rows.append(("right by luck", *luck))
    rows += [
        (f"reward: {name}", f"{found.rewards_first[name]:.3f}", f"{value:.3f}")
        for name, value in found.rewards.items()
    ]
    title = f"{found.questions:,} held-out questions, judged by {found.rule}, and training episodes"
    show_table(title, rows, sections=sections)
    cli.output.print(f"Run folder: {folder}", soft_wrap=True)
    command = cli.command("launch.report", folder)
    cli.output.print(f"To look at it: {command}", soft_wrap=True, markup=False)


def percent(share: float, ci95: Sequence[float], unit: str = "", sign: str = "") -> str:
    """Write a share or a difference in percent, with its interval."""
    value, low, high = (f"{100 * one:{sign}.1f}" for one in (share, *ci95))
    return f"{value}{unit} [{low}, {high}]"
