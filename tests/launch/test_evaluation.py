"""Files of an evaluation: verdicts that are gone on with, and the official programs' forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launch.evaluation.official import write_official
from launch.evaluation.sampling import Evaluator
from launch.evaluation.verdicts import Verdict, accuracy, read_verdicts
from minirl.errors import UserError
from sqlenv.types import Attempt, Episode, Example, Table


def verdict(number: int, *, sql: str = "SELECT 1", correct: bool = False, **more: str) -> Verdict:
    fields = {"db_id": "d", "difficulty": "", "question": "?", "gold": f"SELECT {number}"} | more
    return replace(Verdict(str(number), "", "", "", "", sql, correct), **fields)


def example(number: int) -> Example:
    return Example(str(number), "?", "d", Path("d"), f"SELECT {number}")


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
        self._environment = self._recorded = self._decode = self._validation = None  # type: ignore[assignment]
        self._max_turns = 1

    def free_memory(self) -> None:
        pass

    def _sample(
        self, examples: Sequence[Example], decode: Any, environment: Any, *, first: int
    ) -> list[Any]:
        self.asked.append((first, len(examples)))
        table = Table(("a",), ())
        attempts = [Attempt("", "SELECT 1", table, correct=int(e.id) % 2 == 0) for e in examples]
        return [
            _group(Episode(e, (one,)), {"id": e.id, "trajectories": []})
            for e, one in zip(examples, attempts, strict=True)
        ]


def _group(episode: Episode, line: dict[str, Any]) -> Any:
    from launch.evaluation.sampling import _SampledGroup

    return _SampledGroup((episode,), line)


def silent(*_: object) -> None:
    """Show no progress."""


def test_predictions_go_on_where_they_ended(tmp_path):
    evaluator, path = Parrot(), tmp_path / "new" / "predictions.jsonl"
    examples = [example(number) for number in range(300)]
    whole = evaluator.predict(examples, path, progress=silent)
    assert evaluator.asked == [(0, 128), (128, 128), (256, 44)]
    assert [v.id for v in whole] == [e.id for e in examples]
    assert (accuracy(whole), accuracy([])) == (0.5, 0)
    assert evaluator.accuracy(examples) == 0.5
    content = path.read_text(encoding="utf-8")
    # A kill in the middle of a line: that question is asked again, no other one is.
    lines = content.splitlines(keepends=True)
    path.write_text("".join(lines[:200]) + lines[200][:20], encoding="utf-8")
    evaluator.asked.clear()
    assert evaluator.predict(examples, path, progress=silent) == whole
    assert evaluator.asked == [(200, 100)]
    assert path.read_text(encoding="utf-8") == content
    for others in ([example(0), example(7)], examples[:100]):
        with pytest.raises(UserError, match="predictions for other questions"):
            evaluator.predict(others, path, progress=silent)
    assert path.read_text(encoding="utf-8") == content


GOOD = json.dumps(asdict(verdict(0))).encode()


@pytest.mark.parametrize(
    "content",
    [b'{"pred": "SELECT 1"}\n', b"[1]\n", b"{\n", b"\xff\n", GOOD.replace(b"false", b"3") + b"\n"],
)
def test_a_damaged_file_of_predictions_is_told_in_a_line(tmp_path, content):
    path = tmp_path / "predictions.jsonl"
    path.write_bytes(GOOD + b"\n" + content)
    with pytest.raises(UserError, match=r"predictions\.jsonl: line 2: .*; bring back the file"):
        read_verdicts(path)
