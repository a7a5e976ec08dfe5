"""Votes, intervals, breakdowns and files of predictions, by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from launch.eval_job import show

from launch.evaluation.official import write_official
from launch.evaluation.sampling import Evaluator, Line, vote
from launch.evaluation.verdicts import Verdict, accuracy, breakdown, read_verdicts
from minirl.errors import UserError
from sqlenv.types import Attempt, Example, SqlError, Table, TimedOut


def ran(sql: str, *rows: tuple[int, ...]) -> Attempt:
    return Attempt(f"<sql>{sql}</sql>", sql, Table(("a",), rows), correct=False)


def failed(sql: str) -> Attempt:
    return Attempt(sql, sql, SqlError("no such table"), correct=False)


def verdict(number: int, *, sql: str = "SELECT 1", correct: bool = False, **more: str) -> Verdict:
    fields = {"db_id": "d", "difficulty": "", "question": "?", "gold": f"SELECT {number}"} | more
    return replace(Verdict(str(number), "", "", "", "", sql, correct), **fields)


def example(number: int) -> Example:
    return Example(str(number), "?", "d", Path("d"), f"SELECT {number}")


# Votes.


def test_the_commonest_result_wins_and_its_first_query_answers():
    chosen = vote([ran("a", (1,)), ran("b", (2,)), ran("c", (2,)), failed("d"), failed("e")])
    assert chosen is not None
    assert chosen.sql == "b"


def test_results_are_sets_of_rows():
    """Order and repetition of rows make no other result."""
    chosen = vote([ran("a", (9,)), ran("b", (1,), (2,)), ran("c", (2,), (1,), (1,))])
    assert chosen is not None
    assert chosen.sql == "b"


def test_ties_go_to_the_result_seen_first():
    chosen = vote([failed("x"), ran("a", (2,)), ran("b", (1,)), ran("c", (1,)), ran("d", (2,))])
    assert chosen is not None
    assert chosen.sql == "a"


def test_an_empty_result_is_a_vote():
    chosen = vote([ran("a", (1,)), ran("b"), ran("c")])
    assert chosen is not None
    assert chosen.sql == "b"


def test_without_a_result_the_first_attempt_answers_and_without_any_none():
    late = Attempt("t", "t", TimedOut("steps"), correct=False)
    chosen = vote([late, failed("b"), failed("b")])
    assert chosen is late
    assert vote([]) is None


# Numbers.


def test_breakdown_counts_each_question_once_in_each_part():
    verdicts = [
        verdict(0, difficulty="extra", db_id="b", correct=True),
        verdict(1, difficulty="easy", db_id="b"),
        verdict(2, difficulty="easy", db_id="a", correct=True),
        verdict(3, db_id="a", correct=True),
    ]
    found = breakdown(verdicts)
    assert accuracy(verdicts) == 0.75
    assert found["overall"] == {"all": (4, 0.75)}
    assert found["difficulty"] == {"easy": (2, 0.5), "extra": (1, 1), "unknown": (1, 1)}
    assert list(found["difficulty"]) == ["easy", "extra", "unknown"]  # from easy to hard
    assert found["database"] == {"a": (2, 1), "b": (2, 0.5)}
    assert accuracy([]) == 0


# Files.


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


class Parrot(Evaluator):
    """Answers every question without a model, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def _free_memory(self) -> None:
        pass

    def _answer(
        self, examples: Sequence[Example], *, first: int
    ) -> tuple[list[Verdict], list[Line]]:
        self.asked.append((first, len(examples)))
        lines: list[Line] = [{"id": one.id, "trajectories": []} for one in examples]
        return [verdict(int(e.id), correct=int(e.id) % 2 == 0) for e in examples], lines


@pytest.fixture
def evaluator() -> Parrot:
    return Parrot()


def silent(*_: object) -> None:
    """Show no progress."""


def test_predictions_go_on_where_they_ended(evaluator, tmp_path):
    path = tmp_path / "new" / "predictions.jsonl"
    examples = [example(number) for number in range(300)]
    whole = evaluator.predict(examples, path, progress=silent)
    assert evaluator.asked == [(0, 128), (128, 128), (256, 44)]
    assert [v.id for v in whole] == [e.id for e in examples]
    content = path.read_text(encoding="utf-8")
    # A kill in the middle of a line: that question is asked again, no other one is.
    lines = content.splitlines(keepends=True)
    path.write_text("".join(lines[:200]) + lines[200][:20], encoding="utf-8")
    evaluator.asked.clear()
    assert evaluator.predict(examples, path, progress=silent) == whole
    assert evaluator.asked == [(200, 100)]
    assert path.read_text(encoding="utf-8") == content
    evaluator.asked.clear()
    assert evaluator.predict(examples, path, progress=silent) == whole
    assert evaluator.asked == []


def test_predictions_of_other_questions_are_refused_and_kept(evaluator, tmp_path):
    path = tmp_path / "predictions.jsonl"
    path.write_text(
        "".join(json.dumps(asdict(verdict(n))) + "\n" for n in (0, 1, 2)), encoding="utf-8"
    )
    before = path.read_bytes()
    for others in ([example(0), example(7), example(2)], [example(0), example(1)]):
        with pytest.raises(UserError, match="predictions for other questions"):
            evaluator.predict(others, path, progress=silent)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"pred": "SELECT 1"}\n', "line 1: id is missing"),
        (b"[1]\n", "line 1: should be"),
        (b"{\n", "line 1: broken JSON"),
        (b"\xff\n", "line 1: broken JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_file_of_predictions_is_told_in_a_line(tmp_path, content, words):
    path = tmp_path / "predictions.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_verdicts(path)
    assert str(caught.value).startswith(f"{path}: {words}")
    assert str(caught.value).endswith("; bring back the file of predictions, or move it away")


@pytest.mark.parametrize("correct", [None, "perhaps", 3])
def test_a_verdict_of_a_wrong_type_is_told_in_a_line(tmp_path, correct):
    path = tmp_path / "predictions.jsonl"
    good = asdict(verdict(0))
    path.write_text("".join(json.dumps(one) + "\n" for one in (good, good | {"correct": correct})))
    with pytest.raises(UserError, match="line 2: correct should be a valid boolean"):
        read_verdicts(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"ci95": [0.5]}', '{"ci95": "x"}'])
def test_a_damaged_result_is_told_in_a_line(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UserError, match=r"result.json: .*; delete it to make it again"):
        show(tmp_path)
