"""What the warm start is shown: right answers, mistakes, and mistakes that are mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.demonstrations import demonstrations, write_reply
from sqlenv.mistakes import mistake
from sqlenv.types import Episode, Example, Message, Observation

RIGHT = "SELECT name FROM singer WHERE age > 20"
WRONG = "SELECT name FROM singer WHERE age < 20"
EXAMPLES = [Example(str(n), "Who is old?", f"db{n // 8}", Path("db"), RIGHT) for n in range(400)]


class Teacher:
    """Asks, and says of every reply but the right ones that it is wrong."""

    def __init__(self, *right: str) -> None:
        self.right = right

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        return Episode(example, ()), (Message("user", example.question),)

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        return episode, None if reply in self.right else (Message("user", "Wrong."),)


def shown(*, mistake_share: float, repair_share: float, seed: int = 0, right: str = ""):
    return demonstrations(
        EXAMPLES,
        Teacher(write_reply(RIGHT), right),
        mistake_share=mistake_share,
        repair_share=repair_share,
        seed=seed,
    )


def test_a_reply_names_the_tables_before_the_query():
    assert write_reply(RIGHT) == f"<think> singer </think> <sql> {RIGHT} </sql>"
    assert mistake(RIGHT) == WRONG


def test_all_answers_are_right_unless_a_share_is_asked_for():
    found = shown(mistake_share=0.0, repair_share=0.0)
    assert {one.target for one in found} == {write_reply(RIGHT)}
    assert {len(one.observations) for one in found} == {1}


def test_shares_are_those_asked_for_and_every_repair_ends_right():
    found = shown(mistake_share=0.5, repair_share=0.25)
    repairs = [one for one in found if one.replies]
    answers = [one for one in found if not one.replies]
    assert len(repairs) / len(found) == pytest.approx(0.25, abs=0.05)
    wrong = sum(one.target == write_reply(WRONG) for one in answers)
    assert wrong / len(answers) == pytest.approx(0.5, abs=0.07)
    assert {(one.replies, one.target) for one in repairs} == {
        ((write_reply(WRONG),), write_reply(RIGHT))
    }
    assert {one.key for one in repairs}.isdisjoint({one.key for one in answers})


def test_the_seed_decides():
    found = shown(mistake_share=0.5, repair_share=0.25)
    assert shown(mistake_share=0.5, repair_share=0.25) == found
    assert shown(mistake_share=0.5, repair_share=0.25, seed=1) != found


def test_a_mistake_that_the_environment_takes_for_right_is_not_mended():
    found = shown(mistake_share=0.0, repair_share=1.0, right=write_reply(WRONG))
    assert {(one.replies, one.target) for one in found} == {((), write_reply(RIGHT))}
