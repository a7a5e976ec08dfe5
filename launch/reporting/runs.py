"""Runs of launch.train and results of launch.eval, read once for the page and for comparisons."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from exchange import UserError
from launch.evaluation.digests import short
from launch.evaluation.outcomes import Outcomes
from launch.evaluation.results import (
    VERDICTS,
    ModelFacts,
    QuestionVerdict,
    Report,
    ReportSettings,
    read_report,
)
from launch.evaluation.statistics import mcnemar, mean_interval, paired_difference
from launch.evaluation.verdicts import PREDICTIONS, Verdict
from launch.run_folder import CONFIG, RESULT, VERSIONS, flat
from minirl.run.files import PART

METRICS = "metrics.jsonl"
_MARKS = (VERDICTS, METRICS, CONFIG)
"""Files of which a folder of a run or of a result has at least one."""
_DEPTH = 3
"""How many folders below a given one a run may lie."""
_SEED = re.compile(r"[-_]?seed\d+")
PLACES = ("before", "answers", "after")
"""Where a run was evaluated, in order; `answers` are those of an evaluation."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of launch.train, or a result of launch.eval.

    Attributes:
        name: On the page; `row` is what a table calls it, empty for the name of the model.
        folder: Where its files are; None for a result that is one file.
        reports: Verdicts on held-out questions, by place.
        golds: Gold queries of these questions.
        settings, result, versions: Its files; empty where they are missing or not whole.
        notes: What is missing, a line each.
    """

    name: str
    row: str
    folder: Path | None
    reports: Mapping[str, Report]
    golds: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def is_training(self) -> bool:
        """Tell a run of launch.train from a result."""
        return "answers" not in self.reports

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
    """Read paths, given with names that may be empty: runs, results, or folders of them.

    Raises:
        UserError: A path holds neither, or a result that is damaged or not finished.
    """
    found = [(row, run) for row, path in named for run in _runs_of(path)]
    names = shown_names(found)
    return [_read(name, row, path) for name, (row, path) in zip(names, found, strict=True)]


def shown_names(named: Sequence[tuple[str, Path]]) -> list[str]:
    """Name paths by what they are given as, or by the shortest end of the path that tells all of
    them apart, and their configurations too.
    """
    parts = [Path(str(path.resolve()).removesuffix(".json")).parts[1:] for _, path in named]
    whole = ["/".join(each) for each in parts]
    ends = (["/".join(each[-n:]) for each in parts] for n in range(1, max(map(len, parts))))
    names = next((each for each in ends if _distinct(each) == _distinct(whole)), whole)
    counts = Counter(row for row, _ in named)
    return [
        row if row and counts[row] == 1 else "/".join(filter(None, (row, name)))
        for (row, _), name in zip(named, names, strict=True)
    ]


def without_seed(name: str) -> str:
    """Name the configuration of a run: `fraction-seed0/stage2` is one of `fraction/stage2`."""
    return "/".join(filter(None, _SEED.sub("", name).split("/")))


def _distinct(names: Sequence[str]) -> tuple[int, int]:
    """Count names, and the configurations that they name."""
    return len({*names}), len({*filter(None, map(without_seed, names))})


def _runs_of(path: Path) -> list[Path]:
    """Find what a path stands for: itself, or all runs below it but those from which another one
    of them went on, as the second stage of an arm does from the first.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give a run, or a result of launch.eval")
    path = path.parent if path.name == VERDICTS else path
    found = {run.resolve(): run for run in _search(path, _DEPTH)}
    starts = {run: dict(flat(read_mapping(run / CONFIG))).get("model.path") for run in found}
    earlier = {
        folder
        for run, start in starts.items()
        if isinstance(start, str)
        for folder in Path(start).resolve().parents
        if folder != run
    }
    return [given for run, given in found.items() if run not in earlier] or [path]


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
    result = path / VERDICTS if path.is_dir() else path
    if result.exists():
        report = read_report(result)
        said = asdict(report.settings)
        files["versions"] = said.pop("versions") | files["versions"]
        files["settings"] = said | files["settings"]
        golds = {one.id: one.gold for one in _verdicts(path, [])}
        folder = path if path.is_dir() else None
        return Run(name, row, folder, {"answers": report}, golds, **files)
    settings, notes = files["settings"], list[str]()
    if "decode" in settings or (path / f"{VERDICTS}{PART}").exists():
        raise UserError(f"{path}: an evaluation that is not finished; repeat its command first")
    if "train" in settings or any((path / each).exists() for each in (METRICS, "before", "after")):
        places = {where: path / where for where in ("before", "after")}
        found = {where: _verdicts(place, notes) for where, place in places.items()}
        files["result"] = read_mapping(path / RESULT)
        known = row or f"{name}/after"
    else:  # such as the folder `before` of a run
        found = {"answers": _verdicts(path, notes)}
        settings = read_mapping(path.parent / CONFIG)
        known = row or "/".join(path.resolve().parts[-2:])
        if not found["answers"]:
            raise UserError(f"{path}: neither a run of launch.train nor a result of launch.eval")
    reports = {where: _report(known, one, settings) for where, one in found.items() if one}
    golds = {one.id: one.gold for verdicts in found.values() for one in verdicts}
    return Run(name, row, path, reports, golds, **files, notes=notes)


def _verdicts(folder: Path, notes: list[str]) -> list[Verdict]:
    names, damaged = set(Verdict.__slots__), list[int]()
    lines = list(read_lines(folder / PREDICTIONS, damaged))
    notes += [f"{folder.name}/{PREDICTIONS}: {cut_off(number)}" for number in damaged]
    return [
        replace(Verdict(**line), outcomes=Outcomes(**line.get("outcomes", {})))
        for line in lines
        if isinstance(line, dict) and line.keys() <= names and "correct" in line
    ]


def cut_off(number: int) -> str:
    """Say that a file ends for us at the line of this number."""
    return f"cut off or damaged in line {number}; what stands before it is shown"


def _report(name: str, verdicts: Sequence[Verdict], settings: Mapping[str, Any]) -> Report:
    """Write the verdicts of a run on its held-out questions as an evaluation's report."""
    model, reward, env = (settings.get(key) or {} for key in ("model", "reward", "env"))
    base = Path(model.get("path") or "").name
    asked = json.dumps([(one.id, one.gold) for one in verdicts])
    scores = [float(one.correct) for one in verdicts]
    return Report(
        settings=ReportSettings(
            data="test",
            model=ModelFacts(name, base=base, reward=reward.get("kind")),
            decode="greedy",
            questions=len(verdicts),
            fingerprint=short(asked.encode()),
            comparators={"ex": str(env.get("match"))},
        ),
        measures={"ex": summary(scores)},
        parts={},
        failing_golds=[],
        outcomes=Outcomes.total(one.outcomes for one in verdicts),
        questions=[
            QuestionVerdict(
                *(one.id, one.db_id, one.difficulty, one.question, one.sql, {"ex": score}, "", "")
            )
            for one, score in zip(verdicts, scores, strict=True)
        ],
    )


def summary(scores: Sequence[float]) -> dict[str, Any]:
    """Give a mean with its interval, as a record."""
    interval = list(mean_interval(scores))
    return {"mean": sum(scores) / len(scores), "ci95": interval, "questions": len(scores)}


def gain(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Compare two lists of scores of the same questions, as a record; empty where there are none.

    McNemar's counts need scores that are all 0 or 1.
    """
    if not first:
        return {}
    found = paired_difference(first, second)
    is_binary = {*first, *second} <= {0.0, 1.0}
    counts = mcnemar(*([score == 1 for score in each] for each in (first, second)))
    return asdict(found) | {"mcnemar": asdict(counts) if is_binary else None}


def read_lines(path: Path, damaged: list[int] | None = None) -> Iterator[Any]:
    """Read JSON lines up to one that is damaged, as a run that goes on may leave its last one; its
    number joins a list. No file has no lines.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                if damaged is not None:
                    damaged.append(number)
                return


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a file of a run; empty where it is missing, or not whole."""
    read = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        found = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
