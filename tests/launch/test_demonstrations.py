"""What the warm start is shown: right answers, mistakes, and mistakes that are mended."""

from pathlib import Path
from typing import Any

import pytest

from launch.config import WarmStartConfig, load_config
from launch.config_files import packaged
from launch.data.prompts import Prompts, ReplyFormat
from launch.screening import OwnAnswer
from launch.warm_start import TaughtAnswer, demonstrations, own_reply
from minirl.exchange import Message
from sqlenv.config import AgenticConfig, ExecutorConfig
from sqlenv.envs.agentic import Agentic, Call, read_call
from sqlenv.envs.build import build_environment
from sqlenv.executor import Executor
from sqlenv.sql.answers import answer_of
from sqlenv.types import Episode, Example, Observation
from tests.vectors import read
from tests.worlds import OVER_20 as RIGHT

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


def demonstrated(asked, environment: Any, form: ReplyFormat, *, seed=0, **shares: Any):
    answers = [TaughtAnswer(example, RIGHT) for example in asked]
    warm, nobody = WarmStartConfig(**shares), lambda *_: None
    return demonstrations(answers, environment, warm, form, seed=seed, progress=nobody)


def shown(*right: str, **more: Any):
    asked = [Example(str(n), "Who is old?", f"db{n // 8}", Path("db"), RIGHT) for n in range(400)]
    return demonstrated(asked, Teacher(ANSWER, *right), ReplyFormat(brief=True), **more)


def test_shares_are_those_asked_for_and_every_repair_ends_right():
    assert {(len(one.observations), one.replies) for one in shown()} == {(1, (ANSWER,))}
    found = shown(mistake_share=0.5, repair_share=0.25)
    repairs = [one for one in found if len(one.replies) > 1]
    answers = [one for one in found if one not in repairs]
    assert len(repairs) / len(found) == pytest.approx(0.25, abs=0.05)
    wrong = sum(one.replies == (MISTAKE,) for one in answers)
    assert wrong / len(answers) == pytest.approx(0.5, abs=0.07)
    assert {one.replies for one in repairs} == {(MISTAKE, ANSWER)}
    assert {one.key for one in repairs}.isdisjoint({one.key for one in answers})
    assert shown(mistake_share=0.5, repair_share=0.25) == found
    assert shown(mistake_share=0.5, repair_share=0.25, seed=1) != found


def test_a_mistake_that_the_environment_takes_for_right_is_not_mended():
    found = shown(MISTAKE, repair_share=1.0)
    assert {one.replies for one in found} == {(ANSWER,)}


# Transcripts of tool-calling episodes (the cold start).


def transcript(example, *, agent=AGENT, brief=False, **shares: Any):
    form = ReplyFormat("fence", agent, brief=brief)
    with Executor(ExecutorConfig()) as executor:
        environment = Agentic(
            agent, executor=executor, first_prompt=lambda e: (Message("user", e.question),)
        )
        (found,) = demonstrated([example], environment, form, **shares)
    return found


def test_a_transcript_calls_sees_the_rows_and_answers(example):
    found = transcript(example)
    question, response = found.observations
    assert question == (Message("user", "Who is over 20?"),)
    assert response == (Message("user", "<tool_response>\n[['Bo']]\n</tool_response>"),)
    reply, answer = found.replies
    assert reply.startswith("<tool_call>")
    assert "```sql" in reply  # as the prompt shows a call
    assert '"db_id": "music/music.sqlite"' in reply
    assert read_call(answer_of(reply, "fence"), AGENT) == Call(RIGHT, is_final=False)
    assert answer == f"```sql\n{RIGHT}\n```"
    assert (found.learnt, found.learn_responses) == (2, False)


def test_a_long_transcript_mends_its_first_call(example):
    found = transcript(example, repair_share=1.0)
    queries = [read_call(answer_of(reply, "fence"), AGENT) for reply in found.replies[:-1]]
    assert queries == [Call(WRONG, is_final=False), Call(RIGHT, is_final=False)]
    rows = [message[0].content.split("\n")[1] for message in found.observations[1:]]
    assert rows == ["[['Ada']]", "[['Bo']]"]
    # The call with the mistake is not learnt; a transcript with one answers with it.
    assert (found.replies[-1], found.learnt) == (f"```sql\n{RIGHT}\n```", 2)
    assert transcript(example, mistake_share=1.0).replies[-1] == f"```sql\n{WRONG}\n```"


# What every config's prompt asks for, and what its environment reads of a demonstration.
FORMS = read("demonstrations")
((TAG,), (FENCE,)) = (FORMS[name] for name in ("progress.yaml", "paverl.yaml"))


@pytest.mark.parametrize("name", packaged())
def test_a_demonstration_is_what_the_prompt_asks_for(name, example):
    config = load_config(name, [])
    form = ReplyFormat.of(config)
    replies = (form.answer(RIGHT),)
    if form.agent is not None:
        replies = (form.call(RIGHT, example), form.last(RIGHT))
    assert [*replies] == FORMS[name]
    with Executor(ExecutorConfig()) as executor:
        env = build_environment(
            config.env,
            executor=executor,
            first_prompt=lambda e: (Message("user", e.question),),
            feedback=lambda *_: ((), ""),
        )
        episode, asked = env.reset(example)
        for reply in replies:
            assert asked is not None
            episode, asked = env.step(episode, reply)
    assert asked is None
    assert [attempt.sql for attempt in episode.attempts] == [RIGHT] * len(replies)
    assert all(attempt.correct for attempt in episode.attempts)
    prompt = Prompts(config.prompt, config.env).training(example)
    shown = "\n".join(message.content for message in prompt)
    assert replies[0].split()[0] in shown or form.brief


def test_own_answers_keep_the_reasoning_that_the_prompt_asks_for():
    thought = f"<think>\nOld is above 20.\n</think>\n{TAG}"
    reasons = ReplyFormat(reasons=True)
    assert own_reply(OwnAnswer(RIGHT, thought, 1), reasons) == thought
    # Not where the prompt asks for the query alone, after feedback, in another form, with a tool.
    for form, reply, turn in (
        (ReplyFormat(), thought, 1),
        (reasons, thought, 2),
        (reasons, FENCE, 1),
        (ReplyFormat("fence", AGENT, reasons=True), f"So:\n{FENCE}", 1),
    ):
        assert own_reply(OwnAnswer(RIGHT, reply, turn), form) == ""


def test_transcripts_follow_the_names_and_limits_of_the_environment(example):
    config = AgenticConfig(calls=1, tool="execute_sql", finish_tool="finish")
    found = transcript(example, agent=config, brief=True, repair_share=1.0)
    # One call alone leaves no room for a mistake.
    calls = [read_call(answer_of(reply, "fence"), config) for reply in found.replies]
    assert calls == [Call(RIGHT, is_final=False), Call(RIGHT, is_final=True)]
    assert "db_id" not in found.replies[0]
