"""Runs of launch.train and results of launch.eval, read once for the page and for comparisons."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.evaluation.results import (
    PLACES,
    STAGES,
    VERDICTS,
    Paired,
    Report,
    paired_difference,
    read_place,
    read_report,
)
from launch.files import CONFIG, RESULT, VERSIONS
from launch.records import read_json_lines
from minirl.exchange import UserError

METRICS = "metrics.jsonl"
_MARKS = (VERDICTS, METRICS, CONFIG)
"""Files of which a folder of a run or of a result has at least one."""
_DEPTH = 3
"""How many folders below a given one a run may lie."""
_SEED = re.compile(r"[-_]?seed(\d+)")


@dataclass(frozen=True, slots=True)
class Run:
    """A run of launch.train, or a result of launch.eval.

    Attributes:
        name: On the page; `row` is what a table calls it, empty for the name of the model.
        folder: Where its files are; None for a result that is one file.
        reports: Verdicts on held-out questions, by place in order; `answers` are those of an
            evaluation.
        settings, result, versions: Its files; empty where they are missing or not whole.
        metrics: By name, in the order of its steps; none of an evaluation.
    """

    name: str
    row: str
    folder: Path | None
    reports: Mapping[str, Report]
    settings: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def is_training(self) -> bool:
        """Tell a run of launch.train from a result."""
        return "answers" not in self.reports

    @property
    def seed(self) -> int:
        """Tell the seed that the name has, as of an endpoint's model, else that of the settings."""
        named = _SEED.search(self.name)
        return int(named[1]) if named else self.settings.get("seed", 0)

    @property
    def is_finished(self) -> bool:
        """Tell whether every question has its last verdict; a result is always finished."""
        after = self.reports.get("after")
        count = len(after.questions) if after else 0
        return not self.is_training or self.result.get("questions") == count

    def final(self) -> Report:
        """Return the verdicts that a comparison is about; a `UserError` if there are none yet."""
        report = self.reports.get("answers") or self.reports.get("after")
        if report is None or not self.is_finished:
            raise UserError(f"{self.folder}: not finished; repeat its command first")
        return report


def read_runs(named: Sequence[tuple[str, Path]]) -> list[Run]:
    """Read paths, given with names that may be empty: runs, results, or folders of them. One that
    is given twice, as by its folder too, is read once.

    Raises:
        UserError: A path holds neither, or a result that is damaged or not finished.
    """
    places = dict[Path, tuple[str, Path]]()
    for row, run in ((row, run) for row, path in named for run in _runs_of(path)):
        if row or run.resolve() not in places:
            places[run.resolve()] = row, run
    found = [*places.values()]
    names = shown_names(found)
    return [_read(name, row, path) for name, (row, path) in zip(names, found, strict=True)]


def shown_names(named: Sequence[tuple[str, Path]]) -> list[str]:
    """Name paths by what they are given as, or from the folder on that all of them are in."""
    paths = [Path(str(path.resolve()).removesuffix(".json")) for _, path in named]
    common = os.path.commonpath([path.parent for path in paths])
    counts = Counter(row for row, _ in named)
    return [
        row
        if counts[row] == 1 and row
        else "/".join(filter(None, (row, os.path.relpath(path, common))))
        for (row, _), path in zip(named, paths, strict=True)
    ]


def without_seed(name: str) -> str:
    """Name the configuration of a run: `fraction-seed0/stage2` is one of `fraction/stage2`."""
    return "/".join(filter(None, _SEED.sub("", name).split("/"))) or name


def _runs_of(path: Path) -> list[Path]:
    """Find what a path stands for: itself, or all runs below it."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give a run, or a result of launch.eval")
    path = path.parent if path.name == VERDICTS else path
    return list(_search(path, _DEPTH)) or [path]


def _search(folder: Path, depth: int) -> Iterator[Path]:
    """Find the runs in a folder by name, and none inside of another one."""
    if any((folder / each).exists() for each in _MARKS):
        yield folder
    elif depth:
        for each in sorted(folder.glob("*/")):
            yield from _search(each, depth - 1)


def _read(name: str, row: str, path: Path) -> Run:
    files: dict[str, Any] = {
        "settings": read_mapping(path / CONFIG),
        "versions": read_mapping(path / VERSIONS),
    }
    if path.is_file() or (path / VERDICTS).exists():
        report = read_report(path)
        said = asdict(report.settings)
        files["versions"] = said.pop("versions") | files["versions"]
        files["settings"] = said | files["settings"]
        folder = path if path.is_dir() else None
        return Run(name, row, folder, {"answers": report}, **files)
    settings = files["settings"]
    if "decode" in settings:
        raise UserError(f"{path}: an evaluation that is not finished; repeat its command first")
    if "train" not in settings and not any((path / one).exists() for one in (METRICS, *PLACES)):
        raise UserError(f"{path}: neither a run of launch.train nor a result of launch.eval")
    reports = {
        where: read_place(path / where) for where in PLACES if (path / where / VERDICTS).exists()
    }
    files |= {"result": read_mapping(path / RESULT), "metrics": _metrics(path / METRICS)}
    return Run(name, row, path, reports, **files)


AskedQuestion = tuple[str, str, str]
"""Id, database and text of a question. Other files of one name have other questions of its ids."""


def scores_of(report: Report, rule: str) -> dict[AskedQuestion, float]:
    """Give the scores by a rule of the questions that have one."""
    judged = [one for one in report.questions if rule in one.scores]
    return {(one.id, one.db_id, one.question): one.scores[rule] for one in judged}


def shared_rules(reports: Sequence[Report]) -> list[str]:
    """List what all of these are judged by alike; runs may ask `witness` differently."""
    said = [
        {rule: (rule, one.settings.comparators.get(rule)) for rule in one.measures}
        for one in reports
    ]
    return [rule for rule in next(iter(said), ()) if len({one.get(rule) for one in said}) == 1]


def gain(first: Report, second: Report, rule: str) -> Paired | None:
    """Compare reports on the questions that both have; None where there are none."""
    before, after = (scores_of(one, rule) for one in (first, second))
    both = [asked for asked in before if asked in after]
    if not both:
        return None
    pairs = [[one[asked] for asked in both] for one in (before, after)]
    return paired_difference(*pairs, [db_id for _, db_id, _ in both])


def gains(reports: Mapping[str, Report]) -> dict[str, dict[str, Paired]]:
    """Compare the places of a run by each measure that both have, for every stage between two."""
    found = {}
    for stage, places in STAGES.items():
        if reports.keys() >= {*places}:
            first, second = (reports[place] for place in places)
            tests = {rule: gain(first, second, rule) for rule in second.measures}
            found[stage] = {rule: test for rule, test in tests.items() if test}
    return found


def outcome(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Tell accuracy at every place by every measure, what each stage gained, and how many queries
    fail, as JSON has it.
    """
    return {
        "accuracy": {place: one.measures for place, one in reports.items() if one.measures},
        "gains": {
            stage: {rule: asdict(one) for rule, one in each.items()}
            for stage, each in gains(reports).items()
        },
        "failing": {place: one.failing for place, one in reports.items()},
    }


def _metrics(path: Path) -> dict[str, list[Any]]:
    lines = [line for line in read_json_lines(path) if isinstance(line.get("step"), int)]
    names = dict.fromkeys(name for line in lines for name in line)
    columns = {name: [line.get(name) for line in lines] for name in names}
    return {
        name: [_short(one) if isinstance(one, float) else one for one in column]
        for name, column in columns.items()
    }


def _short(number: float) -> float | None:
    return float(f"{number:.6g}") if math.isfinite(number) else None


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a file of a run; empty where it is missing, or not whole."""
    read = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        found = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
