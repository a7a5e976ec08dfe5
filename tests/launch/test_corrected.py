"""`launch.eval --corrections`: verdicts by published golds beside those by corrected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exchange import UserError
from launch import eval as command
from tests.worlds import write

from .small_sets import GOLDS

# The oldest pet is asked for; the published gold of another question counts what is not there.
FIXED: list[dict[str, Any]] = [
    {"question_id": 1, "db_id": "pets", "SQL": "SELECT age FROM pet WHERE age > 3"},
    {"question_id": 2, "db_id": "pets", "SQL": GOLDS[2], "grading_method": "set"},
    {"question_id": 3, "db_id": "shop", "gold_sql": "SELECT 7", "question": "How many, tripled?"},
    {"question_id": 4, "db_id": "shop", "gold_sql": GOLDS[4], "alternatives": ["SELECT 'pen'"]},
]


def evaluate(root: Path, folder: Path, answers: list[str], fixed: list[dict[str, Any]]) -> Any:
    (folder / "p.sql").write_text("".join(f"{sql}\n" for sql in answers))
    corrections, out = write(folder / "fixed.json", fixed), folder / "o.json"
    arguments = ["--predictions", str(folder / "p.sql"), "--data", "bird-dev"]
    where = ["--data-root", str(root), "--json", str(out)]
    command.main([*arguments, *where, "--corrections", str(corrections)])
    return json.loads(out.read_text())


def test_both_columns_stand_beside_each_other(bird, tmp_path, capsys):
    answers = [GOLDS[0], "SELECT age FROM pet WHERE age > 3", GOLDS[2], GOLDS[3], "SELECT 'pen'"]
    sheet = evaluate(bird, tmp_path, answers, FIXED)
    scores = [question["scores"] for question in sheet["questions"]]
    assert [one["bird_ex"] for one in scores] == [1, 0, 1, 1, 0]
    # What asks for something else now is not judged by its new gold.
    assert [one.get("corrected") for one in scores] == [1, 1, 1, None, 1]
    assert sheet["measures"]["bird_ex"]["questions"] == 5
    assert sheet["measures"]["corrected"] | {"ci95": 0} == {"mean": 1, "questions": 4, "ci95": 0}
    found = sheet["corrected"]
    assert (found["difference"], found["questions"]) == (0.5, 4)
    assert (found["gained"], found["lost"]) == (["bird/dev/1", "bird/dev/4"], [])
    assert found["asked_anew"] == ["bird/dev/3"]
    assert found["ci95"][0] < 0.5 < found["ci95"][1]
    told = " ".join(capsys.readouterr().out.split())
    assert "+50.0 points" in told
    assert "2 right by the corrected gold query alone: bird/dev/1, bird/dev/4" in told
    assert sheet["settings"]["corrections"].startswith("fixed.json@")


def test_another_copy_is_another_evaluation(bird, tmp_path):
    evaluate(bird, tmp_path, GOLDS, FIXED)
    with pytest.raises(UserError, match="holds verdicts of other settings"):
        evaluate(bird, tmp_path, GOLDS, FIXED[:1])


def test_corrections_of_something_else_are_refused(bird, tmp_path):
    other = [{**FIXED[0], "db_id": "shop"}]
    failing = [{**FIXED[0], "SQL": "SELECT x FROM pet"}, {**FIXED[3], "gold_sql": "ELECT 1"}]
    with pytest.raises(UserError, match=r"^--corrections: .* is about database shop"):
        evaluate(bird, tmp_path, GOLDS, other)
    told = r"^--corrections: fixed\.json@\w+: gold queries fail: question 1 \(no .*; question 4 \("
    with pytest.raises(UserError, match=told):
        evaluate(bird, tmp_path, GOLDS, failing)
    # Before anything is asked or judged, so that no verdicts of these are in the way of others.
    evaluate(bird, tmp_path, GOLDS, FIXED)
