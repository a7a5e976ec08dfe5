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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch import cli, options
from launch.files import check_new, write_text
from launch.reporting.comparison import Comparison
from launch.reporting.page import Payload, is_page, render
from launch.reporting.runs import Run, read_runs, shown_names
from minirl.exchange import UserError

_BYTES = 1_000_000


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What is written where."""

    out: Annotated[Path, Parameter(help="the page (default: report.html)")] = Path("report.html")
    against: Annotated[
        str | None, Parameter(help="one of the runs, or another one ([NAME=]RUN), to compare with")
    ] = None
    markdown: Annotated[
        Path | None, Parameter(help="write the tables of the comparison here too")
    ] = None
    json: options.JsonOption = None


def report(
    *runs: Annotated[str, Parameter(help="[NAME=]RUN: runs and results to show")],
    given: ReportOptions = ReportOptions(),
) -> None:
    """Show what runs learned."""
    if not runs:
        raise UserError("launch.report: give a run, or a result of launch.eval; see --help")
    if given.against is None and (given.markdown or given.json):
        raise UserError("--markdown and --json need a base: --against RUN")
    _check_outputs(given)
    found, comparison = _read(runs, given.against)
    if comparison is not None:
        _compare(comparison, given)
    payload = _payload(found, comparison)
    text = render(payload)
    write_text(given.out, text)
    size = f"Page: {given.out} ({len(text) / _BYTES:.1f} MB)"
    lines = [*payload.answer, *payload.notes, size]
    for line in lines if given.json != options.STDOUT else ():
        _tell(line)


main = options.Command(report)


def _compare(comparison: Comparison, given: ReportOptions) -> None:
    """Print a comparison, and write it where it is asked."""
    if given.markdown:
        write_text(given.markdown, comparison.markdown())
    options.write_result(given.json, comparison.record())
    if given.json != options.STDOUT:
        comparison.show()


def _read(runs: Sequence[str], against: str | None) -> tuple[list[Run], Comparison | None]:
    """Read runs and results, and compare them with the base, which comes first."""
    found = read_runs(_named(runs, against))
    return found, None if against is None else Comparison.of(found)


def _payload(runs: Sequence[Run], comparison: Comparison | None) -> Payload:
    """Take what the page shows out of runs, and out of a comparison."""
    payload = Payload.of(runs)
    if comparison is not None:
        base = comparison.rows[0].name
        payload.against = [
            {"base": base, "run": f"{each.row.name}, {' '.join(each.key)}", **asdict(each.test)}
            for each in comparison.gains
        ]
    return payload


def _tell(line: str) -> None:
    cli.output.print(line, soft_wrap=True)


def _named(runs: Sequence[str], against: str | None) -> list[tuple[str, Path]]:
    """Tell names, empty where there are none, from paths; the base comes first."""
    named = list(map(_split_name, runs))
    if against is None:
        return named
    other = _split_name(against)
    names = shown_names(named)
    ours = (
        one
        for name, one in zip(names, named, strict=True)
        if against in (name, one[0]) or other[1] == one[1]
    )
    base = next(ours, other)
    return [base, *(one for one in named if one != base)]


def _split_name(argument: str) -> tuple[str, Path]:
    """Cut at the first `=` that leaves a path; a path may have some of its own."""
    words = argument.split("=")
    cuts = [("=".join(words[:n]), Path("=".join(words[n:]))) for n in range(len(words))]
    return next((cut for cut in cuts if cut[1].exists()), cuts[min(1, len(cuts) - 1)])


def _check_outputs(given: ReportOptions) -> None:
    """A page may take the place of a page, and nothing that of anything else."""
    if not is_page(given.out):
        check_new(given.out, "--out")
    for option in ("markdown", "json"):
        path = getattr(given, option)
        if path and path != options.STDOUT:
            check_new(path, f"--{option}")


if __name__ == "__main__":
    cli.run(main)
