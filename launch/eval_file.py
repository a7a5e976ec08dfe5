"""Judge predictions on a published test set: a file of them with no model, or a model's."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import apsw
from rich.table import Table as RichTable

from launch import cli
from launch.judging import MEASURES, PARTIAL, REFERENCED, SUITED, Task, judge, read_measures
from launch.measured import digest
from launch.official import write_official
from launch.predictions import read_samples
from launch.sheet import Sheet, fill, is_done, journal, read_sheet, write_sheet
from launch.testsets import (
    TEST_SETS,
    VERDICTS,
    check_databases,
    check_golds,
    find,
    find_references,
    find_suite,
    suite_files,
)
from launch.texts import write_text
from launch.verdicts import PREDICTIONS, Verdict
from launch.votes import Decode
from sqlenv.config import SourceConfig
from sqlenv.data.loading import fingerprint
from sqlenv.errors import UserError
from sqlenv.evaluators.comparators import COMPARATORS
from sqlenv.evaluators.spider2 import Reference
from sqlenv.executor import Executor
from sqlenv.types import Example

_log = logging.getLogger(__name__)

VOTE_TEMPERATURE = 0.8
_NAMED = 3
_SHOWN_MEASURES = 3


@dataclass(frozen=True, slots=True)
class Data:
    """The questions that are judged, and the databases that they are judged on.

    Attributes:
        name: Of the test set.
        suite: Files of the test suite by database, where it is used.
        references: Gold results by question, where they are used.
    """

    name: str
    examples: tuple[Example, ...]
    measures: tuple[str, ...]
    suite: Mapping[str, tuple[Path, ...]]
    references: Mapping[str, Reference]

    def facts(self) -> dict[str, Any]:
        """Say which questions and databases these are: numbers, and fingerprints of contents."""
        suite = {path for paths in self.suite.values() for path in paths}
        return {
            "data": self.name,
            "questions": len(self.examples),
            "fingerprint": fingerprint(self.examples),
            "databases": digest({example.database for example in self.examples}),
            **({"suite": digest(suite)} if suite else {}),
        }


def prepare(
    name: str, examples: tuple[Example, ...], source: SourceConfig, root: Path, options: Namespace
) -> Data:
    """Find out what the questions are judged by and on, and look at every database.

    Raises:
        UserError: A database cannot be used, or the test suite is not there.
    """
    measures = read_measures(options.comparators, name)
    _check_measures(examples, measures)
    suite: Mapping[str, tuple[Path, ...]] = {}
    if not SUITED.isdisjoint(measures):
        folder = find_suite(options.test_suite, source, root)
        if folder is not None:
            suite = suite_files(folder, examples)
        elif options.comparators is not None:
            raise UserError(
                f"--comparators {options.comparators}: no test suite at {root}; give its folder "
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
    return Data(name, examples, measures, suite, references)


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


def run_versions() -> dict[str, str]:
    """Name the versions that verdicts depend on."""
    return {
        "python": platform.python_version(),
        "minirl-sql": _own_version(),
        "sqlite": apsw.sqlite_lib_version(),
    }


def _own_version() -> str:
    try:
        return metadata.version("minirl-sql")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "checkout"


def settings_of(
    data: Data,
    task: Task,
    *,
    timeout_s: float,
    model: Mapping[str, Any],
    seed: int,
    prompt: str | None,
) -> dict[str, Any]:
    """Write down what decides the verdicts.

    Args:
        data: Questions and databases.
        task: Predictions, and how they are judged.
        timeout_s: Wall time of a query.
        model: Whose predictions: `name`, and what else is known.
        seed: Of the samples and of the bootstrap.
        prompt: Hash of the prompts; None where they are unknown.
    """
    predictions = json.dumps(list(map(list, task.samples)))
    return {
        **data.facts(),
        "model": dict(model),
        "seed": seed,
        "prompt": prompt,
        "decode": task.decode.name,
        **({"vote_by": task.vote_by} if task.decode.temperature else {}),
        "predictions": hashlib.sha256(predictions.encode()).hexdigest()[:16],
        "comparators": {name: _origin(name) for name in task.measures},
        "timeout_s": timeout_s,
        "versions": run_versions(),
    }


def _origin(name: str) -> str:
    comparator = COMPARATORS.get(name)
    if comparator is None or not comparator.source:
        return f"minirl-sql {_own_version()}"
    return f"{comparator.source} @ {comparator.version}"


def judge_into(
    path: Path, task: Task, executor: Executor, settings: Mapping[str, Any], *, seed: int
) -> Sheet:
    """Judge predictions, or what is left of them, and write the sheet when all are judged.

    Raises:
        UserError: The file is of other settings.
    """
    if is_done(path, settings):
        cli.output.print(f"This evaluation is complete: {path}", soft_wrap=True)
        return read_sheet(path)
    with journal(path, settings) as found:
        sheet = fill(settings, judge(task, executor, found), seed=seed)
        write_sheet(path, sheet)
    return sheet


def evaluate_file(options: Namespace, executor: Executor) -> Path:
    """Do what the options ask for: judge `--predictions` on `--data`.

    Args:
        options: Of the command line.
        executor: Runs queries, with `testsets.read_limits`.

    Returns:
        The file of verdicts.

    Raises:
        UserError: Something is missing, or is not as it should be.
    """
    name, path = options.data, options.predictions
    if name not in TEST_SETS:
        raise UserError(
            f"--predictions: --data {name} is not a published test set; give one of "
            f"{', '.join(TEST_SETS)}"
        )
    if options.data_root is None:
        raise UserError("--predictions: give the folder of the data too, --data-root DIR")
    decode = Decode.parse(options.decode, vote_temperature=VOTE_TEMPERATURE)
    source, examples = find(name, options.data_root, options.file)
    samples = [list(each) for each in read_samples(path, examples)]
    samples = take(samples, decode, path)
    data = prepare(name, examples, source, options.data_root, options)
    seed = options.seed or 0
    task = Task(
        examples,
        samples,
        data.measures,
        decode,
        vote_by=options.vote_by,
        suite=data.suite,
        references=data.references,
    )
    model = {"name": options.model or path.stem}
    timeout_s = executor.config.timeout_s
    settings = settings_of(data, task, timeout_s=timeout_s, model=model, seed=seed, prompt=None)
    folder = options.out
    if folder is None and options.json is None:
        folder = Path("evals") / "-".join((model["name"], name, decode.name))
    sheet_path = options.json or folder / VERDICTS
    sheet = judge_into(sheet_path, task, executor, settings, seed=seed)
    show_sheet(sheet)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        verdicts = _verdicts(sheet, examples, samples)
        lines = (json.dumps(asdict(verdict)) for verdict in verdicts)
        write_text(folder / PREDICTIONS, "".join(f"{line}\n" for line in lines))
        write_official(verdicts, folder)
        cli.output.print(f"Answers in the official programs' forms: {folder}", soft_wrap=True)
    cli.output.print(f"Verdicts of all questions: {sheet_path}", soft_wrap=True)
    return sheet_path


def take(samples: Sequence[Sequence[str]], decode: Decode, path: Path) -> list[Sequence[str]]:
    """Take as many samples of each question as the decoding asks for, the first ones.

    Raises:
        UserError: There are fewer, or several without a word on how to choose.
    """
    there = len(samples[0])
    if there > 1 and not decode.temperature:
        raise UserError(
            f"{path}: {there} samples a question; say --decode vote@{there} or pass@{there}"
        )
    if there < decode.samples:
        raise UserError(
            f"{path}: {there} samples a question, and --decode {decode.name} takes {decode.samples}"
        )
    return [each[: decode.samples] for each in samples]


def _verdicts(
    sheet: Sheet, examples: Sequence[Example], samples: Sequence[Sequence[str]]
) -> list[Verdict]:
    return [
        Verdict.of(example, one.sql, correct=one.scores[sheet.first] == 1, samples=sampled)
        for example, one, sampled in zip(examples, sheet.questions, samples, strict=True)
    ]


def show_sheet(sheet: Sheet) -> None:
    """Print the numbers of a sheet."""
    title = f"{sheet.settings['data']}, {sheet.settings['decode']}"
    whole = RichTable(title, "%", "95 % interval")
    for name, one in sheet.measures.items():
        low, high = map(_percent, one["ci95"])
        whole.add_row(name, _percent(one["mean"]), f"{low} to {high}")
    names = list(sheet.measures)[:_SHOWN_MEASURES]
    parts = RichTable("%", "questions", "share", *names)
    means = (_mean(sheet.measures[name]) for name in names)
    parts.add_row("all", f"{len(sheet.questions):,}", _percent(1.0), *means)
    for heading, values in sheet.parts.items():
        parts.add_section()
        for name, part in values.items():
            shares = (_percent(part[measure]) for measure in names)
            cells = (
                f"{part['questions']:,}",
                _percent(part["questions"] / len(sheet.questions)),
                *shares,
            )
            parts.add_row(f"{heading}: {name}", *cells)
    # Names of tags are long; cut they would look alike.
    parts.columns[0].overflow = "fold"
    for column in (*whole.columns[1:], *parts.columns[1:]):
        column.justify = "right"
    cli.output.print(whole, parts, sep="\n")
    if sheet.mismatch:
        shares = ", ".join(f"{name} {_percent(rate)}" for name, rate in sheet.mismatch.items())
        cli.output.print(f"Other than the gold query in structure, %: {shares}", soft_wrap=True)
    if sheet.pass_at:
        shares = ", ".join(f"pass@{k} {_percent(share)}" for k, share in sheet.pass_at.items())
        cli.output.print(f"{sheet.first}: {shares}", soft_wrap=True)
    _tell("gold queries do not run, and nothing is right there", sheet.failing_golds)
    _tell(
        "verdicts hang on a limit of time, and a machine with less to do may give others",
        sheet.late,
    )


def _tell(what: str, ids: Sequence[str]) -> None:
    if ids:
        more = ", …" if len(ids) > _NAMED else ""
        _log.warning("%d %s: %s%s", len(ids), what, ", ".join(ids[:_NAMED]), more)


def _mean(summary: Mapping[str, Any]) -> str:
    return _percent(summary["mean"])


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"
