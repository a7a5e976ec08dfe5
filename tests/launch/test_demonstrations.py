"""What the warm start is shown: right answers, mistakes, and mistakes that are mended."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from exchange import Message
from launch.data.prompts import ReplyFormat
from launch.warm_start import demonstrations
from sqlenv.config import AgenticConfig, ExecutorConfig
from sqlenv.envs.agentic import Agentic, Call, read_call
from sqlenv.executor import Executor
from sqlenv.sql.answers import answer_of
from sqlenv.types import Episode, Example, Observation
from tests.databases import make_file

RIGHT = "SELECT name FROM singer WHERE age > 20"
WRONG = "SELECT name FROM singer WHERE age < 20"
ANSWER, MISTAKE = (f"<think> singer </think> <sql> {sql} </sql>" for sql in (RIGHT, WRONG))
AGENT = AgenticConfig()


class Teacher:
    """Asks, and says of every reply but the right ones that it is wrong."""

    def __init__(self, *right: str) -> None:
        self.right = right

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        return Episode(example, ()), (Message("user", example.question),)

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        return episode, None if reply in self.right else (Message("user", "Wrong."),)


def shown(*right: str, mistake_share: float = 0.0, repair_share: float = 0.0, seed: int = 0):
    asked = [Example(str(n), "Who is old?", f"db{n // 8}", Path("db"), RIGHT) for n in range(400)]
    return demonstrations(
        asked,
        cast(Any, Teacher(ANSWER, *right)),
        mistake_share=mistake_share,
        repair_share=repair_share,
        seed=seed,
        reply_format=ReplyFormat(),
    )


def test_shares_are_those_asked_for_and_every_repair_ends_right():
    assert {(len(one.observations), one.target) for one in shown()} == {(1, ANSWER)}
    found = shown(mistake_share=0.5, repair_share=0.25)
    repairs = [one for one in found if one.replies]
    answers = [one for one in found if not one.replies]
    assert len(repairs) / len(found) == pytest.approx(0.25, abs=0.05)
    wrong = sum(one.target == MISTAKE for one in answers)
    assert wrong / len(answers) == pytest.approx(0.5, abs=0.07)
    assert {(one.replies, one.target) for one in repairs} == {((MISTAKE,), ANSWER)}
    assert {one.key for one in repairs}.isdisjoint({one.key for one in answers})
    assert shown(mistake_share=0.5, repair_share=0.25) == found
    assert shown(mistake_share=0.5, repair_share=0.25, seed=1) != found


def test_a_mistake_that_the_environment_takes_for_right_is_not_mended():
    found = shown(MISTAKE, repair_share=1.0)
    assert {(one.replies, one.target) for one in found} == {((), ANSWER)}


# Transcripts of tool-calling episodes (the cold start).


@pytest.fixture
def singer(tmp_path) -> Example:
    script = "CREATE TABLE singer (name, age); INSERT INTO singer VALUES ('Ada', 19), ('Bo', 30)"
    return Example("1", "Who is old?", "music", make_file(tmp_path / "music.sqlite", script), RIGHT)


def transcript(example, *, agent=AGENT, brief=False, mistake_share=0.0, repair_share=0.0):
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        environment = Agentic(
            agent, executor=executor, first_prompt=lambda e: (Message("user", e.question),)
        )
        (found,) = demonstrations(
            [example],
            environment,
            mistake_share=mistake_share,
            repair_share=repair_share,
            seed=0,
            reply_format=ReplyFormat("fence", agent, brief=brief),
        )
    return found


def test_a_transcript_calls_sees_the_rows_and_answers(singer):
    found = transcript(singer)
    question, response = found.observations
    assert question == (Message("user", "Who is old?"),)
    assert response == (Message("user", "<tool_response>\n[['Bo']]\n</tool_response>"),)
    (reply,) = found.replies
    assert reply.startswith("<think> singer </think> <tool_call>")
    assert '"db_id": "music/music.sqlite"' in reply
    assert read_call(answer_of(reply, "fence"), AGENT) == Call(RIGHT, is_final=False)
    assert found.target == f"```sql\n{RIGHT}\n```"
    assert (found.learnt, found.learn_responses) == (2, False)


def test_a_long_transcript_mends_its_first_call(singer):
    found = transcript(singer, repair_share=1.0)
    queries = [read_call(answer_of(reply, "fence"), AGENT) for reply in found.replies]
    assert queries == [Call(WRONG, is_final=False), Call(RIGHT, is_final=False)]
    rows = [message[0].content.split("\n")[1] for message in found.observations[1:]]
    assert rows == ["[['Ada']]", "[['Bo']]"]
    # The call with the mistake is not learnt.
    assert (found.target, found.learnt) == (f"```sql\n{RIGHT}\n```", 2)


def test_a_transcript_with_a_mistake_answers_with_it(singer):
    assert transcript(singer, mistake_share=1.0).target == f"```sql\n{WRONG}\n```"


def test_transcripts_follow_the_names_and_limits_of_the_environment(singer):
    config = AgenticConfig(calls=1, tool="execute_sql", finish_tool="finish")
    found = transcript(singer, agent=config, brief=True, repair_share=1.0)
    # One call alone leaves no room for a mistake.
    assert [read_call(answer_of(reply, "fence"), config) for reply in found.replies] == [
        Call(RIGHT, is_final=False)
    ]
    assert "db_id" not in found.replies[0]
    assert read_call(answer_of(found.target, "fence"), config) == Call(RIGHT, is_final=True)
