"""Judge what a source gives, by one path whatever the source, and write all files of the result."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import apsw
from rich.table import Table as RichTable

from launch import cli
from launch.evaluation.cache import Progress
from launch.evaluation.decoding import Decode
from launch.evaluation.digests import digest, of_prompts, short
from launch.evaluation.judging import (
    MEASURES,
    PARTIAL,
    REFERENCED,
    SUITED,
    AllVerdicts,
    JudgingTask,
    judge,
    read_measures,
)
from launch.evaluation.official import write_official
from launch.evaluation.results import (
    VERDICTS,
    ModelFacts,
    Report,
    ReportSettings,
    is_done,
    read_report,
    summarise,
    write_report,
)
from launch.evaluation.sources import CHOICES, Answers
from launch.evaluation.testsets import (
    check_databases,
    check_golds,
    find_references,
    find_suite,
    suite_files,
)
from launch.evaluation.verdicts import PREDICTIONS, Verdict
from launch.texts import write_text
from minirl.run.files import PART
from sqlenv.config import SourceConfig
from sqlenv.data.loading import fingerprint
from sqlenv.errors import UserError
from sqlenv.evaluators.comparators import COMPARATORS
from sqlenv.evaluators.spider2 import Reference
from sqlenv.evaluators.votes import VoteBy
from sqlenv.executor import Executor
from sqlenv.types import Example, Observation

_log = logging.getLogger(__name__)

_NAMED = 3
_SHOWN_MEASURES = 3


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions that are judged, and what they are judged by and on.

    Attributes:
        name: Of the test set, or of the config's split.
        suite: Files of the test suite by database, where it is used.
        references: Gold results by question, where they are used.
    """

    name: str
    examples: tuple[Example, ...]
    measures: tuple[str, ...]
    suite: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    references: Mapping[str, Reference] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """What the command line says of judging.

    Attributes:
        comparators: Names; None for the test set's own.
        test_suite: Its folder; None to look for it.
        vote_by: What makes two samples one vote.
    """

    comparators: str | None = None
    test_suite: Path | None = None
    vote_by: VoteBy = "set"


def prepare(
    name: str,
    examples: tuple[Example, ...],
    source: SourceConfig,
    root: Path,
    rule: Rule,
) -> QuestionSet:
    """Find what the questions of a test set are judged by and on, and check every database.

    Raises:
        UserError: A database cannot be used, or the test suite is not there.
    """
    measures = read_measures(rule.comparators, name)
    _check_measures(examples, measures)
    suite: Mapping[str, tuple[Path, ...]] = {}
    if not SUITED.isdisjoint(measures):
        folder = find_suite(rule.test_suite, source, root)
        if folder is not None:
            suite = suite_files(folder, examples)
        elif rule.comparators is not None:
            raise UserError(
                f"--comparators {rule.comparators}: no test suite at {root}; give its folder "
                "with --test-suite DIR"
            )
        else:
            _log.warning("%s: no test suite here (--test-suite DIR), so EX alone", root)
            measures = tuple(measure for measure in measures if measure not in SUITED)
    references = find_references(root, source) if examples[0].source == "spider2" else {}
    if references and (left := [one.id for one in examples if one.id not in references]):
        raise UserError(
            f"{source.path}: no gold result for {len(left)} questions, the first is {left[0]}; "
            "bring the evaluation suite up to date"
        )
    check_databases([example.database for example in examples], *suite.values())
    return QuestionSet(name, examples, measures, suite, references)


def _check_measures(examples: Sequence[Example], measures: Sequence[str]) -> None:
    """Refuse measures of what the questions do not have.

    Raises:
        UserError: A gold query or gold results are missing.
    """
    is_spider2 = examples[0].source == "spider2"
    for measure in measures:
        if is_spider2 != (measure in REFERENCED) and not (is_spider2 and measure in PARTIAL):
            kind = "gold results" if is_spider2 else "gold queries"
            fitting = sorted(REFERENCED | {*PARTIAL} if is_spider2 else {*MEASURES} - REFERENCED)
            raise UserError(
                f"--comparators {measure}: these questions have {kind} alone; there are "
                f"{', '.join(fitting)}"
            )
    if not is_spider2:
        check_golds(examples)


def judge_answers(
    questions: QuestionSet,
    answers: Answers,
    decode: Decode,
    executor: Executor,
    *,
    model: ModelFacts,
    seed: int,
    prompts: Sequence[Observation] = (),
    rule: Rule,
    folder: Path | None,
    path: Path | None,
) -> Path:
    """Judge answers, or what is left of them, write all files, print the numbers, and return the
    file of the report.

    The report goes to `path`, or into the folder of the results; without a folder there is the
    report alone. Prompts are as the model was shown them; a file of predictions has none.

    Raises:
        UserError: The file is of other settings.
    """
    samples = [one.queries for one in answers.samples]
    suite = {path for paths in questions.suite.values() for path in paths}
    settings = ReportSettings(
        data=questions.name,
        questions=len(questions.examples),
        fingerprint=fingerprint(questions.examples),
        databases=digest({example.database for example in questions.examples}),
        suite=digest(suite) if suite else None,
        model=model,
        seed=seed,
        prompt=of_prompts(prompts) if prompts else None,
        decode=decode.name,
        vote_by=rule.vote_by if decode.temperature else None,
        predictions=short(json.dumps(samples).encode()),
        comparators={name: _origin(name) for name in questions.measures},
        timeout_s=executor.config.timeout_s,
        versions={
            "python": platform.python_version(),
            "minirl-sql": _own_version(),
            "sqlite": apsw.sqlite_lib_version(),
        },
    )
    result = path or (folder or Path()) / VERDICTS
    if is_done(result, settings):
        cli.output.print(f"This evaluation is complete: {result}", soft_wrap=True)
        report = read_report(result)
    else:
        turns = [one.turns for one in answers.samples]
        task = JudgingTask(
            questions.examples,
            samples,
            questions.measures,
            decode,
            vote_by=rule.vote_by,
            suite=questions.suite,
            references=questions.references,
            turns=turns if any(turns) else (),
        )
        with Progress(result.with_name(result.name + PART), settings.deciding()) as progress:
            found = judge(task, executor, progress)
            report = summarise(settings, found.questions, seed=seed, notes=answers.notes)
            # Another report on answers that are there leaves their own files alone.
            if folder and not (path and (folder / PREDICTIONS).exists()):
                _write_files(folder, report, questions, answers, found, prompts, executor)
            write_report(result, report)
    show(report, result)
    if folder is not None:
        cli.output.print(f"Answers in the official programs' forms: {folder}", soft_wrap=True)
    cli.output.print(f"Verdicts of all questions: {result}", soft_wrap=True)
    return result


def _own_version() -> str:
    try:
        return metadata.version("minirl-sql")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "checkout"


def _origin(name: str) -> str:
    comparator = COMPARATORS.get(name)
    if comparator is None or not comparator.source:
        return f"minirl-sql {_own_version()}"
    return f"{comparator.source} @ {comparator.version}"


def _write_files(
    folder: Path,
    report: Report,
    questions: QuestionSet,
    answers: Answers,
    found: AllVerdicts,
    prompts: Sequence[Observation],
    executor: Executor,
) -> None:
    """Write answers with their verdicts, in the official forms, and as the page shows them."""
    from launch.evaluation.trajectories import write_trajectories

    verdicts = [
        Verdict.of(
            example,
            one.sql,
            correct=report.is_right(one),
            samples=sampled.queries,
            turns=sampled.turns,
        )
        for example, one, sampled in zip(
            questions.examples, report.questions, answers.samples, strict=True
        )
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / PREDICTIONS, [asdict(verdict) for verdict in verdicts])
    write_official(verdicts, folder)
    choices = [
        {"id": one.id, "question": one.question, **sampled.choice}
        for one, sampled in zip(verdicts, answers.samples, strict=True)
        if sampled.choice is not None
    ]
    if choices:
        _write_lines(folder / CHOICES, choices)
    write_trajectories(
        folder,
        questions.examples,
        answers.samples,
        found.questions,
        found.right,
        prompts=prompts,
        limits=executor.config,
    )


def _write_lines(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    write_text(path, "".join(f"{json.dumps(record)}\n" for record in records))


def show(report: Report, path: Path) -> None:
    """Print the numbers of a report."""
    if report.measures:
        _show_measures(report)
    if report.mismatch:
        shares = ", ".join(f"{name} {_percent(rate)}" for name, rate in report.mismatch.items())
        cli.output.print(f"Structural mismatch with the gold query, %: {shares}", soft_wrap=True)
    if report.pass_at:
        shares = ", ".join(f"pass@{k} {_percent(share)}" for k, share in report.pass_at.items())
        cli.output.print(f"{report.first}: {shares}", soft_wrap=True)
    _show_cost(report, path)
    _warn("gold queries do not run, and nothing is right there", report.failing_golds)
    _warn("verdicts were decided by the time limit and may vary with load", report.late)


def _show_measures(report: Report) -> None:
    title = f"{report.settings.data}, {report.settings.decode}"
    whole = RichTable(title, "%", "95 % interval")
    for name, one in report.measures.items():
        low, high = map(_percent, one["ci95"])
        whole.add_row(name, _percent(one["mean"]), f"{low} to {high}")
    names = list(report.measures)[:_SHOWN_MEASURES]
    judged = report.measures[report.first]["questions"]
    parts = RichTable("%", "questions", "share", *names)
    means = (_percent(report.measures[name]["mean"]) for name in names)
    parts.add_row("all", f"{judged:,}", _percent(1.0), *means)
    for heading, values in report.parts.items():
        parts.add_section()
        for name, part in values.items():
            shares = (_percent(part[measure]) for measure in names)
            cells = f"{part['questions']:,}", _percent(part["share"])
            parts.add_row(f"{heading}: {name}", *cells, *shares)
    # Names of tags are long; cut they would look alike.
    parts.columns[0].overflow = "fold"
    for column in (*whole.columns[1:], *parts.columns[1:]):
        column.justify = "right"
    cli.output.print(whole, parts, sep="\n")


def _show_cost(report: Report, path: Path) -> None:
    """Print what verbal judging cost, and how to repeat requests that were refused."""
    notes = report.notes
    if cost := notes.get("cost"):
        table = RichTable("cost", "calls", "tokens read", "tokens written")
        for column in table.columns[1:]:
            column.justify = "right"
        for kind, one in cost.items():
            table.add_row(kind, *(f"{number:,}" for number in one.values()))
        cli.output.print(table)
        cli.output.print(
            f"{notes['attempts']:,} attempts, {notes['executable']:,} with a query that ran; "
            f"{notes['judged']:,} judgements, {notes['left_out']:,} left out",
            soft_wrap=True,
        )
    if refused := notes.get("refused"):
        cli.output.print(
            f"{refused:,} requests refused; delete {path} to ask those again.", soft_wrap=True
        )


def _warn(what: str, ids: Sequence[str]) -> None:
    if ids:
        more = ", …" if len(ids) > _NAMED else ""
        _log.warning("%d %s: %s%s", len(ids), what, ", ".join(ids[:_NAMED]), more)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"
