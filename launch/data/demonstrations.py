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
    demonstrate = _answer if reply_format.agent is None else _transcript
    rng = Random(f"{seed} demonstrations")
    made = []
    for number, example in enumerate(examples, start=1):
        draw, gold = rng.random(), example.gold_sql
        repairs = draw < repair_share
        has_mistake = repairs or draw < repair_share + (1 - repair_share) * mistake_share
        wrong = corrupt(gold) if has_mistake else None
        queries = [wrong, gold] if repairs and wrong else [gold if repairs else wrong or gold]
        made.append(demonstrate(example, environment, reply_format, queries))
        if progress is not None and number % 100 == 0:
            progress(number, len(examples), "")
    return made


def _answer(
    example: Example, env: Environment, form: ReplyFormat, queries: Sequence[str]
) -> Demonstration:
    """Answer with the last query, after the feedback on one before."""
    episode, question = env.reset(example)
    *wrong, last = map(form.answer, queries)
    feedback = env.step(episode, wrong[0])[1] if wrong else None
    if feedback is None:  # the corruption does not change the result
        return Demonstration((question,), (), last, key=example.db_id)
    # A key of its own: a group is as long as its longest member.
    return Demonstration((question, feedback), (wrong[0],), last, key=(example.db_id, "repair"))


def _transcript(
    example: Example, env: Environment, form: ReplyFormat, queries: Sequence[str]
) -> Demonstration:
    """Call the tool with each query, and answer with the last one; that call is learnt too."""
    assert form.agent is not None
    episode, question = env.reset(example)
    observations, replies = [question], []
    for sql in queries[-form.agent.calls :]:
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
        key=(example.db_id, len(replies)),
    )
