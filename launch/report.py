"""Show what runs learned: a page to look at, and a summary here.

    python -m launch.report runs/progress-demo-seed0
    python -m launch.report runs/expo-seed0 runs/expo-seed1 --out seeds.html
    python -m launch.report ours=evals/ours base=evals/base --against base --markdown table.md

A run is a folder of launch.train, whether it is finished or not, or a result of launch.eval: its
folder, or the file that --json named; or a folder with several of them below it. The page is one
file, which needs no network. With --against every run is compared with that one, question by
question, in the columns of the papers' tables: docs/reports.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch import cli, options
from launch.files import check_new, write_text
from launch.reporting.comparison import Comparison
from launch.reporting.page import Payload, is_page, render
from launch.reporting.runs import read_runs
from minirl.exchange import UserError

_BYTES = 1_000_000


def report(
    *runs: Annotated[str, Parameter(help="[NAME=]RUN: runs and results to show")],
    out: Annotated[Path, Parameter(help="the page (default: report.html)")] = Path("report.html"),
    against: Annotated[
        str | None,
        Parameter(help="one of the runs, by NAME or path, or another [NAME=]RUN to compare with"),
    ] = None,
    markdown: Annotated[
        Path | None, Parameter(help="write the tables of the comparison here too")
    ] = None,
    json: options.JsonOption = None,
) -> None:
    """Show what runs learned."""
    if not runs:
        raise UserError("launch.report: give a run, or a result of launch.eval; see --help")
    if against is None and (markdown or json):
        raise UserError("--markdown and --json need a base: --against RUN")
    if not is_page(out):  # a page may take the place of a page, and nothing that of anything else
        check_new(out, "--out")
    for option, path in {"--markdown": markdown, "--json": json}.items():
        if path and path != options.STDOUT:
            check_new(path, option)
    found = read_runs(_named(runs, against))
    payload, is_quiet = Payload.of(found), json == options.STDOUT
    if against is not None:
        comparison = Comparison.of(found)
        if markdown:
            write_text(markdown, comparison.markdown())
        options.write_result(json, comparison.record())
        if not is_quiet:
            comparison.show()
        payload.against = comparison.differences()
    text = render(payload)
    write_text(out, text)
    size = f"Page: {out} ({len(text) / _BYTES:.1f} MB)"
    for line in () if is_quiet else (*payload.answer, *payload.notes, size):
        cli.output.print(line, soft_wrap=True)


main = options.command(report)


def _named(runs: Sequence[str], against: str | None) -> list[tuple[str, Path]]:
    """Tell names, empty where there are none, from paths; the base comes first."""
    named = list(map(_split_name, runs))
    if against is None:
        return named
    other = _split_name(against)
    base = next((one for one in named if against == one[0] or other[1] == one[1]), other)
    return [base, *(one for one in named if one != base)]


def _split_name(argument: str) -> tuple[str, Path]:
    """Cut at the first `=` that leaves a path; a path may have some of its own."""
    words = argument.split("=")
    cuts = [("=".join(words[:n]), Path("=".join(words[n:]))) for n in range(len(words))]
    return next((cut for cut in cuts if cut[1].exists()), cuts[min(1, len(cuts) - 1)])


if __name__ == "__main__":
    cli.run(main)
