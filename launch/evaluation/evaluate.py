"""Judge what a source gives, by one path whatever the source, and write all files of the result."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exchange import UserError
from launch import cli
from launch.evaluation.cache import Progress
from launch.evaluation.decoding import Decode
from launch.evaluation.digests import digest, of_prompts, short, versions
from launch.evaluation.judging import judge
from launch.evaluation.questions import QuestionSet
from launch.evaluation.results import (
    VERDICTS,
    ModelFacts,
    Report,
    ReportSettings,
    find_report,
    read_report,
    summarise,
    write_report,
    write_result,
)
from launch.evaluation.sources import Answers
from minirl.run.files import PART
from sqlenv.data.loading import fingerprint
from sqlenv.evaluators.comparators import COMPARATORS
from sqlenv.executor import Executor
from sqlenv.types import Observation

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_log = logging.getLogger(__name__)

_NAMED = 3
_SHOWN_MEASURES = 3


def judge_answers(
    questions: QuestionSet,
    answers: Answers,
    decode: Decode,
    executor: Executor,
    *,
    model: ModelFacts,
    seed: int,
    prompts: Sequence[Observation] = (),
    shown: Sequence[Observation] = (),
    folder: Path | None,
    path: Path | None = None,
) -> Report:
    """Judge answers, or what is left of them, and write the result into a folder or one file.

    With both, the file has all, and a folder that has other verdicts on these answers is left
    alone. Prompts are as the model was shown them; a file of predictions has none, and `shown` is
    what the page has in their place.

    Raises:
        UserError: The result is of other settings, or the folder has other answers.
    """
    predictions = [one.queries for one in answers.samples]
    suite = questions.suite_files
    settings = ReportSettings(
        data=questions.name,
        questions=len(questions.examples),
        fingerprint=fingerprint(questions.examples),
        databases=digest(questions.databases),
        suite=digest(suite) if suite else None,
        model=model,
        seed=seed,
        prompt=of_prompts(prompts) if prompts else None,
        decode=decode.name,
        vote_by=decode.vote_by if decode.temperature else None,
        corrections=questions.corrected.pin if questions.corrected else None,
        predictions=short(json.dumps(predictions).encode()),
        comparators={name: _origin(name) for name in questions.measures},
        timeout_s=executor.config.timeout_s,
        versions=versions("minirl-sql"),
    )
    # Another report on answers that are there leaves their own files alone.
    is_kept = folder is not None and path is not None and _holds(folder, settings.predictions)
    result = path or (folder or Path()) / VERDICTS
    report = find_report(result, settings)
    if report is not None and (path is None or folder is None or is_kept):
        cli.output.print(f"This evaluation is complete: {result}", soft_wrap=True)
        return report
    with Progress(result.with_name(result.name + PART), settings.deciding()) as progress:
        verdicts, right = judge(questions, answers.samples, decode, executor, progress)
        if prompts:
            digests = (of_prompts([prompt]) for prompt in prompts)
            verdicts = [
                replace(one, prompt=digest) for one, digest in zip(verdicts, digests, strict=True)
            ]
        report = summarise(settings, verdicts, seed=seed, notes=answers.notes)
        if folder and not is_kept:
            from launch.evaluation.trajectories import write_trajectories

            columns = (questions.examples, answers.samples, verdicts, right)
            rows = list(zip(*columns, strict=True))
            write_trajectories(folder, rows, prompts=prompts or shown, limits=executor.config)
            write_result(folder, report)
        if path is not None:
            write_report(path, report)
    return report


def _origin(name: str) -> str:
    comparator = COMPARATORS.get(name)
    if comparator is None or not comparator.source:
        return f"minirl-sql {versions('minirl-sql')['minirl-sql']}"
    return f"{comparator.source} @ {comparator.version}"


def _holds(folder: Path, predictions: str) -> bool:
    """Tell whether a folder has a result of these answers; one of others is refused."""
    if not (folder / VERDICTS).exists():
        return False
    if read_report(folder).settings.predictions != predictions:
        raise UserError(f"--out {folder}: holds other answers; name another folder")
    return True


def show(report: Report, path: Path | None, by: Collection[str] = ()) -> None:
    """Print the numbers of a report, and its parts under these headings."""
    if report.measures:
        cli.output.print(*_tables(report, by), sep="\n")
    if report.mismatch:
        shares = ", ".join(f"{name} {_percent(rate)}" for name, rate in report.mismatch.items())
        cli.output.print(f"Structural mismatch with the gold query, %: {shares}", soft_wrap=True)
    if report.pass_at:
        shares = ", ".join(f"pass@{k} {_percent(share)}" for k, share in report.pass_at.items())
        cli.output.print(f"{report.first}: {shares}", soft_wrap=True)
    if report.corrected:
        cli.output.print(_corrected_line(report), soft_wrap=True)
    notes, outcomes = report.notes, report.outcomes
    cli.output.print(outcomes.line(), soft_wrap=True)
    if advice := notes.get("hint"):
        _log.warning("%s", advice)
    for kind, cost in notes.get("cost", {}).items():
        told = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in cost.items())
        cli.output.print(f"{kind}: {told}", soft_wrap=True)
    if "attempts" in notes:
        cli.output.print(
            f"{notes['attempts']:,} attempts, {notes['executable']:,} with a query that ran; "
            f"{notes['judged']:,} judgements, {notes['left_out']:,} left out",
            soft_wrap=True,
        )
    if lost := notes.get("refused", 0) or outcomes.refused + outcomes.failed:
        cli.output.print(
            f"{lost:,} requests without an answer; delete {path} to ask those again.",
            soft_wrap=True,
        )
    _warn("gold queries do not run, and nothing is right there", report.failing_golds)
    _warn("verdicts were decided by the time limit and may vary with load", report.late)


def _corrected_line(report: Report) -> str:
    """Say what corrected gold queries change."""
    found = report.corrected
    low, high = (f"{100 * bound:+.1f}" for bound in found["ci95"])
    flips = "; ".join(
        f"{len(found[kind])} {word}: {', '.join(found[kind])}"
        for kind, word in (("gained", "right by the corrected gold query alone"),
                           ("lost", "right by the published one alone"))
        if found[kind]
    )  # fmt: skip
    anew = len(found["asked_anew"])
    told = f"; {anew} not judged, since the correction asks for something else" if anew else ""
    difference = f"{100 * found['difference']:+.1f} points [{low}, {high}]"
    return (
        f"Corrected golds ({report.settings.corrections}): {difference} on "
        f"{found['questions']:,} questions{told}. {flips or 'No verdict differs'}"
    )


def _tables(report: Report, by: Collection[str]) -> list[RichTable]:
    from rich.table import Table as RichTable

    count = report.measures[report.first]["questions"]
    title = f"{report.settings.data}, {report.settings.decode}, {count:,} questions"
    whole = RichTable(title, "%", "95 % interval")
    for name, one in report.measures.items():
        low, high = map(_percent, one["ci95"])
        whole.add_row(name, _percent(one["mean"]), f"{low} to {high}")
    names = list(report.measures)[:_SHOWN_MEASURES]
    parts = RichTable("%", "questions", "share", *names)
    for heading, values in report.parts.items():
        if heading not in by:
            continue
        parts.add_section()
        for name, part in values.items():
            shares = (_percent(part[measure]) if measure in part else "-" for measure in names)
            cells = f"{part['questions']:,}", _percent(part["share"])
            parts.add_row(f"{heading}: {name}", *cells, *shares)
    # Names of tags are long; cut they would look alike.
    parts.columns[0].overflow = "fold"
    for column in (*whole.columns[1:], *parts.columns[1:]):
        column.justify = "right"
    return [whole, parts] if parts.rows else [whole]


def _warn(what: str, ids: Sequence[str]) -> None:
    if ids:
        more = ", …" if len(ids) > _NAMED else ""
        _log.warning("%d %s: %s%s", len(ids), what, ", ".join(ids[:_NAMED]), more)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"
