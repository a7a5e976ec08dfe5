"""The page: one self-contained HTML file; its policy forbids requests and foreign scripts.

It shows an overview of runs, and pieces. A piece holds the groups of one sampled step, or of some
questions of an evaluation; the page opens it when one of them is looked at. docs/reports.md
describes both.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from launch.evaluation.results import QuestionVerdict
from launch.files import CONFIG, SCREENED_SHARES, flat
from launch.records import RECORDS, read_groups
from launch.reporting.answer import answer
from launch.reporting.pairing import pair_results
from launch.reporting.runs import (
    Run,
    gains,
    metrics_of,
    read_mapping,
    shared_rules,
    without_seed,
)
from sqlenv.evaluators.features import clauses_of

_QUESTIONS = 64  # questions of an evaluation in a piece
_APART = frozenset({"seed", "run.name", "run.dir"})
"""Settings by which the seeds of one configuration differ."""
_VIEWS = {
    "first": "first time seen",
    "last": "last time seen",
    "before": "before learning",
    "between": "after the warm start",
    "answers": "evaluation",
    "after": "after learning",
}
_SCRIPTS = (
    "page.js",
    "verdict.js",
    "curves.js",
    "questions.js",
    "results.js",
    "transcript.js",
    "start.js",
)
_GENERATOR = b'<meta name="generator" content="minirl-sql launch.report">'
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
)

Group = dict[str, Any]


@dataclass
class Payload:
    """What is shown.

    Attributes:
        runs: What is said of each run, with its metrics.
        views: Names of the places where questions were seen: of a run and a step, `0.before`.
        questions: Each question that was seen, with the piece that holds it and the verdict.
        pieces: Groups, packed.
        notes: What is missing, a line each.
        rules: What answers are judged by; what all runs share comes first.
        apart: Those that some runs do not have, or have by another program.
        against: What a comparison with a base says.
        answer: The most important things, in sentences.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    views: dict[str, str] = field(default_factory=dict)
    questions: dict[str, dict[str, Any]] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    against: list[dict[str, Any]] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Payload:
        """Read what runs recorded."""
        payload = cls()
        for number, run in enumerate(runs):
            payload.runs.append(_said(run))
            payload._add_run(run, number, f"{run.name}: " if len(runs) > 1 else "")
        reports = [one for run in runs for one in run.reports.values() if one.measures]
        shared = shared_rules(reports)
        payload.rules = [
            *dict.fromkeys([*shared, *(each for one in reports for each in one.measures)])
        ]
        payload.apart = [rule for rule in payload.rules if rule not in shared]
        payload.answer = answer(runs, [said["numbers"] for said in payload.runs])
        return payload

    def overview(self) -> dict[str, Any]:
        """Give all but the pieces, and what sets the runs apart."""
        settings = [run["settings"] for run in self.runs]
        names = dict.fromkeys(key for one in settings for key in one if key != "run.dir")
        values = {key: [one.get(key) for one in settings] for key in names}
        alike: dict[str, list[int]] = {}
        for number, one in enumerate(settings):
            own = sorted(item for item in one.items() if item[0] not in _APART)
            # Such as the weights that each seed starts from.
            text = repr(own).replace(f"seed{one.get('seed')}", "seed")
            alike.setdefault(text if own else str(number), []).append(number)
        return {
            **{name: each for name, each in vars(self).items() if name != "pieces"},
            "questions": list(self.questions.values()),
            "alike": list(alike.values()),
            "differing": {k: v for k, v in values.items() if any(one != v[0] for one in v)},
        }

    def _add_run(self, run: Run, number: int, prefix: str) -> None:
        damage: dict[str, list[str]] = {}  # what is missing, and in which files, which is said once
        for name in ("first", "last") if run.is_training else ():
            self.views[f"{number}.{name}"] = f"{prefix}{_VIEWS[name]}"
        for where, groups, right in _places(run, damage):
            view = f"{number}.{where}"
            self.views[view] = prefix + _VIEWS.get(where, f"step {where}")
            self._add(view, groups, right)
        missing = [f"{' and '.join(files)}: {words}" for words, files in damage.items()]
        hints = [
            f"{where}: {words}" if run.is_training else words
            for where, one in run.reports.items()
            if (words := one.notes.get("hint"))
        ]
        self.notes += [f"{run.name}: {words}" for words in (*missing, *hints)]

    def _add(
        self, view: str, groups: Iterable[Group], scores: Mapping[str, Mapping[str, float]] | None
    ) -> None:
        """Add groups, as `trajectories.jsonl` has them, as pieces and to the index. Verdicts by
        question, of an evaluation, count for more than those of the groups.
        """
        waiting = iter(groups)
        while part := list(islice(waiting, None if scores is None else _QUESTIONS)):
            for place, group in enumerate(part):
                name, members = str(group.get("id")), group["trajectories"]
                entry = self.questions.setdefault(name, _entry(name, group, scores is not None))
                for one in members:
                    one["correct"] = _is_right(one)
                count, total = sum(one["correct"] for one in members), len(members)
                own = scores[name] if scores is not None and name in scores else {}
                if own:
                    count, total = next(iter(own.values())), 1
                last = [one["turns"][-1] for one in members if one["turns"]]
                tags = sorted({tag for turn in last for tag in turn.get("tags", ())})
                seen = {"view": view, "piece": len(self.pieces), "at": place, "tags": tags}
                more = {"scores": own} if len(own) > 1 else {}
                entry["seen"].append({**seen, "right": count, "total": total, **more})
                _set_beside(group)
            self.pieces.append(packed({"groups": part}))


def _said(run: Run) -> dict[str, Any]:
    result = run.result
    if own := run.reports.get("answers"):
        # What an evaluation says of itself, under the names that a run's result has.
        result = {"decode": own.settings.decode, **own.notes}
    settings = {key: value for key, value in flat(run.settings) if key}
    return {
        "name": run.name,
        "configuration": without_seed(run.name),
        "finished": run.is_finished,
        "kind": "run" if run.is_training else "evaluation",
        "settings": settings,
        "result": result,
        "versions": run.versions,
        "numbers": metrics_of(run),
        # With the folder: the run may have been made in another place.
        "command": f"python -m launch.train --cfg {run.folder}/{CONFIG} run.dir={run.folder}"
        if run.is_training
        else "",
        "measured": {where: one.measures for where, one in run.reports.items() if one.first},
        "replies": {
            where: one.outcomes.line() for where, one in run.reports.items() if one.outcomes.replies
        },
        "failing": {where: one.failing for where, one in run.reports.items()},
        "screening": read_mapping(run.folder / SCREENED_SHARES) if run.folder else {},
        "gains": {
            stage: {rule: asdict(test) for rule, test in each.items()}
            for stage, each in gains(run.reports).items()
        },
    }


_Place = tuple[str, Iterable[Group], Mapping[str, Mapping[str, float]] | None]


def _places(run: Run, damage: dict[str, list[str]]) -> Iterator[_Place]:
    """Give the groups of every place in order: of evaluations those of all questions, with the
    verdicts, and of sampled steps those that are recorded.
    """
    evaluated = {where: _evaluated(run, where, damage) for where in run.reports}
    last = evaluated.pop("after", iter(()))
    for each in evaluated.values():
        yield from each
    if run.is_training and run.folder:
        for step, groups in _recorded(run.folder, RECORDS, damage):
            yield str(step), groups, None
    yield from last


def _evaluated(run: Run, where: str, damage: dict[str, list[str]]) -> Iterator[_Place]:
    report, prefix = run.reports[where], "" if where == "answers" else f"{where}/"
    found = _recorded(run.folder, f"{prefix}{RECORDS}", damage) if run.folder else ()
    kept = {str(one.get("id")): one for _, groups in found for one in groups}
    groups = [
        {**_group(one, correct=report.is_right(one)), **kept.get(one.id, {})}
        for one in report.questions
    ]
    yield where, groups, {one.id: one.scores for one in report.questions if one.scores}


def _recorded(
    folder: Path, name: str, damage: dict[str, list[str]]
) -> Iterator[tuple[int, list[Group]]]:
    """Read the groups of a file by their steps; what is not there is told."""

    def tell(words: str) -> None:
        damage.setdefault(words, []).append(name)

    for step, part in read_groups(folder / name, tell):
        yield step, [*map(_for_javascript, part)]


def _group(one: QuestionVerdict, *, correct: bool) -> Group:
    """Write an answer of which the trajectory was not recorded as a group of one."""
    tags = [tag for tag in one.tags if tag != "none"]
    result = {"result": {"status": one.status}} if one.status else {}
    return {
        **{key: getattr(one, key) for key in ("id", "db_id", "difficulty", "question")},
        "gold_sql": one.gold_sql,
        "trajectories": [{"turns": [{"sql": one.sql, "correct": correct, "tags": tags, **result}]}],
    }


def _entry(name: str, group: Group, is_held_out: bool) -> dict[str, Any]:  # noqa: FBT001
    return {
        "id": name,
        "set": "held-out" if is_held_out else "training",
        "db": group.get("db_id", ""),
        "level": group.get("difficulty", ""),
        "question": group.get("question", ""),
        "gold_sql": (gold_sql := group.get("gold_sql", "")),
        "clauses": clauses_of(gold_sql) if gold_sql else (),
        "seen": [],
    }


def _set_beside(group: Group) -> None:
    """Pair columns and rows of each result that is not the gold's with those of the gold's, on
    witnesses too, and say in which columns a pair of rows differs.
    """
    shown = [(group, turn) for turn in _turns(group)]
    shown += [(turn["witness"], turn["witness"]) for turn in _turns(group) if "witness" in turn]
    for wanted, turn in shown:
        gold, own = wanted.get("gold_result") or {}, turn.get("result") or {}
        if "columns" in gold and "columns" in own and own["rows"] != gold["rows"]:
            first, second = (min(map(len, (one["columns"], *one["rows"]))) for one in (gold, own))
            found = pair_results(gold["rows"], own["rows"], widths=(first, second))
            differs = [found.differs(gold["rows"], own["rows"], row) for row in found.rows]
            turn["beside"] = {"columns": found.columns, "rows": found.rows, "differs": differs}


def _turns(group: Group) -> Iterator[dict[str, Any]]:
    return (turn for one in group["trajectories"] for turn in one["turns"])


def _is_right(member: Mapping[str, Any]) -> bool:
    last = member["turns"][-1] if member["turns"] else {}
    own = last.get("correct", False) and last.get("kind", "answer") == "answer"
    return bool(member.get("correct", own))


def _for_javascript(group: Group) -> Group:
    """Count characters, up to a place, as JavaScript does, which counts some of them twice."""
    for member in group["trajectories"]:
        for span in member.get("spans", ()):
            text = member["turns"][span[0]]["reply"]
            span[1:3] = (_place(text, span[1]), _place(text, span[2]))
        for turn in member["turns"]:
            if "place" in turn:
                turn["place"] = _place(turn["reply"], turn["place"])
    return group


def _place(text: str, place: int) -> int:
    return place if text.isascii() else len(text[:place].encode("utf-16-le", "surrogatepass")) // 2


def packed(value: Any) -> str:
    """Write a value as base64 of compressed JSON, which no text in it can leave."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def render(payload: Payload) -> str:
    """Write the page.

    Data is base64 throughout, so that no text of a model or a database is ever part of the HTML.
    """
    scripts = [_asset("uPlot.iife.min.js"), "\n".join(map(_asset, _SCRIPTS))]
    styles = [_asset("uPlot.min.css"), _asset("page.css")]
    policy = _POLICY.format(scripts=_hashes(scripts), styles=_hashes(styles))
    pieces = {"overview": packed(payload.overview())} | {
        f"piece{number}": piece for number, piece in enumerate(payload.pieces)
    }
    parts = {
        "POLICY": policy,
        "LICENSE": _asset("uPlot.LICENSE"),
        "STYLES": "\n".join(f"<style>{text}</style>" for text in styles),
        "PIECES": "\n".join(
            f'<script type="text/plain" id="data-{name}">{piece}</script>'
            for name, piece in pieces.items()
        ),
        "SCRIPTS": "\n".join(f"<script>{text}</script>" for text in scripts),
    }
    text = _asset("page.html")
    for name, part in parts.items():
        text = text.replace(f"%{name}%", part, 1)
    return text


def is_page(path: Path) -> bool:
    """Tell whether a file is a page that was written here."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _GENERATOR in file.read(1000)


def _asset(name: str) -> str:
    return resources.files("launch.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)
