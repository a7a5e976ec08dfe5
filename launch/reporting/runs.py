"""Results of runs, read to be compared: scores by question, of one or several test sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.evaluation.questions import SUITED
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
    """Scores and queries of one run on one test set by one measure, by question; facts are what has
    to be equal for scores to be comparable, in the words of a message.
    """

    scores: Mapping[str, float]
    facts: Mapping[str, Any]
    answers: Mapping[str, str]


@dataclass(slots=True)
class Run:
    """A row of the table: what learning started from (`base`) and learned from (`reward`), empty
    where unknown, and how questions were answered.
    """

    name: str
    base: str = ""
    reward: str = ""
    decode: str = ""
    columns: dict[Key, ScoreColumn] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name the row in a message."""
        return f"{self.name} ({self.decode})"


def read_runs(named: Sequence[tuple[str, Path]]) -> list[Run]:
    """Read paths of results, given with their names: a row for each decoding in it.

    Raises:
        UserError: A path holds no result, a damaged one, or one that is not finished; or two rows
            have one name and one decoding, and results of the same test set.
    """
    rows: dict[tuple[str, str], Run] = {}
    for run in (run for name, path in named for run in _read(name, path)):
        row = rows.setdefault((run.name, run.decode), run)
        if row is run:
            continue
        if both := row.columns.keys() & run.columns.keys():
            raise UserError(
                f"two results are called {run.name} and are of {min(both)[0]}; give each by its "
                "own path and name: NAME=PATH"
            )
        row.base, row.reward = row.base or run.base, row.reward or run.reward
        row.columns |= run.columns
    return list(rows.values())


def _read(name: str, path: Path) -> list[Run]:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give results of launch.eval")
    reports = list(map(read_report, [path] if path.is_file() else reports_in(path)))
    return [_of_evaluation(name, one) for one in reports] or [_of_training(name, path)]


def reports_in(folder: Path) -> list[Path]:
    """List the finished reports in a folder, or in the folders in it."""
    for base in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        part = base / f"{VERDICTS}{PART}"
        if part.exists() and not (base / VERDICTS).exists():
            raise UserError(f"{part}: an evaluation that is not finished; repeat its command first")
    own = folder / VERDICTS
    return [own] if own.exists() else sorted(folder.glob(f"*/{VERDICTS}"))


def _of_evaluation(name: str, report: Report) -> Run:
    settings, model = report.settings, report.settings.model
    judged = [one for one in report.questions if one.scores]
    answers = {one.id: one.sql for one in judged}
    columns = {}
    for measure in report.measures:
        facts = {
            "questions": settings.fingerprint,
            "databases": settings.databases,
            **({"test suite": settings.suite} if measure in SUITED else {}),
            "comparator": settings.comparators.get(measure),
            "SQLite": settings.versions.get("sqlite"),
            "time limit": settings.timeout_s,
        }
        scores = {one.id: one.scores[measure] for one in judged}
        columns[settings.data, measure] = ScoreColumn(scores, facts, answers)
    return Run(name or model.name, model.base or "", model.reward or "", settings.decode, columns)


def _of_training(name: str, folder: Path) -> Run:
    """Read the accuracy after a run of launch.train, or the one of its `before/` or `after/`."""
    place = folder / AFTER if (folder / AFTER / PREDICTIONS).is_file() else folder
    if not (place / PREDICTIONS).is_file():
        raise UserError(
            f"{folder}: no {VERDICTS} nor {PREDICTIONS} in it; give a result of launch.eval, or a "
            "run of launch.train that is finished"
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
    try:
        config = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
        model, reward, env = (config.get(key) or {} for key in ("model", "reward", "env"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError, AttributeError):
        raise UserError(f"{run / CONFIG}: missing or damaged; bring it back") from None
    column = ScoreColumn(
        {one.id: float(one.correct) for one in verdicts},
        {"questions": [(one.id, one.gold) for one in verdicts], "comparator": env.get("match")},
        {one.id: one.sql for one in verdicts},
    )
    name = name or f"{run.resolve().name}/{place.name}"
    base = Path(model.get("path") or "").name
    return Run(name, base, reward.get("kind", ""), "greedy", {("test", "ex"): column})
