"""Results of runs, read to be compared: scores by question, of one or several test sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.evaluation.judging import SUITED
from launch.evaluation.results import VERDICTS, Report, read_report
from launch.evaluation.verdicts import PREDICTIONS, read_verdicts
from launch.run_folder import CONFIG, RESULT
from minirl.run.files import PART, read_json
from sqlenv.errors import UserError

AFTER = "after"

Key = tuple[str, str]
"""A test set and a measure, such as ("spider-dev", "spider_ts")."""


@dataclass(frozen=True, slots=True)
class ScoreColumn:
    """The scores of one run on one test set by one measure.

    Attributes:
        scores: By question.
        facts: What has to be equal for scores to be comparable, in the words of a message.
        answers: The queries, by question.
    """

    scores: Mapping[str, float]
    facts: Mapping[str, Any]
    answers: Mapping[str, str]


@dataclass(slots=True)
class Run:
    """A row of the table.

    Attributes:
        name: As the user gives it, or that of the model.
        base: The model that learning started from; empty where unknown.
        reward: What it learned from; empty where it did not learn, or where unknown.
        decode: How questions were answered.
    """

    name: str
    base: str = ""
    reward: str = ""
    decode: str = ""
    columns: dict[Key, ScoreColumn] = field(default_factory=dict)


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """Read what the user names: `PATH` or `NAME=PATH`, a row for each decoding in it.

    Raises:
        UserError: A path holds no result, a damaged one, or one that is not finished; or two rows
            have one name and one decoding, and results of the same test set.
    """
    rows: dict[tuple[str, str], Run] = {}
    for run in (run for argument in arguments for run in _read(*split_name(argument))):
        row = rows.setdefault((run.name, run.decode), run)
        if row is run:
            continue
        if both := row.columns.keys() & run.columns.keys():
            raise UserError(
                f"two results are called {run.name} and are of {min(both)[0]}; tell them apart: "
                f"{' '.join(f'NAME={argument}' for argument in arguments[:2])}"
            )
        row.columns |= run.columns
    return list(rows.values())


def split_name(argument: str) -> tuple[str, Path]:
    """Tell the name of a row, empty where there is none, from the path of its results."""
    if Path(argument).exists():
        return "", Path(argument)
    name, _, path = argument.rpartition("=")
    return name, Path(path)


def _read(name: str, path: Path) -> list[Run]:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give results of launch.eval")
    rows: dict[str, Run] = {}
    for file in [path] if path.is_file() else reports_in(path):
        report = read_report(file)
        model, decode = report.settings.model, report.settings.decode
        run = rows.setdefault(decode, Run(name or model.name, decode=decode))
        run.base = run.base or model.base or ""
        run.reward = run.reward or model.reward or ""
        for measure, column in _columns(report):
            key = (report.settings.data, measure)
            if key in run.columns:
                raise UserError(f"{path}: two results of {key[0]}, decoded {decode}; give one")
            run.columns[key] = column
    return list(rows.values()) or [_of_training(name, path)]


def reports_in(folder: Path) -> list[Path]:
    """List the reports in a folder, or in the folders in it.

    Raises:
        UserError: An evaluation there is not finished.
    """
    for base in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        part = base / f"{VERDICTS}{PART}"
        if part.exists() and not (base / VERDICTS).exists():
            raise UserError(f"{part}: an evaluation that is not finished; repeat its command first")
    own = folder / VERDICTS
    return [own] if own.exists() else sorted(folder.glob(f"*/{VERDICTS}"))


def _columns(report: Report) -> Iterator[tuple[str, ScoreColumn]]:
    settings = report.settings
    judged = [one for one in report.questions if one.scores]
    answers = {one.id: one.sql for one in judged}
    for measure in report.measures:
        facts = {
            "questions": settings.fingerprint,
            "databases": settings.databases,
            **({"test suite": settings.suite} if measure in SUITED else {}),
            "comparator": settings.comparators.get(measure),
            "SQLite": settings.versions.get("sqlite"),
            "time limit": settings.timeout_s,
        }
        yield measure, ScoreColumn({one.id: one.scores[measure] for one in judged}, facts, answers)


def _of_training(name: str, folder: Path) -> Run:
    """Read the accuracy after a run of launch.train, or the one of its `before/` or `after/`."""
    place = folder / AFTER if (folder / AFTER / PREDICTIONS).is_file() else folder
    if not (place / PREDICTIONS).is_file():
        raise UserError(
            f"{folder}: no {VERDICTS} nor {PREDICTIONS} in it; give a result of launch.eval, or a "
            "run of launch.train"
        )
    run = place.parent
    if not (run / RESULT).is_file():
        raise UserError(f"{folder}: not finished, {run} has no {RESULT}; repeat its command first")
    verdicts = read_verdicts(place / PREDICTIONS)
    wanted = read_json(run / RESULT, dict, advice="make it again").get("questions")
    if wanted != len(verdicts):
        raise UserError(
            f"{folder}: {len(verdicts)} predictions, and its {RESULT} is of {wanted} questions; "
            "evaluate it again"
        )
    config = _config(run)
    base, match = (config.get(key) or {} for key in ("model", "env"))
    column = ScoreColumn(
        {one.id: float(one.correct) for one in verdicts},
        {"questions": [(one.id, one.gold) for one in verdicts], "comparator": match.get("match")},
        {one.id: one.sql for one in verdicts},
    )
    return Run(
        name or f"{run.resolve().name}/{place.name}",
        Path(base.get("path") or "").name,
        (config.get("reward") or {}).get("kind", ""),
        "greedy",
        {("test", "ex"): column},
    )


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{folder / CONFIG}: missing or damaged; bring it back") from None
    return found if isinstance(found, dict) else {}
