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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from launch import cli
from launch.files import CONFIG, SCREENED_SHARES, flat
from launch.records import RECORDS, read_answers, read_groups
from launch.reporting.answer import answer
from launch.reporting.runs import (
    METRICS,
    AskedQuestion,
    Run,
    outcome,
    read_mapping,
    shared_rules,
    without_seed,
)
from sqlenv.evaluators.hardness import clauses_of

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
Scores = Mapping[str, Mapping[str, float]]


class Page:
    """What runs recorded, as it is shown.

    Attributes:
        overview: All but the groups. `views` are the places where questions were seen, of a run and
            a step (`0.before`); `questions` name the piece that holds each, and its verdicts;
            `rules` are what answers are judged by, what all runs share first, and `apart` those
            that some runs do not have, or have by another program.
        pieces: Groups, packed.
        answer: The most important things, in sentences.
        notes: What is missing, a line each.
    """

    def __init__(self, runs: Sequence[Run], against: Mapping[str, Any]) -> None:
        self.pieces: list[str] = []
        self.notes: list[str] = []
        self._views: dict[str, str] = {}
        self._questions: dict[AskedQuestion, dict[str, Any]] = {}
        self._named = Counter[str]()
        said = [*map(_said, runs)]
        for number, run in enumerate(runs):
            self._add_run(run, number, f"{run.name}: " if len(runs) > 1 else "")
        reports = [one for run in runs for one in run.reports.values() if one.measures]
        shared = shared_rules(reports)
        rules = [*dict.fromkeys([*shared, *(each for one in reports for each in one.measures)])]
        self.answer = answer(runs)
        self.overview: dict[str, Any] = {
            "runs": said,
            "views": self._views,
            "questions": list(self._questions.values()),
            "notes": self.notes,
            "rules": rules,
            "apart": [rule for rule in rules if rule not in shared],
            "against": against,
            "answer": self.answer,
            **_set_apart([one["settings"] for one in said]),
        }

    def _add_run(self, run: Run, number: int, prefix: str) -> None:
        damage: dict[str, list[str]] = {}  # what is missing, and in which files, which is said once

        def tell(name: str, words: str) -> None:
            damage.setdefault(words, []).append(name)

        def add(where: str, groups: Iterable[Group], scores: Scores | None = None) -> None:
            view = f"{number}.{where}"
            self._views[view] = prefix + _VIEWS.get(where, f"step {where}")
            self._add(view, groups, scores)

        def add_answers(where: str) -> None:
            report = run.reports[where]
            name = RECORDS if where == "answers" else f"{where}/{RECORDS}"
            path = run.folder / name if run.folder else None
            groups = read_answers(path, report, partial(tell, name))
            add(where, groups, {one.id: one.scores for one in report.questions if one.scores})

        for name in ("first", "last") if run.is_training else ():
            self._views[f"{number}.{name}"] = f"{prefix}{_VIEWS[name]}"
        # In the order of time.
        for where in (one for one in run.reports if one != "after"):
            add_answers(where)
        # Before a run's first step there are none.
        if run.is_training and run.folder and (run.folder / METRICS).exists():
            for step, groups in read_groups(run.folder / RECORDS, partial(tell, RECORDS)):
                add(str(step), groups)
        if "after" in run.reports:
            add_answers("after")
        missing = [f"{' and '.join(files)}: {words}" for words, files in damage.items()]
        hints = [
            f"{where}: {words}" if run.is_training else words
            for where, one in run.reports.items()
            if (words := one.notes.get("hint"))
        ]
        self.notes += [f"{run.name}: {words}" for words in (*missing, *hints)]

    def _add(self, view: str, groups: Iterable[Group], scores: Scores | None) -> None:
        """Add groups, as `trajectories.jsonl` has them, as pieces and to the index. Verdicts by
        question, of an evaluation, count for more than those of the groups.
        """
        waiting = iter(groups)
        while part := list(islice(waiting, None if scores is None else _QUESTIONS)):
            for place, group in enumerate(part):
                name, members = str(group.get("id")), group["trajectories"]
                entry = self._indexed(name, group, is_held_out=scores is not None)
                for one in members:
                    one["correct"] = _is_right(one)
                count, total = sum(one["correct"] for one in members), len(members)
                own = scores.get(name, {}) if scores else {}
                if own:
                    count, total = next(iter(own.values())), 1
                last = [one["turns"][-1] for one in members if one["turns"]]
                tags = sorted({tag for turn in last for tag in turn.get("tags", ())})
                seen = {"view": view, "piece": len(self.pieces), "at": place, "tags": tags}
                more = {"rule": next(iter(own))} if own else {}
                more |= {"scores": own} if len(own) > 1 else {}
                entry["seen"].append({**seen, "right": count, "total": total, **more})
            self.pieces.append(packed({"groups": part}))

    def _indexed(self, name: str, group: Group, *, is_held_out: bool) -> dict[str, Any]:
        """Return what the index has of a question; another one of its name gets a name of its own,
        which links lead to.
        """
        asked = name, str(group.get("db_id")), str(group.get("question"))
        if asked not in self._questions:
            self._named[name] += 1
            number = self._named[name]
            gold_sql = group.get("gold_sql", "")
            self._questions[asked] = {
                "id": name if number == 1 else f"{name} ({number})",
                "set": "held-out" if is_held_out else "training",
                "db": group.get("db_id", ""),
                "level": group.get("difficulty", ""),
                "question": group.get("question", ""),
                "gold_sql": gold_sql,
                "clauses": clauses_of(gold_sql) if gold_sql else (),
                "seen": [],
            }
        return self._questions[asked]


def _set_apart(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say which runs differ by their seeds alone, and in which settings the runs differ."""
    names = dict.fromkeys(key for one in settings for key in one if key != "run.dir")
    values = {key: [one.get(key) for one in settings] for key in names}
    alike: dict[str, list[int]] = {}
    for number, one in enumerate(settings):
        own = sorted(item for item in one.items() if item[0] not in _APART)
        # Such as the weights that each seed starts from.
        text = repr(own).replace(f"seed{one.get('seed')}", "seed")
        alike.setdefault(text if own else str(number), []).append(number)
    differing = {k: v for k, v in values.items() if any(one != v[0] for one in v)}
    return {"alike": list(alike.values()), "differing": differing}


def _said(run: Run) -> dict[str, Any]:
    result, reports = run.result, run.reports
    if own := reports.get("answers"):
        # What an evaluation says of itself, under the names that a run's result has.
        result = {"decode": own.settings.decode, **own.notes}
    # With the folder: the run may have been made in another place.
    folder = run.folder or Path()
    command = cli.command_line("launch.train", "--cfg", folder / CONFIG, f"run.dir={folder}")
    return {
        "name": run.name,
        "configuration": without_seed(run.name),
        "finished": run.is_finished,
        "kind": "run" if run.is_training else "evaluation",
        "settings": {key: value for key, value in flat(run.settings) if key},
        "result": result,
        "versions": run.versions,
        "numbers": run.metrics,
        "command": command if run.is_training else "",
        **outcome(reports),
        "replies": {
            where: one.outcomes.line() for where, one in reports.items() if one.outcomes.replies
        },
        "screening": read_mapping(run.folder / SCREENED_SHARES) if run.folder else {},
    }


def _is_right(member: Mapping[str, Any]) -> bool:
    last = member["turns"][-1] if member["turns"] else {}
    own = last.get("correct", False) and last.get("kind", "answer") == "answer"
    return bool(member.get("correct", own))


def packed(value: Any) -> str:
    """Write a value as base64 of compressed JSON, which no text in it can leave."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def render(page: Page) -> str:
    """Write the page.

    Data is base64 throughout, so that no text of a model or a database is ever part of the HTML.
    """
    scripts = [_asset("uPlot.iife.min.js"), "\n".join(map(_asset, _SCRIPTS))]
    styles = [_asset("uPlot.min.css"), _asset("page.css")]
    policy = _POLICY.format(scripts=_hashes(scripts), styles=_hashes(styles))
    pieces = {"overview": packed(page.overview)} | {
        f"piece{number}": piece for number, piece in enumerate(page.pieces)
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
