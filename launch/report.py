"""Show what runs learned: a page to look at, and a summary here.

    python -m launch.report runs/progress-demo-seed0
    python -m launch.report runs/expo-seed0 runs/expo-seed1 --out seeds.html
    python -m launch.report ours=evals/ours base=evals/base --against base --markdown table.md

A run is a folder of launch.train, whether it is finished or not, or a result of launch.eval: its
folder, or the file that --json named; or a folder with several of them below it. The page is one
file, which needs no network. --against compares every run with one of them, question by question,
with a column for each test set and measure (docs/reports.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch import cli, options
from launch.files import check_new, write_text
from launch.reporting import comparison
from launch.reporting.page import Page, is_page, render
from launch.reporting.runs import read_runs
from minirl.exchange import UserError

_BYTES = 1_000_000


@options.command
def main(
    *runs: str,
    out: Path = Path("report.html"),
    against: str | None = None,
    markdown: Path | None = None,
    json: options.JsonOption = None,
) -> None:
    """Show what runs learned.

    Args:
        runs: [NAME=]RUN: runs and results to show
        out: the page (default: report.html)
        against: one of the runs, by NAME or path, or another [NAME=]RUN to compare with
        markdown: write the tables of the comparison here too
        json: the comparison as JSON, into this file or on standard output (-)
    """
    if not runs:
        raise UserError("launch.report: give a run, or a result of launch.eval; see --help")
    if against is None and (markdown or json):
        raise UserError("--markdown and --json need a base: --against RUN")
    if not is_page(out):  # a page may take the place of a page, and nothing that of anything else
        check_new(out, "--out")
    if markdown:
        check_new(markdown, "--markdown")
    options.check_result(json)
    found, compared = read_runs(_named(runs, against)), comparison.NOTHING
    is_quiet = json == options.STDOUT
    if against is not None:
        compared = comparison.compare(found)
        if markdown:
            write_text(markdown, comparison.markdown(compared))
        options.write_result(json, compared)
        if not is_quiet:
            comparison.show(compared)
    page = Page(found, compared)
    text = render(page)
    write_text(out, text)
    size = f"Page: {out} ({len(text) / _BYTES:.1f} MB)"
    for line in () if is_quiet else (*page.answer, *page.notes, size):
        cli.output.print(line)


def _named(runs: Sequence[str], against: str | None) -> list[tuple[str, Path]]:
    """Tell names, empty where there are none, from paths; the base comes first."""
    named = list(map(_split_name, runs))
    if against is None:
        return named
    other = _split_name(against)
    base = next((one for one in named if against == one[0] or other[1] == one[1]), other)
    return [base, *(one for one in named if one != base)]


def _split_name(argument: str) -> tuple[str, Path]:
    """Cut at the first `=`, unless the whole is a path."""
    name, sign, path = argument.partition("=")
    return (name, Path(path)) if sign and not Path(argument).exists() else ("", Path(argument))


if __name__ == "__main__":
    cli.run(main)
