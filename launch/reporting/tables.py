"""Tables for a terminal, in as many parts as its width takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from sqlenv.envs.diagnosed import describe_failure
from sqlenv.types import Result, Table

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


def fitting(
    title: str, columns: Sequence[Cells], *, naming: int, width: int, sections: Sequence[int] = ()
) -> Iterator[RichTable]:
    """Lay columns out, each with its head first; those that do not fit beside the others come in
    tables of their own, which all have the first `naming` columns. Sections end after these rows.
    """
    names, rest = columns[:naming], list(columns[naming:])
    while rest:
        shown = [*names, rest.pop(0)]
        while rest and _width([*shown, rest[0]]) <= width:
            shown.append(rest.pop(0))
        heads = [
            Column(escape(column[0]), overflow="fold", justify="left" if n < naming else "right")
            for n, column in enumerate(shown)
        ]
        table = RichTable(*heads, title=title)
        for number, row in enumerate(zip(*(column[1:] for column in shown), strict=True), 1):
            table.add_row(*map(escape, row), end_section=number in sections)
        yield table


def _width(columns: Sequence[Cells]) -> int:
    return 1 + sum(max(map(len, column)) + 3 for column in columns)
