"""Replies to learn from before reinforcement learning: the warm start's demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from launch.data.reply_format import ReplyFormat
from minirl.train.supervised import Demonstration
from sqlenv.data.corruptions import corrupt
from sqlenv.envs.build import Environment
from sqlenv.types import Example


def demonstrations(
    examples: Sequence[Example],
    environment: Environment,
    *,
    mistake_share: float,
    repair_share: float,
    seed: int,
    reply_format: ReplyFormat,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Demonstration]:
    """Demonstrate the answer to every example.

    With a tool, a demonstration is the transcript of an episode: the query as a call, the tool's
    response, the query as the answer; a repair calls with a corrupted query first.

    `repair_share` of the demonstrations first give a corrupted query, then correct it after the
    feedback (the right answer alone where the corruption does not change the result), and
    `mistake_share` of the others answer with a corrupted query. The seed decides which ones.
    """
    is_agentic = reply_format.agent is not None
    answer, repair = (_transcript, _long_transcript) if is_agentic else (_answer, _repair)
    rng = Random(f"{seed} demonstrations")
    made = []
    for number, example in enumerate(examples, start=1):
        draw = rng.random()
        if draw < repair_share:
            made.append(repair(example, environment, reply_format))
        else:
            has_mistake = draw < repair_share + (1 - repair_share) * mistake_share
            sql = (corrupt(example.gold_sql) if has_mistake else None) or example.gold_sql
            made.append(answer(example, environment, reply_format, sql))
        if progress is not None and number % 100 == 0:
            progress(number, len(examples), "")
    return made


def _answer(example: Example, env: Environment, form: ReplyFormat, sql: str) -> Demonstration:
    _, question = env.reset(example)
    return Demonstration((question,), (), form.answer(sql), key=example.db_id)


def _repair(example: Example, env: Environment, form: ReplyFormat) -> Demonstration:
    episode, question = env.reset(example)
    wrong = corrupt(example.gold_sql)
    _, feedback = env.step(episode, form.answer(wrong)) if wrong else (None, None)
    if wrong is None or feedback is None:  # the corruption does not change the result
        return _answer(example, env, form, example.gold_sql)
    dialogue = ((question, feedback), (form.answer(wrong),))
    # A key of its own: a group is as long as its longest member.
    return Demonstration(*dialogue, form.answer(example.gold_sql), key=(example.db_id, "repair"))


def _transcript(
    example: Example, env: Environment, form: ReplyFormat, *queries: str
) -> Demonstration:
    """Call the tool with each query, and answer with the last one; that call is learnt too."""
    episode, question = env.reset(example)
    observations, replies = [question], []
    for sql in queries:
        reply = form.call(sql, example)
        episode, response = env.step(episode, reply)
        assert response is not None
        observations.append(response)
        replies.append(reply)
    return Demonstration(
        tuple(observations),
        tuple(replies),
        form.last(queries[-1]),
        learnt=2,
        learn_responses=False,
        key=(example.db_id, len(queries)),
    )


def _long_transcript(example: Example, env: Environment, form: ReplyFormat) -> Demonstration:
    assert form.agent is not None
    wrong = corrupt(example.gold_sql) if form.agent.calls > 1 else None
    return _transcript(example, env, form, *filter(None, (wrong, example.gold_sql)))
