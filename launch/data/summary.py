"""What was prepared, for people and for programs, and the settings that use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict
from rich.table import Table as RichTable

from launch.data.contamination import Overlap
from launch.data.request import TRAIN, VALIDATION, PrepareRequest
from sqlenv.config import DataConfig
from sqlenv.data.layouts import SETS, set_name

JOB = "job.yaml"
GOLD_ISSUES = "gold_issues.jsonl"
_TEST_FIRST = ("bird-dev", "spider-dev")
_HELD_OUT = 200


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PromptLengths(_Frozen):
    """Lengths of prompts in tokens, and how many are over the job's limit."""

    median: int
    p95: int
    longest: int
    limit: int
    over_limit: int


class SourceEntry(_Frozen):
    """What was read of a source, and the first golds that fail or cannot be transpiled."""

    name: str
    read: int
    kept: int
    failures: tuple[str, ...]


class SetReport(_Frozen):
    """A set: `found` counts issues of what was read, `issues` of what was written."""

    questions: int
    fingerprint: str
    databases: int
    read: int
    found: dict[str, int]
    issues: dict[str, int]
    value_matches: int
    prompt_tokens: PromptLengths | None
    sources: tuple[SourceEntry, ...]


class Summary(_Frozen):
    """What prepared.json holds."""

    sets: dict[str, SetReport]
    sample: str
    wanted: int | None
    seed: int
    held_out: tuple[str, ...]
    broken_databases: dict[str, str]
    contamination: tuple[Overlap, ...]
    sqlite: str


def describe_lengths(lengths: Counter[int], limit: int) -> PromptLengths | None:
    """Describe the lengths of prompts, counted by length; None where there are none."""
    ordered = sorted(lengths.elements())
    if not ordered:
        return None
    median, p95 = (ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 95))
    over = sum(many for tokens, many in lengths.items() if tokens > limit)
    return PromptLengths(median=median, p95=p95, longest=ordered[-1], limit=limit, over_limit=over)


def render(summary: Summary) -> RichTable:
    """Lay a summary out for the terminal."""
    is_counted = any(one.prompt_tokens for one in summary.sets.values())
    lengths = ("prompt tokens: median / 95 % / longest",) * is_counted
    golds = ("left out", "doubtful gold queries, kept")
    titles = ("set", "questions", "databases", *golds, "with value matches", *lengths)
    table = RichTable(*titles, title="Prepared questions")
    for column in (*table.columns[1:3], table.columns[5]):
        column.justify = "right"
    table.columns[0].no_wrap = True
    for name, one in summary.sets.items():
        left = Counter(one.found) - Counter(one.issues)
        issues = (_counts(left), _counts(one.issues).replace(" gold", ""))
        counts = (f"{one.questions:,} of {one.read:,}", f"{one.databases:,}")
        tokens = "-"
        if found := one.prompt_tokens:
            tokens = f"{found.median:,} / {found.p95:,} / {found.longest:,}"
            tokens += f"; {found.over_limit:,} over {found.limit:,}" * bool(found.over_limit)
        row = (name, *counts, *issues, f"{one.value_matches:,}", tokens)
        table.add_row(*row[: len(titles)])
    return table


def _counts(issues: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {issue}" for issue, count in issues.items())


def remarks(summary: Summary, request: PrepareRequest) -> list[str]:
    """Say in lines what a table has no room for."""
    folder = request.folder
    lines = []
    if short := summary.wanted and summary.wanted - summary.sets[TRAIN].questions:
        lines.append(f"train: {short:,} of the {summary.wanted:,} questions asked for are missing")
    if names := summary.held_out:
        lines.append(f"held out: {len(names):,} databases (such as {', '.join(names[:5])})")
    sources = [source for one in summary.sets.values() for source in one.sources]
    lines += [f"{one.name}: {'; '.join(one.failures)}" for one in sources if one.failures]
    lines += [f"left out: {why}" for why in summary.broken_databases.values()]
    overlaps = [f"contamination: {overlap.line()}" for overlap in summary.contamination]
    lines += overlaps or ["contamination: none found"]
    lines.append(f"gold queries with issues, one a line: {folder / GOLD_ISSUES}")
    return lines


def job_settings(request: PrepareRequest, summary: Summary, cfg: str) -> str:
    """Write the config that trains and evaluates on what was prepared."""
    sets, base = summary.sets, request.job.data
    tests = [name for name in request.measured if name in sets]
    data: dict[str, Any] = {"root": str(request.folder.resolve()), "demo": None}
    if request.sample:
        # A sample was drawn here; whole sets are sampled as the base says.
        drawn = {"total": sets[TRAIN].questions, "drop_empty_gold": False}
        data["train"] = {**_sources([TRAIN]), **drawn}
    elif request.learned:
        own = [name for name in _names(base.train) if name in sets] or list(request.learned)
        data["train"] = _sources(own)
    own = [name for name in _names(base.validation) if name in sets] if base.validation else []
    if VALIDATION in sets or own:
        data["validation"] = _sources([VALIDATION if VALIDATION in sets else own[0]])
    else:
        # A published test set chooses no checkpoint.
        data["held_out"] = base.held_out or _HELD_OUT
    if tests:
        others = [name for name in (*_names(base.test), *_TEST_FIRST, *tests) if name in sets]
        data["test"] = _sources([next((name for name in others if name not in own), others[0])])
    path = Path(cfg)
    settings = {"base": str(path.resolve()) if path.is_file() else cfg, "data": data}
    head = "# Written by launch.prepare, again each time: keep changes in a file of your own.\n"
    head += "# Another set: data.test.sources.0.file=NAME.jsonl\n"
    return head + yaml.safe_dump(settings, sort_keys=False)


def _names(data: DataConfig) -> list[str]:
    asked = {set_name(source) for source in data.sources}
    return [name for name in SETS if name in asked]


def _sources(names: Sequence[str]) -> dict[str, Any]:
    prepared = {"layout": "prepared", "path": "."}
    return {"sources": [{**prepared, "file": f"{name}.jsonl"} for name in names]}
