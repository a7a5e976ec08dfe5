"""The single-turn and the diagnosed environment, on the real executor and a database made here."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from exchange import Message
from sqlenv.config import (
    AgenticConfig,
    DiagnosedConfig,
    SingleTurnConfig,
)
from sqlenv.envs.build import build_environment
from sqlenv.envs.diagnosed import Diagnosed
from sqlenv.envs.single_turn import SingleTurn
from sqlenv.evaluators import equality
from sqlenv.evaluators.comparators import Case, judge_cases
from sqlenv.prompts import feedback_text
from sqlenv.prompts.tags import TAG_SENTENCES
from sqlenv.types import Attempt, Example, Observation, SqlError, Table

TAGS = ("WHERE_ERROR", "SELECT_ERROR")
RIGHT = "<think>a</think><sql>SELECT name FROM singer WHERE age > 20</sql>"
WRONG = "<think>a</think><sql>SELECT name FROM singer</sql>"
BROKEN = "<think>a</think><sql>SELECT missing FROM singer</sql>"


def first_prompt(example: Example) -> Observation:
    return (Message("system", "Write SQL."), Message("user", example.question))


class Recorder:
    """Stands for the diagnostic tree: fixed tags, remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, example: Example, attempt: Attempt) -> tuple[tuple[str, ...], str]:
        self.calls.append(attempt.sql)
        return TAGS, feedback_text(example, TAGS)


def diagnosed(runner, feedback, **settings) -> Diagnosed:
    config = DiagnosedConfig(**settings)
    return Diagnosed(config, executor=runner, first_prompt=first_prompt, feedback=feedback)


def test_single_turn_judges_one_reply(runner, example):
    env = SingleTurn(SingleTurnConfig(), executor=runner, first_prompt=first_prompt)
    start, observation = env.reset(example)
    assert observation == first_prompt(example)
    for reply, correct in [(RIGHT, True), (WRONG, False), (BROKEN, False)]:
        episode, following = env.step(start, reply)
        assert following is None
        assert [attempt.correct for attempt in episode.attempts] == [correct]
    assert start.attempts == ()


def test_diagnosed_goes_on_until_the_first_match(runner, example):
    feedback = Recorder()
    env = diagnosed(runner, feedback)
    episode, _ = env.reset(example)
    episode, observation = env.step(episode, WRONG)
    assert observation is not None
    (message,) = observation
    assert message.role == "user"
    assert "WHERE_ERROR, SELECT_ERROR" in message.content
    assert TAG_SENTENCES["WHERE_ERROR"] in message.content
    assert episode.attempts[0].tags == TAGS
    episode, observation = env.step(episode, RIGHT)
    assert observation is None
    assert [attempt.correct for attempt in episode.attempts] == [False, True]
    assert episode.attempts[1].tags == ()
    assert feedback.calls == ["SELECT name FROM singer"]


@pytest.mark.parametrize("turns", [1, 4])
def test_diagnosed_ends_after_its_turns(runner, example, turns):
    feedback = Recorder()
    env = diagnosed(runner, feedback, turns=turns)
    episode, observation = env.reset(example)
    replies = 0
    while observation is not None:
        episode, observation = env.step(episode, WRONG)
        replies += 1
    assert replies == len(episode.attempts) == turns
    assert len(feedback.calls) == turns - 1


@pytest.mark.parametrize("reply", ["", "SELECT 1", "<think>long", "<sql>SELECT name FROM singer"])
def test_reply_without_a_complete_block_is_an_error_that_never_runs(example, reply):
    class NeverRuns:
        def execute(self, database: Path, sql: str):
            raise AssertionError(sql)

        gold = execute

    episode, observation = diagnosed(NeverRuns(), Recorder()).step(
        diagnosed(NeverRuns(), Recorder()).reset(example)[0], reply
    )
    assert observation is not None
    (attempt,) = episode.attempts
    assert (attempt.text, attempt.sql, attempt.correct) == (reply, "", False)
    assert isinstance(attempt.result, SqlError)


# Always right by its result, and nothing that the model could know.
LUCK = "<think>a</think><sql>SELECT name FROM singer WHERE age > 20 + 0 * random()</sql>"


@pytest.mark.parametrize("config", [SingleTurnConfig, DiagnosedConfig, AgenticConfig])
def test_luck_is_wrong(runner, example, config):
    settings = config(wrapping="sql_tag")
    env = build_environment(
        settings, executor=runner, first_prompt=first_prompt, feedback=Recorder()
    )
    episode, _ = env.step(env.reset(example)[0], LUCK)
    [attempt] = episode.attempts
    assert not attempt.correct
    assert isinstance(attempt.result, Table)
    assert attempt.result.rows == (("Bo",),)
    assert attempt.result.nondeterministic


@pytest.mark.parametrize("config", [SingleTurnConfig, DiagnosedConfig, AgenticConfig])
def test_a_gold_that_reads_the_clock_is_right_and_a_date_written_out_is_not(
    runner, example, config
):
    env = build_environment(
        config(wrapping="sql_tag"), executor=runner, first_prompt=first_prompt,
        feedback=Recorder(),
    )  # fmt: skip
    gold = "SELECT name, strftime('%Y', 'now') - age FROM singer WHERE date('now') > '2020'"
    asked = replace(example, gold_sql=gold)
    today = time.strftime("%Y", time.gmtime())
    for sql, correct in (
        (gold, True),
        ("SELECT name, CAST(strftime('%Y', CURRENT_DATE) AS INTEGER) - age FROM singer", True),
        (f"SELECT name, {today} - age FROM singer", False),
    ):
        episode, _ = env.step(env.reset(asked)[0], f"<think>a</think><sql>{sql}</sql>")
        assert episode.attempts[-1].correct == correct, sql


def test_official_verdicts_know_no_luck(runner, example):
    sql = LUCK.partition("<sql>")[2].removesuffix("</sql>")
    names = ("set", "bird_ex", "spider_ex")
    [judged] = judge_cases(runner, [Case(sql, example.gold_sql, example.database)], names)
    assert judged.scores == dict.fromkeys(names, 1.0)


def test_numbers_are_compared_with_each_gold_once(runner, example, monkeypatch):
    """It is the slow part of judging a large result."""
    asked: list[int] = []
    compared = equality._numbers_up_to
    monkeypatch.setattr(
        equality, "_numbers_up_to", lambda *given: asked.append(1) or compared(*given)
    )
    for alternatives, count in (((), 1), (("SELECT 0.25", "SELECT 0.3"), 3)):
        asked.clear()
        example = replace(example, gold_sql="SELECT 0.5", alternatives=alternatives)
        env = SingleTurn(SingleTurnConfig(), executor=runner, first_prompt=first_prompt)
        episode, _ = env.step(env.reset(example)[0], "<sql>SELECT 0.1 + 0.2</sql>")
        assert episode.attempts[0].correct == bool(alternatives)
        assert len(asked) == count
