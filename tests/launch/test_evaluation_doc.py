"""The examples of docs/evaluation.md are what evaluators say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.evaluation.cache import Progress
from launch.evaluation.decoding import GREEDY
from launch.evaluation.judging import MEASURES, JudgingTask, judge
from launch.evaluation.testsets import TEST_SETS
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import Example

from .small_sets import make_pets

TEXT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
PETS = [("ann", 3), ("bob", 5), ("cid", 5), ("ann", 9)]


def table(heading: str) -> list[list[str]]:
    """Read the table whose first cell is the heading."""
    lines = TEXT[TEXT.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines]


def test_verdicts_on_the_examples(tmp_path):
    (_, _, *measures), _, *rows = table("gold")
    path = make_pets(tmp_path / "pet.sqlite", PETS)
    examples = [
        Example(str(number), "?", "pet", path, gold) for number, (gold, *_) in enumerate(rows)
    ]
    task = JudgingTask(examples, [[row[1]] for row in rows], tuple(measures), GREEDY)
    limits = ExecutorConfig(isolation="thread")
    with Progress(tmp_path / "part", {}) as progress, Executor(limits) as executor:
        judged = judge(task, executor, progress).questions
    assert len(rows) > 10
    for row, one in zip(rows, judged, strict=True):
        expected = [float(cell) for cell in row[2:]]
        assert list(one.scores.values()) == pytest.approx(expected, abs=5e-4), row[:2]


def test_every_comparator_and_test_set_is_named():
    named = set(re.findall(r"`([a-z0-9_-]+)`", TEXT))
    assert set(MEASURES) <= named
    assert set(TEST_SETS) <= named


def test_published_sizes_are_those_of_the_code():
    sizes = {}
    for names, questions, *_ in table("`--data`")[2:]:
        counts = [int(count.replace(",", "")) for count in re.split(r", (?=\d)", questions)]
        each = [name.strip("` ") for name in names.split(",")]
        sizes |= dict(
            zip(each, counts * (1 if len(counts) == len(each) else len(each)), strict=True)
        )
    assert sizes == {name: one.questions for name, one in TEST_SETS.items()}
