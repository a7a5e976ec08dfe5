"""Files of an evaluation: verdicts that are gone on with, and the official programs' forms."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from exchange import UserError
from launch.evaluation.results import QuestionVerdict
from launch.evaluation.sources import Sampled
from launch.evaluation.trajectories import write_trajectories
from launch.evaluation.verdicts import Verdict, read_verdicts, write_official
from sqlenv.config import ExecutorConfig
from sqlenv.types import Example


def verdict(number: int, *, sql: str = "SELECT 1", correct: bool = False, **more: str) -> Verdict:
    fields = {"db_id": "d", "difficulty": "", "question": "?", "gold": f"SELECT {number}"} | more
    return replace(Verdict(str(number), "", "", "", "", sql, correct), **fields)


def test_official_forms_are_a_line_a_question(tmp_path):
    sqls = {
        "SELECT a -- first\nFROM t\t/* all\nof it */ WHERE b = 1": "SELECT a FROM t WHERE b = 1",
        # The evaluators split inside quotes too.
        "SELECT 'a\tb\r\nc'": "SELECT 'a b c'",
        "SELECT '-- kept', \"x\u2028y\"": "SELECT '-- kept', \"x\u2028y\"",
        # A blank line would shift all later ones.
        "": "SELECT",
        "-- nothing\n": "SELECT",
    }
    verdicts = [verdict(n, sql=sql, db_id=f"d{n}") for n, sql in enumerate(sqls)]
    write_official(verdicts, tmp_path)
    text = (tmp_path / "predictions.sql").read_text(encoding="utf-8")
    assert text.split("\n") == [*sqls.values(), ""]
    bird = json.loads((tmp_path / "predictions_bird.json").read_text(encoding="utf-8"))
    expected = {str(n): f"{sql}\t----- bird -----\td{n}" for n, sql in enumerate(sqls.values())}
    assert bird == expected


GOOD = json.dumps(asdict(verdict(0))).encode()


@pytest.mark.parametrize(
    "content",
    [b'{"pred": "SELECT 1"}\n', b"[1]\n", b"{\n", b"\xff\n", GOOD.replace(b"false", b"3") + b"\n"],
)
def test_a_damaged_file_of_predictions_is_told_in_a_line(tmp_path, content):
    path = tmp_path / "predictions.jsonl"
    path.write_bytes(GOOD + b"\n" + content)
    with pytest.raises(UserError, match=r"predictions\.jsonl: line 2: "):
        read_verdicts(path)


def test_what_is_recorded_agrees_with_the_verdicts(tmp_path, database):
    """Also where the environment judged by its own rule, and a result is too large to be shown."""
    sql = "SELECT name FROM emp"
    turns = [{"sql": "", "kind": "call", "correct": False}]
    turns.append({"sql": sql, "kind": "answer", "correct": False})
    line = {"id": "1", "trajectories": [{"turns": turns}]}
    example = Example("1", "?", "emp", database, sql)
    judged = QuestionVerdict("1", "emp", "", "?", sql, {"set": 1.0}, "ok", "ok")
    rows = [(example, Sampled((sql,), line=one), judged, [True]) for one in (line, None)]
    limits = ExecutorConfig(isolation="thread", max_bytes=100)
    write_trajectories(tmp_path, rows, prompts=(), limits=limits)
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()[1:]
    episode, answer = (json.loads(one)["trajectories"][0]["turns"] for one in lines)
    assert [turn["correct"] for turn in episode] == [False, True]
    assert [(turn["correct"], turn["result"]) for turn in answer] == [(True, {"status": "ok"})]
