"""Results of runs, read to be compared: scores by question, of one or several test sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.judging import SUITED
from launch.run_folder import CONFIG, RESULT
from launch.sheet import Sheet, read_sheet
from launch.testsets import VERDICTS
from launch.verdicts import PREDICTIONS, Verdict, read_verdicts
from minirl.run.files import PART, read_json
from sqlenv.errors import UserError

AFTER = "after"

Key = tuple[str, str]
"""A test set and a measure, such as ("spider-dev", "spider_ts")."""


@dataclass(frozen=True, slots=True)
class Column:
    """The scores of one run on one test set by one measure.

    Attributes:
        scores: By question.
        facts: What has to be equal for scores to be comparable, in the words of a message.
        answers: The queries, by question.
    """

    scores: Mapping[str, float]
    facts: Mapping[str, Any]
    answers: Mapping[str, str]

    @property
    def is_binary(self) -> bool:
        """Tell whether each question is right or wrong, nothing between."""
        return {0.0, 1.0}.issuperset(self.scores.values())


@dataclass(slots=True)
class Run:
    """A row of the table.

    Attributes:
        name: As the user gives it, or that of the model.
        base: The model that learning started from; empty where unknown.
        reward: What it learnt from; empty where it did not learn, or where unknown.
        decode: How questions were answered.
    """

    name: str
    base: str = ""
    reward: str = ""
    decode: str = ""
    columns: dict[Key, Column] = field(default_factory=dict)


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """Read what the user names: `PATH` or `NAME=PATH`, a row for each decoding in it.

    Raises:
        UserError: A path holds no result, a damaged one, or one that is not finished.
    """
    runs: list[Run] = []
    for argument in arguments:
        runs += _read(*split_name(argument))
    return _told_apart(runs, arguments)


def split_name(argument: str) -> tuple[str, Path]:
    """Tell the name of a row, empty where there is none, from the path of its results."""
    if Path(argument).exists():
        return "", Path(argument)
    name, _, path = argument.rpartition("=")
    return name, Path(path)


def _read(name: str, path: Path) -> list[Run]:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give results of launch.eval")
    sheets = [path] if path.is_file() else _sheets(path)
    rows: dict[str, Run] = {}
    for file in sheets:
        sheet = read_sheet(file)
        model, decode = sheet.settings["model"], sheet.settings["decode"]
        run = rows.setdefault(decode, Run(name or model["name"], decode=decode))
        run.base = run.base or _known(model, "base")
        run.reward = run.reward or _known(model, "reward")
        for measure, column in _columns(sheet):
            key = (sheet.settings["data"], measure)
            if key in run.columns:
                raise UserError(f"{path}: two results of {key[0]}, decoded {decode}; give one")
            run.columns[key] = column
    return list(rows.values()) or [_from_predictions(name, path)]


def _known(model: Mapping[str, Any], name: str) -> str:
    return str(model.get(name) or "")


def _sheets(folder: Path) -> list[Path]:
    """List the sheets in a folder, or in the folders in it.

    Raises:
        UserError: An evaluation there is not finished.
    """
    for base in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        part = base / f"{VERDICTS}{PART}"
        if part.exists() and not (base / VERDICTS).exists():
            raise UserError(f"{part}: an evaluation that is not finished; repeat its command first")
    own = folder / VERDICTS
    return [own] if own.exists() else sorted(folder.glob(f"*/{VERDICTS}"))


def _columns(sheet: Sheet) -> Iterator[tuple[str, Column]]:
    settings = sheet.settings
    answers = {one.id: one.sql for one in sheet.questions}
    for measure in sheet.measures:
        facts = {
            "questions": settings["fingerprint"],
            "databases": settings["databases"],
            **({"test suite": settings.get("suite")} if measure in SUITED else {}),
            "comparator": settings["comparators"][measure],
            "SQLite": settings["versions"]["sqlite"],
            "time limit": settings["timeout_s"],
        }
        scores = {one.id: one.scores[measure] for one in sheet.questions}
        yield measure, Column(scores, facts, answers)


def _from_predictions(name: str, folder: Path) -> Run:
    """Read a run of launch.train (its accuracy after), or an evaluation of a config's split."""
    place = folder / AFTER if (folder / AFTER / PREDICTIONS).is_file() else folder
    if not (place / PREDICTIONS).is_file():
        raise UserError(
            f"{folder}: no {VERDICTS} nor {PREDICTIONS} in it; give a result of launch.eval, or a "
            "run of launch.train"
        )
    # Accuracy after comes with the result of the whole run, which lies beside it.
    is_part_of_run = place != folder or place.name in (AFTER, "before")
    owner = folder if place != folder else folder.parent if is_part_of_run else folder
    if not (owner / RESULT).is_file():
        raise UserError(f"{folder}: not finished, it has no {RESULT}; repeat its command first")
    verdicts = read_verdicts(place / PREDICTIONS)
    _check_whole(owner, verdicts)
    config = _config(owner)
    result = read_json(owner / RESULT, dict, advice="make it again")
    base = (config.get("model") or {}).get("path") if isinstance(config.get("model"), dict) else ""
    run = Run(
        name or (f"{owner.resolve().name}" + (f"/{place.name}" if is_part_of_run else "")),
        Path(base).name if base else "",
        (config.get("reward") or {}).get("kind", "") if is_part_of_run else "",
        str(result.get("decode", "greedy")),
    )
    data = "test" if is_part_of_run else str(config.get("split", "test"))
    env = config.get("env") or {}
    scores = {verdict.id: float(verdict.correct) for verdict in verdicts}
    facts = {"questions": [(one.id, one.gold) for one in verdicts], "comparator": env.get("match")}
    run.columns[data, "ex"] = Column(scores, facts, {one.id: one.sql for one in verdicts})
    return run


def _check_whole(folder: Path, verdicts: Sequence[Verdict]) -> None:
    wanted = read_json(folder / RESULT, dict, advice="make it again").get("questions")
    if wanted != len(verdicts):
        raise UserError(
            f"{folder}: {len(verdicts)} predictions, and its {RESULT} is of {wanted} questions; "
            "evaluate it again"
        )


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{path}: damaged; bring it back") from None
    return found if isinstance(found, dict) else {}


def _told_apart(runs: list[Run], arguments: Sequence[str]) -> list[Run]:
    """Join rows that the user gave one name, and refuse those that only look alike.

    Raises:
        UserError: Two rows have one name and one decoding, and results of the same test set.
    """
    rows: dict[tuple[str, str], Run] = {}
    for run in runs:
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
