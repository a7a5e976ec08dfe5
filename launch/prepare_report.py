"""What was prepared, for people and for programs, and the settings that use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import apsw
import yaml
from rich.table import Table as RichTable

from launch.leaks import Leak
from launch.prepare_job import FLAWS, Outcome, SetSummary
from launch.prepare_plan import Request
from launch.samples import SAMPLES
from sqlenv.config import DataConfig
from sqlenv.data.layouts import SETS

JOB = "job.yaml"
_SHARES = {"median": 0.5, "p95": 0.95, "longest": 1.0}
_LENGTHS = "prompt tokens: median / 95 % / longest"
_TEST_FIRST = ("bird-dev", "spider-dev")
_HELD_OUT = 200


def summarise(request: Request, outcome: Outcome, stamps: Mapping[str, Any]) -> dict[str, Any]:
    """Write an outcome for programs.

    Args:
        request: What was asked for.
        outcome: What came of it.
        stamps: Size and time of each file that was read.
    """
    limit = request.job.sampler.max_prompt_tokens
    return {
        "sets": {name: _set(summary, limit) for name, summary in outcome.sets.items()},
        "sample": request.sample or None,
        "wanted": SAMPLES[request.sample].total if request.sample else None,
        "seed": request.seed,
        "held_out": sorted(outcome.held_out),
        "broken_databases": {str(path): why for path, why in outcome.broken.items()},
        "leaks": [asdict(leak) for leak in outcome.leaks],
        "sqlite": apsw.sqlite_lib_version(),
        "files": dict(stamps),
    }


def _set(summary: SetSummary, limit: int) -> dict[str, Any]:
    found: Counter[str] = Counter()
    for report in summary.reports:
        found.update(report.found)
    return {
        "questions": summary.questions,
        "fingerprint": summary.fingerprint,
        "databases": len(summary.databases),
        "read": sum(report.read for report in summary.reports),
        "found": dict(sorted(found.items())),
        "flaws": dict(sorted(summary.flaws.items())),
        "hinted": summary.hinted,
        "prompt_tokens": _lengths(summary.lengths, limit),
        "sources": [
            {
                "name": one.name,
                "files": list(map(str, one.files)),
                "read": one.read,
                "kept": one.kept,
            }
            for one in summary.reports
        ],
    }


def _lengths(lengths: Counter[int], limit: int) -> dict[str, int] | None:
    """Describe the lengths of prompts; None where they were not counted."""
    count = lengths.total()
    if not count:
        return None
    ordered = sorted(lengths.items())
    found = {}
    for name, share in _SHARES.items():
        below = 0
        for tokens, many in ordered:
            below += many
            if below >= share * count:
                found[name] = tokens
                break
    over = sum(many for tokens, many in ordered if tokens > limit)
    return {**found, "limit": limit, "over_limit": over}


def render(summary: Mapping[str, Any]) -> RichTable:
    """Lay a summary out for the terminal."""
    sets: Mapping[str, Any] = summary["sets"]
    is_counted = any(one["prompt_tokens"] for one in sets.values())
    titles = ("set", "questions", "databases", "golds", "hinted", *[_LENGTHS] * is_counted)
    table = RichTable(*titles, title="Prepared questions")
    for column in (*table.columns[1:3], table.columns[4]):
        column.justify = "right"
    table.columns[0].no_wrap = True
    for name, one in sets.items():
        counts = (f"{one['questions']:,} of {one['read']:,}", f"{one['databases']:,}")
        flaws = ", ".join(f"{count:,} {_short(flaw)}" for flaw, count in one["found"].items())
        row = (name, *counts, flaws, f"{one['hinted']:,}", _tokens(one["prompt_tokens"]))
        table.add_row(*row[: len(titles)])
    return table


def _short(flaw: str) -> str:
    """Name a flaw below the heading of golds."""
    return flaw.removeprefix("gold ").removesuffix(" gold")


def _tokens(lengths: Mapping[str, int] | None) -> str:
    if lengths is None:
        return "-"
    told = " / ".join(f"{lengths[name]:,}" for name in _SHARES)
    over = lengths["over_limit"]
    return f"{told}; {over:,} over {lengths['limit']:,}" if over else told


def remarks(summary: Mapping[str, Any], folder: Path) -> list[str]:
    """Say in lines what a table has no room for."""
    said = []
    if short := summary["wanted"] and summary["wanted"] - summary["sets"]["train"]["questions"]:
        said.append(
            f"train: {short:,} of the {summary['wanted']:,} questions asked for are missing"
        )
    if summary["held_out"]:
        names = summary["held_out"]
        said.append(f"held out: {len(names):,} databases (such as {', '.join(names[:5])})")
    said += [f"left out: {why}" for why in summary["broken_databases"].values()]
    said += [f"leak: {Leak(**leak).line()}" for leak in summary["leaks"]] or ["leaks: none found"]
    said.append(f"flawed golds, one a line: {folder / FLAWS}")
    learns = any(not _measures(name) for name in summary["sets"])
    module = "launch.train" if learns else "launch.eval"
    said.append(f"to use it: python -m {module} --cfg {folder / JOB}")
    return said


def job_settings(request: Request, outcome: Outcome, cfg: str) -> str:
    """Write the config that trains and evaluates on what was prepared."""
    sets, base = outcome.sets, request.job.data
    evaluations = [name for name in sets if _measures(name) and name != "validation"]
    data: dict[str, Any] = {"root": str(request.folder.resolve()), "demo": None}
    if request.sample:
        # A sample was drawn here; whole sets are sampled as the base says.
        drawn = {"total": sets["train"].questions, "drop_empty_gold": False}
        data["train"] = {"sources": [_source("train")], **drawn}
    elif request.learned:
        own = [name for name in _names(base.train) if name in sets] or request.learned
        data["train"] = {"sources": list(map(_source, own))}
    own = [name for name in _names(base.validation) if name in sets] if base.validation else []
    if "validation" in sets or own:
        validation = "validation" if "validation" in sets else own[0]
        data["validation"] = {"sources": [_source(validation)]}
    else:
        # A published test set chooses no checkpoint.
        data["held_out"] = base.held_out or _HELD_OUT
    if evaluations:
        others = [name for name in (*_names(base.test), *_TEST_FIRST, *evaluations) if name in sets]
        test = next((name for name in others if name not in own), others[0])
        data["test"] = {"sources": [_source(test)]}
    settings = {"base": _base(cfg), "data": data}
    head = "# Written by launch.prepare. Any other set: data.test.sources.0.file=NAME.jsonl\n"
    return head + yaml.safe_dump(settings, sort_keys=False)


def _names(data: DataConfig) -> list[str]:
    """Name the sets that a job's own settings take."""
    asked = {(source.layout, source.split, source.file) for source in data.sources}
    return [name for name, one in SETS.items() if (one.layout, one.split, one.file) in asked]


def _measures(name: str) -> bool:
    return name == "validation" or (name in SETS and SETS[name].split != "train")


def _source(name: str) -> dict[str, str]:
    return {"layout": "prepared", "path": ".", "file": f"{name}.jsonl"}


def _base(cfg: str) -> str:
    path = Path(cfg)
    return str(path.resolve()) if path.is_file() else cfg
