"""Judge what a source gives, by one path whatever the source, and write all files of the result."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from exchange import UserError
from launch import cli
from launch.evaluation.cache import Progress
from launch.evaluation.decoding import Decode
from launch.evaluation.digests import digest, of_prompts, short, versions
from launch.evaluation.judging import judge
from launch.evaluation.outcomes import Outcomes
from launch.evaluation.questions import QuestionSet
from launch.evaluation.results import (
    VERDICTS,
    ModelFacts,
    Report,
    ReportSettings,
    find_report,
    summarise,
    write_report,
)
from launch.evaluation.sources import Answers
from launch.evaluation.verdicts import PREDICTIONS, Verdict, read_verdicts, write_official
from launch.texts import write_text
from minirl.run.files import PART
from sqlenv.config import ExecutorConfig
from sqlenv.data.loading import fingerprint
from sqlenv.evaluators.comparators import COMPARATORS
from sqlenv.executor import Executor
from sqlenv.types import Observation

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from launch.evaluation.trajectories import Row

_log = logging.getLogger(__name__)

CHOICES = "choices.jsonl"
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
    folder: Path | None,
    path: Path | None,
) -> None:
    """Judge answers, or what is left of them, write all files, and print the numbers.

    The report goes to `path`, or into the folder of the results; without a folder there is the
    report alone. Prompts are as the model was shown them; a file of predictions has none.

    Raises:
        UserError: The file is of other settings, or the folder has other answers.
    """
    predictions = [one.queries for one in answers.samples]
    # Another report on answers that are there leaves their own files alone.
    has_files = folder is None or (path is not None and _has_files(folder, predictions))
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
    result = path or (folder or Path()) / VERDICTS
    if (report := find_report(result, settings)) and (has_files or path is None):
        cli.output.print(f"This evaluation is complete: {result}", soft_wrap=True)
    else:
        with Progress(result.with_name(result.name + PART), settings.deciding()) as progress:
            verdicts, right = judge(questions, answers.samples, decode, executor, progress)
            outcomes = Outcomes.total(one.outcomes for one in answers.samples)
            told = {"outcomes": outcomes, "notes": answers.notes}
            report = summarise(settings, verdicts, seed=seed, **told)
            if folder and not has_files:
                columns = (questions.examples, answers.samples, verdicts, right)
                rows = list(zip(*columns, strict=True))
                _write_files(folder, report, rows, prompts, executor.config)
            write_report(result, report)
    show(report, result)
    if folder is not None:
        cli.output.print(f"Answers in the official programs' forms: {folder}", soft_wrap=True)
    cli.output.print(f"Verdicts of all questions: {result}", soft_wrap=True)


def _origin(name: str) -> str:
    comparator = COMPARATORS.get(name)
    if comparator is None or not comparator.source:
        return f"minirl-sql {versions('minirl-sql')['minirl-sql']}"
    return f"{comparator.source} @ {comparator.version}"


def _has_files(folder: Path, predictions: Sequence[Sequence[str]]) -> bool:
    """Tell whether a folder has the files of these answers; those of others are refused."""
    path = folder / PREDICTIONS
    there = [one.samples or (one.sql,) for one in read_verdicts(path)] if path.exists() else []
    if there and there != predictions:
        raise UserError(f"--out {folder}: holds other answers; name another folder")
    return bool(there)


def _write_files(
    folder: Path,
    report: Report,
    rows: Sequence[Row],
    prompts: Sequence[Observation],
    limits: ExecutorConfig,
) -> None:
    from launch.evaluation.trajectories import write_trajectories

    verdicts, choices = [], []
    for example, sampled, one, _ in rows:
        own = {
            "samples": sampled.queries, "turns": sampled.turns, "outcomes": sampled.outcomes
        }  # fmt: skip
        verdicts.append(Verdict.of(example, one.sql, correct=report.is_right(one), **own))
        if sampled.choice is not None:
            choices.append({"id": example.id, "question": example.question, **sampled.choice})
    write_official(verdicts, folder)
    if choices:
        _write_lines(folder / CHOICES, choices)
    write_trajectories(folder, rows, prompts=prompts, limits=limits)
    # Last: where they are, all other files are too.
    _write_lines(folder / PREDICTIONS, [asdict(verdict) for verdict in verdicts])


def _write_lines(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    write_text(path, "".join(f"{json.dumps(record)}\n" for record in records))


def show(report: Report, path: Path) -> None:
    """Print the numbers of a report."""
    if report.measures:
        cli.output.print(*_tables(report), sep="\n")
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


def _tables(report: Report) -> list[RichTable]:
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
        parts.add_section()
        for name, part in values.items():
            shares = (_percent(part[measure]) if measure in part else "-" for measure in names)
            cells = f"{part['questions']:,}", _percent(part["share"])
            parts.add_row(f"{heading}: {name}", *cells, *shares)
    # Names of tags are long; cut they would look alike.
    parts.columns[0].overflow = "fold"
    for column in (*whole.columns[1:], *parts.columns[1:]):
        column.justify = "right"
    return [whole, parts]


def _warn(what: str, ids: Sequence[str]) -> None:
    if ids:
        more = ", …" if len(ids) > _NAMED else ""
        _log.warning("%d %s: %s%s", len(ids), what, ", ".join(ids[:_NAMED]), more)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"
