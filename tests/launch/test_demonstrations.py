"""What the warm start is shown: right answers, mistakes, and mistakes that are mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.demonstrations import demonstrations, reply
from sqlenv.mistakes import mistake
from sqlenv.types import Episode, Example, Message

RIGHT = "SELECT name FROM singer WHERE age > 20"
WRONG = "SELECT name FROM singer"
EXAMPLES = [Example(str(n), "Who is old?", f"db{n // 8}", Path("db"), RIGHT) for n in range(400)]


class Teacher:
    """Asks, and says of every reply but the right one that it is wrong."""

    def reset(self, example):
        return Episode(example, ()), (Message("user", example.question),)

    def step(self, episode, text):
        return episode, None if text == reply(RIGHT) else (Message("user", "Wrong."),)


def shown(**shares):
    return demonstrations(EXAMPLES, Teacher(), seed=0, **shares)


def test_a_reply_names_the_tables_before_the_query():
    assert reply(RIGHT) == f"<think> singer </think> <sql> {RIGHT} </sql>"
    assert mistake(RIGHT) == WRONG


def test_all_answers_are_right_unless_a_share_is_asked_for():
    found = shown(mistake_share=0.0, repair_share=0.0)
    assert {one.target for one in found} == {reply(RIGHT)}
    assert {len(one.observations) for one in found} == {1}


def test_shares_are_those_asked_for_and_every_repair_ends_right():
    found = shown(mistake_share=0.5, repair_share=0.25)
    repairs = [one for one in found if one.replies]
    answers = [one for one in found if not one.replies]
    assert len(repairs) / len(found) == pytest.approx(0.25, abs=0.05)
    wrong = sum(one.target == reply(WRONG) for one in answers)
    assert wrong / len(answers) == pytest.approx(0.5, abs=0.07)
    assert {(one.replies, one.target) for one in repairs} == {((reply(WRONG),), reply(RIGHT))}
    assert {one.key for one in repairs}.isdisjoint({one.key for one in answers})


def test_the_seed_decides():
    shares = {"mistake_share": 0.5, "repair_share": 0.25}
    assert shown(**shares) == shown(**shares)
    other = demonstrations(EXAMPLES, Teacher(), seed=1, **shares)
    assert other != shown(**shares)


def test_a_mistake_that_the_environment_takes_for_right_is_not_mended():
    lenient = Teacher()
    lenient.step = lambda episode, text: (episode, None)
    found = demonstrations(EXAMPLES, lenient, mistake_share=0.0, repair_share=1.0, seed=0)
    assert {(one.replies, one.target) for one in found} == {((), reply(RIGHT))}
