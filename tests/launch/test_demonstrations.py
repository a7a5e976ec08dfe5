"""What the warm start is shown: right answers, mistakes, and mistakes that are mended."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest

from launch.data.demonstrations import demonstrations
from launch.data.reply_format import ReplyFormat
from sqlenv.config import AgenticConfig, ExecutorConfig
from sqlenv.data.corruptions import corrupt
from sqlenv.envs.agentic import Agentic, Call, read_call
from sqlenv.executor import Executor
from sqlenv.types import Episode, Example, Message, Observation

RIGHT = "SELECT name FROM singer WHERE age > 20"
WRONG = "SELECT name FROM singer WHERE age < 20"
AGENT = AgenticConfig()
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
        cast(Any, Teacher(ReplyFormat().answer(RIGHT), right)),
        mistake_share=mistake_share,
        repair_share=repair_share,
        seed=seed,
        reply_format=ReplyFormat(),
    )


def test_a_reply_names_the_tables_before_the_query():
    assert ReplyFormat().answer(RIGHT) == f"<think> singer </think> <sql> {RIGHT} </sql>"
    assert corrupt(RIGHT) == WRONG


def test_shares_are_those_asked_for_and_every_repair_ends_right():
    right = shown(mistake_share=0.0, repair_share=0.0)
    assert {one.target for one in right} == {ReplyFormat().answer(RIGHT)}
    assert {len(one.observations) for one in right} == {1}
    found = shown(mistake_share=0.5, repair_share=0.25)
    repairs = [one for one in found if one.replies]
    answers = [one for one in found if not one.replies]
    assert len(repairs) / len(found) == pytest.approx(0.25, abs=0.05)
    wrong = sum(one.target == ReplyFormat().answer(WRONG) for one in answers)
    assert wrong / len(answers) == pytest.approx(0.5, abs=0.07)
    assert {(one.replies, one.target) for one in repairs} == {
        ((ReplyFormat().answer(WRONG),), ReplyFormat().answer(RIGHT))
    }
    assert {one.key for one in repairs}.isdisjoint({one.key for one in answers})
    assert shown(mistake_share=0.5, repair_share=0.25) == found
    assert shown(mistake_share=0.5, repair_share=0.25, seed=1) != found


def test_a_mistake_that_the_environment_takes_for_right_is_not_mended():
    found = shown(mistake_share=0.0, repair_share=1.0, right=ReplyFormat().answer(WRONG))
    assert {(one.replies, one.target) for one in found} == {((), ReplyFormat().answer(RIGHT))}


# Transcripts of tool-calling episodes (the cold start).


@pytest.fixture
def singers(tmp_path) -> list[Example]:
    path = tmp_path / "music.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE singer (name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO singer VALUES (?, ?)", [("Ada", 19), ("Bo", 30)])
    return [Example(str(n), "Who is old?", "music", path, RIGHT) for n in range(200)]


def transcripts(examples, *, agent=AGENT, brief=False, mistake_share=0.0, repair_share=0.0):
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        environment = Agentic(
            agent, executor=executor, first_prompt=lambda e: (Message("user", e.question),)
        )
        return demonstrations(
            examples,
            environment,
            mistake_share=mistake_share,
            repair_share=repair_share,
            seed=0,
            reply_format=ReplyFormat("fence", agent, brief=brief),
        )


def test_a_transcript_calls_sees_the_rows_and_answers(singers):
    (first, *rest) = transcripts(singers)
    assert all(one == first for one in rest)
    question, response = first.observations
    assert question == (Message("user", "Who is old?"),)
    assert response == (Message("user", "<tool_response>\n[['Bo']]\n</tool_response>"),)
    (reply,) = first.replies
    assert reply.startswith("<think> singer </think> <tool_call>")
    assert '"db_id": "music/music.sqlite"' in reply
    assert read_call(reply, AGENT) == Call(RIGHT, is_final=False)
    assert first.target == f"```sql\n{RIGHT}\n```"
    assert (first.learnt, first.learn_responses) == (2, False)


def test_a_long_transcript_mends_its_first_call(singers):
    found = transcripts(singers, repair_share=1.0)
    for one in found:
        queries = [read_call(reply, AGENT) for reply in one.replies]
        assert queries == [Call(WRONG, is_final=False), Call(RIGHT, is_final=False)]
        assert [m[0].content.split("\n")[1] for m in one.observations[1:]] == [
            "[['Ada']]",
            "[['Bo']]",
        ]
        assert one.target == f"```sql\n{RIGHT}\n```"
        # The call with the mistake is not learnt.
        assert one.learnt == 2


def test_a_transcript_with_a_mistake_answers_with_it(singers):
    (one,) = transcripts(singers[:1], mistake_share=1.0)
    assert one.target == f"```sql\n{WRONG}\n```"


def test_transcripts_follow_the_names_and_limits_of_the_environment(singers):
    config = AgenticConfig(calls=1, tool="execute_sql", finish_tool="finish")
    found = transcripts(singers[:3], agent=config, brief=True, repair_share=1.0)
    for one in found:
        # One call alone leaves no room for a mistake.
        assert [read_call(reply, config) for reply in one.replies] == [Call(RIGHT, is_final=False)]
        assert "db_id" not in one.replies[0]
        assert read_call(one.target, config) == Call(RIGHT, is_final=True)
