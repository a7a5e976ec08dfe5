"""Run folders as launch.train leaves them, and results, made up."""

import gzip
import json
import math
import re
import shutil
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from launch import report
from launch.evaluation.answers import ModelFacts
from launch.evaluation.results import (
    QuestionVerdict,
    Report,
    ReportSettings,
    as_json,
    read_place,
    summarise,
    write_result,
)
from launch.files import SCREENED_SHARES, write_text
from launch.reporting.runs import outcome
from tests.vectors import read
from tests.worlds import write

from .conftest import json_lines

TAGS = ("WHERE_ERROR", "SELECT_ERROR", "JOIN_MISSING", "GROUP_BY_ERROR")
LEVELS = ("easy", "medium", "hard")


def question(number: int, kind: str) -> dict[str, Any]:
    value = 10 + number % 50
    return {
        "id": f"{kind}/{number}",
        "db_id": f"shop_{number % 7}",
        "difficulty": LEVELS[number % 3],
        "question": f"Which names cost more than {value} in aisle {number}?",
        "gold_sql": f"SELECT name, price FROM item WHERE price > {value} ORDER BY price",
        "gold_result": result(["name", "price"], [["tea", value + 1], ["jam", value + 2]]),
    }


def result(columns: Sequence[Any], rows: Sequence[Sequence[Any]], **more: Any) -> dict[str, Any]:
    """Write a result as records have it."""
    head = {"status": "ok", "columns": list(columns), "rows": [list(row) for row in rows]}
    return head | {"count": len(rows), "width": len(columns)} | more


def turn(
    asked: Mapping[str, Any], *, right: bool, kind: int, again: bool = False
) -> dict[str, Any]:
    """Make up a reply, and what came of it: wrong ones are of several kinds, of which some fail."""
    gold, rows = asked["gold_sql"], asked["gold_result"]["rows"]
    fails = not right and kind % 3 == 0
    sql = gold if right else gold.replace("price >", "prize >" if fails else "price <")
    reply = f"<think>The table has it; then I filter the rows.</think>\n<sql> {sql} </sql>"
    failure = {"status": "error", "message": "no such column: prize"}
    own = rows if right else [rows[1], ["oil", 3]]
    return {
        **({"observation": "The filter conditions in WHERE differ."} if again else {}),
        "reply": reply,
        "finish": "stop",
        "sql": sql,
        "place": reply.index(sql),
        "kind": "answer",
        "correct": right,
        "tags": [] if right else [TAGS[kind % 4]],
        "result": failure if fails else result(["name", "price"], own),
    }


def group(number: int, step: int, count: int) -> dict[str, Any]:
    """Make up a group of eight, of which so many are right in the end."""
    asked, mean = question(number, "train"), count / 8
    scale = math.sqrt(mean * (1 - mean))
    members = []
    for kind in range(8):
        right = 3 * kind % 8 < count
        turns = [
            turn(asked, right=right and again, kind=kind, again=again) for again in (False, True)
        ]
        start, where = (turns[1]["reply"].index(words) for words in ("SELECT", "WHERE"))
        end, credit = start + len(turns[1]["sql"]), 0.5 if right else -1.0
        members.append(
            {
                "reward": 1.5 if right else -0.25,
                "parts": {"format": 0.5, "execution": 1.0 if right else -0.75},
                "correct": right,
                "spans": [[1, start, where, 0.5], [1, where, end, credit]],
                "advantage": round((right - mean) / scale, 6) if scale else None,
                "ended": "done",
                "versions": [step - 1, step - 1],
                "turns": turns,
            }
        )
    prompt = f"<|im_start|>user\nCREATE TABLE item (name, price);\n{asked['question']}"
    return {"step": step, "group": number, **asked, "prompt": prompt, "trajectories": members}


def write_page(*runs: str | Path, **options: str | Path) -> Path:
    page = Path(runs[0]).with_suffix(".html")
    given = {"out": page, **options}
    named = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    report.main([*map(str, runs), *named])
    return Path(given["out"])


def unfinish(run: Path) -> None:
    (run / "result.json").unlink()
    shutil.rmtree(run / "after")


def verdict(number: object = 1, **more: Any) -> QuestionVerdict:
    """Make up what is found of an answer."""
    found = QuestionVerdict(str(number), "d", "", "?", "SELECT 0", "SELECT 1", {"set": 0.0})
    return replace(found, **{"status": "ok", "gold_status": "ok", **more})


def summary(
    *verdicts: QuestionVerdict, notes: Mapping[str, Any] | None = None, **settings: Any
) -> Report:
    """Summarise them as those of one evaluation."""
    given: dict[str, Any] = {"data": "test", "model": ModelFacts("m"), "decode": "greedy"}
    return summarise(ReportSettings(**given | settings), verdicts, notes)


def write_marks(path: Path, marks: str, rights: Mapping[str, str], **settings: Any) -> Path:
    """Write a result of questions with a mark each, of which every measure has some for right: the
    file that `--json` names, or what is beside a file of the name verdicts.json.
    """
    given: dict[str, Any] = {"data": "test", "model": ModelFacts(path.stem), **settings}
    judged = [
        verdict(
            f"{given['data']}/{n}", difficulty="easy", sql=f"SELECT {n} -- {path.stem}",
            scores={measure: float(mark in right) for measure, right in rights.items()},
        )
        for n, mark in enumerate(marks)
    ]  # fmt: skip
    found = summary(*judged, **given)
    if path.name == "verdicts.json":
        write_result(path.parent, found)
    else:
        write_text(path, as_json(found))
    return path


def sheet(path: Path, right: str, **more: Any) -> Path:
    """Write a result; of each question 1 is right by both measures, + by EX alone, 0 by none."""
    programs = {"spider_ex": "program @ 1", "spider_ts": "program @ 1"}
    settings = {"data": "spider-dev", "fingerprint": "f", "versions": {"sqlite": "3"}}
    rights = {"spider_ex": "1+", "spider_ts": "1"}
    return write_marks(path, right, rights, comparators=programs, **settings | more)


def opened(page: Path) -> dict[str, Any]:
    """Read the data of a page as the browser does."""
    found = re.findall(r'id="data-(\w+)">([^<]*)<', page.read_text(encoding="utf-8"))
    return {name: json.loads(gzip.decompress(b64decode(text))) for name, text in found}


def answers(folder: Path, rights: Sequence[bool], *, samples: int = 0) -> Report:
    """Write an evaluation's answers, and perhaps sampled ones: of each question one more than half
    of them is right where the greedy answer is, else one less.
    """
    verdicts: list[QuestionVerdict] = []
    lines: list[Any] = [{"step": 0, "version": 2}]
    for number, right in enumerate(rights):
        asked = question(number, "test")
        said = turn(asked, right=right, kind=number)
        own = {"id": asked["id"], "gold_result": asked.pop("gold_result")}
        prompt = f"CREATE TABLE item (name, price);\n{asked['question']}"
        answer = {"ended": "done", "turns": [said]}
        lines.append({"step": number + 1, **own, "prompt": prompt, "trajectories": [answer]})
        asked |= {"sql": said["sql"], "scores": {"set": float(right)}, "gold_status": "ok"}
        asked |= {"status": said["result"]["status"], "clauses": ("WHERE", "ORDER BY")}
        verdicts.append(QuestionVerdict(**asked))
    write(folder / "trajectories.jsonl", lines)
    write_result(folder, summary(*verdicts))
    if samples:
        counts = (samples // 2 + (1 if right else -1) for right in rights)
        sampled = [
            replace(one, samples=(one.sql,) * samples, right=count)
            for one, count in zip(verdicts, counts, strict=True)
        ]
        write_result(folder / "samples", summary(*sampled, decode=f"pass@{samples}"))
    return read_place(folder)


def make_run(
    folder: Path, *, steps: int = 8, groups: int = 4, questions: int = 40, seed: int = 0,
    rate: float = 0.001, samples: int = 0,
) -> Path:  # fmt: skip
    """Write a whole run; one with samples began with a screening and a warm start, too. Of twenty
    questions seven are right before learning, of which it loses one; it wins five and the seed.
    """
    before = [n % 20 < 7 for n in range(questions)]
    after = [1 <= n % 20 < 12 + seed for n in range(questions)]
    rights = {"before": before, "after": after}
    if samples:
        rights["between"] = [(before, after)[n % 2][n] for n in range(questions)]
        part = {"questions": 800, "never": 0.35, "sometimes": 0.3, "always": 0.35, "right": 0.5}
        shares = {"all": part, "difficulty": {"easy": part}, "database": {"<b>pets": part}}
        write(folder / SCREENED_SHARES, shares)
    reports = {
        place: answers(folder / place, own, samples=samples) for place, own in rights.items()
    }
    sampled: list[Any] = [{"step": 0, "version": 2}]
    numbers = []
    for step in range(1, steps + 1):
        share = 0.3 + 0.4 * step / steps
        numbers.append(
            {
                "step": step,
                "rollout/accuracy": share,
                "rollout/accuracy_first": share - 0.05,
                "reward/total": 2 * share,
                "reward/format": 0.5,
                "tag/WHERE_ERROR": 0.5 - share / 2,
                "groups/live_share": 0.2,
                "update/entropy": 0.1 * 0.99**step,
                # Nearly constant: a scale of less than rounding had endless ticks.
                "update/correction_mean": 0.999999 if step == 3 else 1.0,
                "time/rollout_tokens_per_s": 3000,
                **({"validation/accuracy": share - 0.1} if step % 2 == 0 else {}),
            }
        )
        if step == 1 or step % 4 == 0:
            places = range(step * groups, (step + 1) * groups)
            sampled += [group(n, step, 3 * n % 9) for n in places]
    write(folder / "trajectories.jsonl", sampled)
    write(folder / "metrics.jsonl", numbers)
    told = {"questions": questions, "rule": "set", **outcome(reports)}
    write(folder / "result.json", told | {"seed": seed, "accelerator": "cpu", "seconds": 432.1})
    settings = {
        "seed": seed,
        "run": {"name": "made-up", "dir": str(folder)},
        "model": {"path": f"starts/seed{seed}/model"},
        "reward": {"kind": "expo"},
        "train": {"steps": steps, "optimizer": {"learning_rate": rate}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    write(folder / "versions.json", {"sqlite": "3.54.1", "jax": "0.10.2"})
    return folder


LONG = ("x" * 100_000, "\n" * 3_000, "\x00" * 5_000 + "</textarea></title>")
HOSTILE = (*read("hostile_page"), *LONG, "constructor")
ALL = "\n".join(HOSTILE)


def make_hostile(folder: Path) -> Path:
    """Write a run in which every text is hostile; a question and a group have all in each field."""
    make_run(folder, steps=1, questions=len(HOSTILE), groups=1)
    for name in ("trajectories.jsonl", "before/trajectories.jsonl", "after/trajectories.jsonl"):
        lines = json_lines(folder / name)
        for text, line in zip((ALL, *HOSTILE[1:]), lines[1:], strict=False):
            spoil(line, text, name)
        write(folder / name, lines)
    for name in ("before", "after"):
        path = folder / name / "predictions.jsonl"
        lines = json_lines(path)
        for number, (text, line) in enumerate(zip((ALL, *HOSTILE[1:]), lines, strict=True)):
            line |= dict.fromkeys(("db_id", "difficulty", "question", "gold_sql", "sql"), text)
            line["id"] = f"{number} {text[:200]}"
        write(path, lines)
    [numbers] = json_lines(folder / "metrics.jsonl")
    write(folder / "metrics.jsonl", [numbers | dict.fromkeys(HOSTILE, 1.0)])
    settings = {"seed": 0, "run": {"name": HOSTILE[0]}, HOSTILE[1]: HOSTILE[2], "train": {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    write(folder / "versions.json", {HOSTILE[0]: HOSTILE[1]})
    return folder


def spoil(line: dict[str, Any], text: str, kind: str) -> None:
    own = f"{line['step'] - 1} {text[:200]}" if "/" in kind else f"{kind} {text[:200]}"
    wide = [one[:200] for one in HOSTILE] * 5
    table = result(wide, [[*wide[:98], None, {"blob": text[:9]}]] * 20, width=2_000, count=9_999)
    line |= {"id": own, "prompt": text, "evidence": text, "gold_result": table}
    if "/" not in kind:
        line |= dict.fromkeys(("db_id", "difficulty", "question", "gold_sql"), text)
    keys = dict.fromkeys((one[:200] for one in HOSTILE), 1.0)
    for one in line["trajectories"]:
        one |= {"spans": [[0, 0, len(text), -1.0], [0, 3, 7, 1.0]], "parts": keys}
        for said in one["turns"]:
            said |= {"reply": f"{text} {text}", "sql": text, "tags": [*keys], "observation": text}
            said |= {"kind": text, "correct": False}
            said["result"] = table | {"rows": table["rows"][:3]}
        one["turns"][-1]["result"] = {"status": text, "message": text}
