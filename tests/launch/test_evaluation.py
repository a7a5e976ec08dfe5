"""What an evaluation is by, and its record in files."""

import json
from dataclasses import asdict, replace

import pytest

from launch.evaluation.answers import Sampled
from launch.evaluation.questions import own_set, rule_of
from launch.evaluation.results import (
    ModelFacts,
    QuestionVerdict,
    Report,
    ReportSettings,
    as_json,
    read_report,
    summarise,
    write_result,
)
from launch.records import answer_line, write_answers
from minirl.exchange import UserError
from sqlenv.config import AnswerConfig
from sqlenv.evaluators.comparators import CaseVerdict
from sqlenv.types import Example


def verdict(number: int, *, sql: str = "SELECT 1", **more: str) -> QuestionVerdict:
    blank = QuestionVerdict(str(number), "d", "", "?", f"SELECT {number}", sql, {"set": 0.0})
    return replace(blank, **more)


def result(*verdicts: QuestionVerdict) -> Report:
    settings = ReportSettings(data="test", model=ModelFacts("m"), decode="greedy")
    return summarise(settings, verdicts)


def test_a_result_is_read_as_it_was_written(tmp_path):
    right = replace(verdict(1), scores={"set": 1.0, "ex_f": 0.5}, reply="So: SELECT 1")
    written = result(right, verdict(2))
    write_result(tmp_path / "folder", written)
    (tmp_path / "one.json").write_text(as_json(written))
    for path in (tmp_path / "folder", tmp_path / "one.json"):
        assert asdict(read_report(path))["questions"] == asdict(written)["questions"]


@pytest.mark.parametrize("content", [b'{"pred": "SELECT 1"}\n', b"[1]\n", b"{\n", b"\xff\n"])
def test_a_damaged_or_older_result_is_refused(tmp_path, content):
    write_result(tmp_path, result(verdict(0)))
    with (tmp_path / "predictions.jsonl").open("ab") as file:
        file.write(content)
    with pytest.raises(UserError, match=r"predictions\.jsonl: line 2: .*repeat the command"):
        read_report(tmp_path)


def test_what_is_recorded_agrees_with_the_verdicts(tmp_path, database):
    """Also where the environment judged by its own rule."""
    sql = "SELECT name FROM emp"
    turns = [{"sql": "", "kind": "call", "correct": False}]
    turns.append({"sql": sql, "kind": "answer", "correct": False})
    line = {"id": "1", "trajectories": [{"turns": turns}]}
    example = Example("1", "?", "emp", database, sql)
    seen = {"status": "ok", "rows": [["ann"]]}
    outcome = CaseVerdict({"set": 1.0}, seen, seen)
    judged = [
        answer_line(example, Sampled((sql,), line=one), verdict(1, sql=sql), [outcome])
        for one in (line, None)
    ]
    write_answers(tmp_path, judged, ())
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()[1:]
    episode, answer = (json.loads(one)["trajectories"][0]["turns"] for one in lines)
    assert [turn["correct"] for turn in episode] == [False, True]
    assert [(turn["correct"], turn["result"]) for turn in answer] == [(True, seen)]


def test_a_job_with_witnesses_is_judged_on_them_first_and_by_its_rule_alone():
    """An official rule keeps its name for itself."""
    asks = AnswerConfig(match="spider_ex", witnesses=2)
    found = own_set("test", (), asks)
    assert found.measures == ("witness", "spider_ex")
    assert rule_of(found.measures) == "spider_ex"
    assert found.witnesses == 2
    assert own_set("test", (), AnswerConfig(match="spider_ex")).measures == ("spider_ex",)
