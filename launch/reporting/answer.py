"""What runs say, in sentences: did it learn, how sure is that, what changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launch import cli
from launch.evaluation.results import Paired, Report
from launch.reporting.runs import Run, gains, read_runs
from launch.tables import interval, percent
from minirl.train.advice import LIVE_SHARE, advice


def answer(runs: Sequence[Run]) -> list[str]:
    """Say the most important things about one run, or one of each of several."""
    if len(runs) == 1:
        return list(_of_one(runs[0]))
    return [f"{run.name}: {next(_of_one(run), 'no accuracy')}" for run in runs]


def show_run(folder: Path) -> None:
    """Print what a run learned, where it is, and the command that shows more."""
    (run,) = read_runs([("", folder)])
    command = cli.command_line("launch.report", folder)
    for line in (*answer([run]), f"Run folder: {folder}", f"To look at it: {command}"):
        cli.output.print(line)


def _of_one(run: Run) -> Iterator[str]:
    steps = max(run.metrics.get("step", ()), default=0)
    before, after = run.reports.get("before"), run.reports.get("after")
    if own := run.reports.get("answers"):
        yield _accuracy(own)
    elif before and after and run.is_finished:
        yield from _learned(run.reports)
    elif before:
        yield f"Not finished: {steps:,} steps so far. {_accuracy(before, 'Before learning ')}"
    elif run.is_training:
        yield f"Not finished: {steps:,} steps so far, and no accuracy yet."
    if words := advice(run.metrics.get(LIVE_SHARE, ())):
        yield f"At the end of training, {words}."


def _accuracy(report: Report, start: str = "") -> str:
    if not report.measures:
        return "The questions have no gold queries to be judged by."
    one = report.measures[report.first]
    share = percent(one["mean"], one["ci95"], " %")
    return f"{start}{share} of {one['questions']:,} questions are right by {report.first}."


def _learned(reports: Mapping[str, Report]) -> Iterator[str]:
    """Say what the run gained by the measure that counts and which of its stages did, then what it
    gained by other measures, and how many queries fail.
    """
    found = gains(reports)
    if not found["run"]:
        yield "No question was asked both before and after learning."
        return
    (rule, test), *others = found["run"].items()
    said = "It is not shown to have learned"
    if _is_sure(test.ci95):
        said = "It learned" if test.difference > 0 else "It got worse"
        over = test.ci95_databases
        said += ", on these databases" if over and not _is_sure(over) else ""
    yield (
        f"{said}: {_points(test)}, {_change(test)} of {test.questions:,} questions right by "
        f"{rule}{_chance(test)}."
    )
    stages = {stage: each[rule] for stage, each in found.items() if stage != "run"}
    if stages:
        told = (f"{stage} {_points(one)}{_chance(one)}" for stage, one in stages.items())
        yield f"By stage: {'; '.join(told)}."
    if others:
        told = (f"{name} {_points(one)}, {_change(one)}" for name, one in others)
        yield f"By other measures: {'; '.join(told)}."
    counts = (f"{one.failing:,} {place}" for place, one in reports.items())
    yield f"Queries that fail: {', '.join(counts)}."


def _change(test: Paired) -> str:
    first, second = (f"{100 * mean:.1f}" for mean in test.means)
    return f"from {first} to {second} %"


def _is_sure(ci95: Sequence[float]) -> bool:
    low, high = ci95
    return low > 0 or high < 0


def _points(test: Paired) -> str:
    """Write a difference with its interval over questions and, where there is one, databases."""
    told = percent(test.difference, test.ci95, " points", "+")
    if test.ci95_databases:
        told += f", over databases {interval(test.ci95_databases, '+')}"
    return told.replace("-", "\N{MINUS SIGN}")


def _chance(test: Paired) -> str:
    return f" (p {'< 0.001' if test.p < 0.001 else f'= {test.p:.3f}'})"
