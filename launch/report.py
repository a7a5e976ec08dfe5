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

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exchange import UserError
from launch import cli
from launch.reporting.comparison import Comparison
from launch.reporting.page import is_page, render
from launch.reporting.payload import Payload
from launch.reporting.runs import read_runs, shown_names
from launch.texts import check_new, write_json, write_text

_BYTES = 1_000_000


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    options = _arguments(arguments)
    _check_outputs(options)
    runs = read_runs(_named(options))
    payload = Payload.of(runs)
    if options.against is not None:
        comparison = Comparison.of(runs)
        cli.output.print(*comparison.tables(width=cli.output.width), sep="\n")
        base = comparison.rows[0].name
        payload.against = [
            {"base": base, "run": f"{each.row.name}, {' '.join(each.key)}", **each.test}
            for each in comparison.differences
        ]
        for path, write in (
            (options.markdown, comparison.markdown),
            (options.differences, comparison.lines),
        ):
            if path:
                write_text(path, write())
        if options.json:
            write_json(options.json, comparison.record())
    text = render(payload)
    write_text(options.out, text)
    size = f"Page: {options.out} ({len(text) / _BYTES:.1f} MB)"
    for line in (*map(_summary, payload.runs), *payload.notes, size):
        cli.output.print(line, soft_wrap=True, markup=False)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser("launch.report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="runs and results to show")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the page (default: report.html)"
    )
    parser.add_argument(
        "--against", metavar="[NAME=]RUN", help="one of them, or another one, to compare with"
    )
    for name, what in (
        ("markdown", "write the tables of the comparison here too"),
        ("differences", "write the questions on which a run and the base differ, as JSON lines"),
        ("json", "write all numbers of the comparison here"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)
    options = parser.parse_args(arguments)
    if options.against is None and (options.markdown or options.differences or options.json):
        parser.error("--markdown, --differences and --json need a base: --against RUN")
    return options


def _named(options: argparse.Namespace) -> list[tuple[str, Path]]:
    """Tell names, empty where there are none, from paths; the base comes first."""
    named = list(map(_split_name, options.runs))
    if options.against is None:
        return named
    other = _split_name(options.against)
    names = shown_names(named)
    ours = (
        one
        for name, one in zip(names, named, strict=True)
        if options.against in (name, one[0]) or other[1] == one[1]
    )
    base = next(ours, other)
    return [base, *(one for one in named if one != base)]


def _split_name(argument: str) -> tuple[str, Path]:
    if Path(argument).exists():
        return "", Path(argument)
    name, _, path = argument.rpartition("=")
    return name, Path(path)


def _check_outputs(options: argparse.Namespace) -> None:
    """A page may take the place of a page, and nothing that of anything else."""
    if not is_page(options.out):
        check_new(options.out, "--out")
    taken = {options.out.resolve()}
    for option in ("markdown", "differences", "json"):
        if path := getattr(options, option):
            check_new(path, f"--{option}")
            if path.resolve() in taken:
                raise UserError(f"--{option} {path}: is written already; name another")
            taken.add(path.resolve())


def _summary(run: Mapping[str, Any]) -> str:
    measured = (f"{where} {_percent(one)}" for where, one in run["measured"].items())
    accuracy = ", ".join(one.removeprefix("answers ") for one in measured)
    parts = [f"execution accuracy {accuracy}" if accuracy else "no accuracy"]
    counts = {one["questions"] for one in run["measured"].values()}
    if counts:
        parts.append(f"{max(counts):,} questions")
    if run["kind"] == "run":
        steps = max(run["numbers"].get("step") or [0])
        so_far = f"not finished, {steps} steps so far"
        parts.append(f"{steps} steps" if run["finished"] else so_far)
    line = f"{run['name']}: {', '.join(parts)}"
    if run["sources"]:
        *_, place = run["measured"]
        found = run["sources"].items()
        each = (f"{name} {_percent(one[place])}" for name, one in found if place in one)
        line += f"\n  {place}, by source: {', '.join(each)}"
    if tests := run["tests"]:
        gain, low, high = (100 * each for each in (tests["difference"], *tests["ci95"]))
        line += f"\n  gain {gain:+.1f} [{low:+.1f}, {high:+.1f}] points"
        if counts := tests.get("mcnemar"):
            line += f"; {counts['only_second']} questions flipped to right, "
            line += f"{counts['only_first']} to wrong (McNemar p = {counts['p']:.2g})"
    return line


def _percent(one: Mapping[str, Any]) -> str:
    low, high = one["ci95"]
    return f"{100 * one['mean']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


if __name__ == "__main__":
    cli.run(main)
