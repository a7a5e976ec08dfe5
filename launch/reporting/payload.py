"""What the page shows, read from the folders of runs and evaluations: an overview, and pieces.

A piece holds the groups of one sampled step, or of some questions of an evaluation; the page opens
it when one of them is looked at. docs/reports.md describes both.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import sqlglot
import yaml
from sqlglot.errors import SqlglotError
from sqlglot.tokens import TokenType

from launch.evaluation.results import VERDICTS, read_report
from launch.evaluation.verdicts import PREDICTIONS, Verdict
from launch.reporting.comparison import gain, summary
from launch.reporting.record import RECORDS, RECORDS_VERSION
from launch.run_folder import CONFIG, RESULT, VERSIONS, flat
from minirl.run.files import PART
from sqlenv.errors import UserError
from sqlenv.evaluators.features import clauses_of

VERSION = 1
"""Of the payload's form, which the page checks."""
_QUESTIONS = 64  # questions of an evaluation in a piece
_APART = frozenset({"seed", "run.name", "run.dir"})
"""Settings by which the seeds of one configuration differ."""
_CLASSES = {TokenType.STRING: 1, TokenType.NUMBER: 2}

Group = dict[str, Any]
Note = tuple[str, str]
"""A file, and what is missing in it."""


@dataclass
class Payload:
    """What is shown: an overview of runs, their numbers, and an index of all questions, which names
    piece and place of each; and the pieces, packed, with the tokens of their queries.
    """

    overview: dict[str, Any] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    _questions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, run: int, where: int | str, groups: Iterable[Group], right: Mapping) -> None:
        """Add groups, as `trajectories.jsonl` has them, as pieces and to the index: of `before`,
        `after`, `answers` or a step. Verdicts by question count for more than those of the groups.
        """
        waiting = iter(groups)
        size = None if isinstance(where, int) else _QUESTIONS
        while part := list(islice(waiting, size)):
            for place, group in enumerate(part):
                self._index(group, [run, where, len(self.pieces), place], right)
            queries = {one["sql"] for group in part for one in _turns(group) if one.get("sql")}
            queries |= {group["gold"] for group in part if group.get("gold")}
            tokens = {sql: found for sql in sorted(queries) if (found := tokens_of(sql))}
            self.pieces.append(packed({"groups": part, "tokens": tokens}))

    def _index(self, group: Group, place: list[Any], right: Mapping[str, float]) -> None:
        name = str(group.get("id"))
        members = group.get("trajectories", [])
        entry = self._questions.setdefault(
            name,
            {
                "id": name,
                "db": group.get("db_id", ""),
                "level": group.get("difficulty", ""),
                "question": group.get("question", ""),
                "gold": group.get("gold", ""),
                "clauses": clauses_of(group["gold"]) if group.get("gold") else (),
                "seen": [],
            },
        )
        count, total = sum(map(_is_right, members)), len(members)
        if name in right:
            count, total = right[name], 1
        last = [member["turns"][-1] for member in members if member.get("turns")]
        tags = sorted({tag for turn in last for tag in turn.get("tags", ())})
        entry["seen"].append([*place, count, total, tags])

    def done(self, runs: Sequence[dict[str, Any]], notes: Sequence[str]) -> Payload:
        """Write the overview of all runs."""
        settings = [run["settings"] for run in runs]
        names = dict.fromkeys(key for one in settings for key in one)
        differing = {key: [one.get(key) for one in settings] for key in names if key != "run.dir"}
        alike: dict[str, list[int]] = {}
        for number, one in enumerate(settings):
            own = sorted(item for item in one.items() if item[0] not in _APART)
            alike.setdefault(repr(own) if own else str(number), []).append(number)
        self.overview = {
            "version": VERSION,
            "runs": list(runs),
            "alike": list(alike.values()),
            "differing": {k: v for k, v in differing.items() if any(one != v[0] for one in v)},
            "questions": list(self._questions.values()),
            "notes": list(notes),
        }
        return self


def read_payload(runs: Sequence[tuple[str, Path]]) -> Payload:
    """Read runs and evaluations, given with their names."""
    payload, told, notes = Payload(), [], []
    for number, (name, path) in enumerate(runs):
        run = _read_run(name, path)
        own: list[Note] = []
        folder = path if path.is_dir() else path.parent
        for where in ("before", "answers", "after"):
            place = folder if where == "answers" else folder / where
            answers, right = _answers(place if path.is_dir() or where != "answers" else path)
            run["scores"][where] = {one: float(score) for one, score in right.items()}
            if right:
                recorded = dict(_recorded(place / RECORDS, own)) if path.is_dir() else {}
                kept = {str(one.get("id")): one for each in recorded.values() for one in each}
                groups = (kept.get(one["id"], one) for one in answers)
                payload.add(number, where, groups, right)
            if where == "before" and run["kind"] == "run":
                for step, groups in _recorded(folder / RECORDS, own):
                    payload.add(number, step, groups, {})
        scores = run.pop("scores")
        both = [name for name in scores["before"] if name in scores["after"]]
        # Accuracy before and after, on the questions that both have.
        run["tests"] = gain(*([scores[w][name] for name in both] for w in ("before", "after")))
        run["measured"] = {name: summary([*each.values()]) for name, each in scores.items() if each}
        told.append(run)
        for words in dict.fromkeys(words for _, words in own):  # what several files lack, once
            places = " and ".join(place for place, other in own if other == words)
            notes.append(f"{run['name']}: {places}: {words}")
    return payload.done(told, notes)


def _read_run(name: str, path: Path) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    settings = _mapping(folder / CONFIG) if path.is_dir() else {}

    def has(name: str) -> bool:
        return (path / name).exists()

    is_run = "train" in settings or any(map(has, ("metrics.jsonl", "before", "after")))
    if path.is_dir() and not is_run and not any(map(has, (VERDICTS, PREDICTIONS))):
        if "decode" in settings:
            raise UserError(f"{path}: an evaluation that is not finished; repeat its command first")
        raise UserError(f"{path}: neither a run of launch.train nor a result of launch.eval")
    report = path / VERDICTS if path.is_dir() else path
    result = _mapping(path / RESULT) if is_run else {}
    if not is_run and report.exists() and not report.name.endswith(PART):
        found = read_report(report)
        # What an evaluation says of itself, under the names that a run's result has.
        result = {"decode": found.settings.decode, **found.notes}
    return {
        "name": name,
        "kind": "run" if is_run else "evaluation",
        "settings": {key: value for key, value in flat(settings) if key},
        "result": result,
        "versions": _mapping(path / VERSIONS) if path.is_dir() else {},
        "numbers": _numbers(path / "metrics.jsonl") if is_run else {},
        "command": f"python -m launch.train --cfg {folder}/{CONFIG}" if is_run else "",
        "scores": {},
    }


def _numbers(path: Path) -> dict[str, list[Any]]:
    lines = [line for line in _lines(path, []) if isinstance(line, dict)]
    names = dict.fromkeys(name for line in lines for name in line)
    columns = {name: [line.get(name) for line in lines] for name in names}
    return {
        name: [float(f"{one:.6g}") if isinstance(one, float) else one for one in column]
        for name, column in columns.items()
    }


def _recorded(path: Path, notes: list[Note]) -> Iterator[tuple[int, list[Group]]]:
    """Read the groups of a file by their steps; what is not there is told in a line of notes."""
    lines = _lines(path, notes)
    head = next(lines, None)
    if head is None:
        words = "no trajectories that can be read; groups are not shown"
        notes.append((_place_of(path), words))
        return
    if not isinstance(head, dict) or head.get("version") != RECORDS_VERSION:
        words = "of an older version, without whole groups; they are not shown"
        notes.append((_place_of(path), words))
        return
    groups = (line for line in lines if isinstance(line, dict) and "trajectories" in line)
    for step, part in groupby(groups, key=lambda line: line.get("step", 0)):
        yield step, [_for_javascript(group) for group in part]


def _lines(path: Path, notes: list[Note]) -> Iterator[Any]:
    """Read JSON lines up to one that is damaged, as a run that goes on may leave its last one."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                words = f"cut off or damaged in line {number}; what stands before it is shown"
                notes += [(_place_of(path), words)] if number > 1 else []
                return


def _place_of(path: Path) -> str:
    is_part = path.parent.name in ("before", "after")
    return f"{path.parent.name}/{path.name}" if is_part else path.name


def _answers(path: Path) -> tuple[list[Group], dict[str, float]]:
    """Read the verdicts on the questions of an evaluation, and its answers as groups of one."""
    folder = path if path.is_dir() else path.parent
    verdicts = [Verdict(**line) for line in _lines(folder / PREDICTIONS, []) if _is_verdict(line)]
    sheet = folder / VERDICTS if path.is_dir() else path
    if not sheet.exists() or sheet.name.endswith(PART):
        return [_group(asdict(one), one.correct) for one in verdicts], {
            one.id: one.correct for one in verdicts
        }
    found = read_report(sheet)
    golds = {one.id: one.gold for one in verdicts}
    right = {one.id: one.scores[found.first] for one in found.questions if one.scores}
    groups = [
        _group(
            asdict(one) | {"gold": golds.get(one.id, "")},
            found.is_right(one),
            tags=[tag for tag in one.tags if tag != "none"],
            result={"status": one.predicted},
        )
        for one in found.questions
    ]
    return groups, right


def _is_verdict(line: Any) -> bool:
    return isinstance(line, dict) and line.keys() <= set(Verdict.__slots__) and "correct" in line


def _group(fields: Mapping[str, Any], correct: object, **more: Any) -> Group:
    turn = {"sql": fields["sql"], "correct": bool(correct), **more}
    shared = {key: fields[key] for key in ("id", "db_id", "difficulty", "question", "gold")}
    return {**shared, "trajectories": [{"turns": [turn]}]}


def _turns(group: Group) -> Iterator[dict[str, Any]]:
    return (turn for one in group["trajectories"] for turn in one["turns"])


def _is_right(member: Mapping[str, Any]) -> bool:
    last = member["turns"][-1] if member.get("turns") else {}
    own = last.get("correct", False) and last.get("kind", "answer") == "answer"
    return bool(member.get("correct", own))


def _for_javascript(group: Group) -> Group:
    """Count the characters of credit and tokens as JavaScript does: some it counts twice."""
    for member in group["trajectories"]:
        for span in member.get("spans", ()):
            text = member["turns"][span[0]]["reply"]
            span[1:3] = (_place(text, span[1]), _place(text, span[2]))
        for turn in member["turns"]:
            if "tokens" in turn and not turn["reply"].isascii():
                ends = turn["tokens"]["ends"]
                turn["tokens"]["ends"] = [_place(turn["reply"], end) for end in ends]
    return group


def _place(text: str, place: int) -> int:
    return place if text.isascii() else len(text[:place].encode("utf-16-le", "surrogatepass")) // 2


def packed(value: Any) -> str:
    """Write a value as base64 of compressed JSON, which no text in it can leave."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def tokens_of(sql: str) -> list[int]:
    """Give the tokens of a query that are coloured: start, length and class, one after the other.

    Classes are 0 for keywords, 1 for strings and 2 for numbers; there are none of a text that is no
    SQL, or that JavaScript counts otherwise.
    """
    if not sql or max(sql) > "\uffff":
        return []
    try:
        found = sqlglot.tokenize(sql, read="sqlite")
    except (SqlglotError, RecursionError):
        return []
    numbers = []
    for token in found:
        is_name = token.token_type in (TokenType.VAR, TokenType.IDENTIFIER)
        is_word = not is_name and token.text[:1].isalpha()
        kind = _CLASSES.get(token.token_type, 0 if is_word else None)
        if kind is not None:
            numbers += [token.start, token.end - token.start + 1, kind]
    return numbers


def _mapping(path: Path) -> dict[str, Any]:
    """Read what belongs to a run; nothing where it is not there, or not whole."""
    read = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        found = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
