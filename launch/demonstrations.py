"""Replies to learn from before reinforcement learning: the warm start's demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from launch.forms import Form
from minirl.train.supervised import Demonstration
from sqlenv.data.corruptions import corrupt
from sqlenv.types import Episode, Example, Observation


class Teacher(Protocol):
    """An environment that says what is wrong with a reply."""

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        """Ask the question."""
        ...

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply."""
        ...


def demonstrations(
    examples: Sequence[Example],
    environment: Teacher,
    *,
    mistake_share: float,
    repair_share: float,
    seed: int,
    form: Form | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Demonstration]:
    """Make a demonstration of every example.

    Where the form has a tool, a demonstration is the transcript of an episode: the query as a call,
    the tool's response, the query as the answer; a repair calls with the mistake first.

    Args:
        examples: Questions with gold queries.
        environment: Asks them, and diagnoses wrong replies.
        mistake_share: Of those that are no repairs, the share whose answer has a mistake
            (`sqlenv.data.corruptions`).
        repair_share: Share that first make that mistake, then mend it after the environment's
            feedback. Where the mistake does not change the result, the right answer alone is shown.
        seed: Decides which ones.
        form: How queries are written; None for `<sql>` tags in one reply.
        progress: Called with (done, in all, "").
    """
    form = form or Form()
    answer, repair = (_answer, _repair) if form.agent is None else (_transcript, _long_transcript)
    rng = Random(f"{seed} demonstrations")
    made = []
    for number, example in enumerate(examples, start=1):
        draw = rng.random()
        if draw < repair_share:
            made.append(repair(example, environment, form))
        else:
            has_mistake = draw < repair_share + (1 - repair_share) * mistake_share
            sql = (corrupt(example.gold_sql) if has_mistake else None) or example.gold_sql
            made.append(answer(example, environment, form, sql))
        if progress is not None and number % 100 == 0:
            progress(number, len(examples), "")
    return made


def _answer(example: Example, environment: Teacher, form: Form, sql: str) -> Demonstration:
    _, question = environment.reset(example)
    return Demonstration((question,), (), form.answer(sql), key=example.db_id)


def _repair(example: Example, environment: Teacher, form: Form) -> Demonstration:
    episode, question = environment.reset(example)
    wrong = corrupt(example.gold_sql)
    _, feedback = environment.step(episode, form.answer(wrong)) if wrong else (None, None)
    if wrong is None or feedback is None:  # no feedback: that mistake does not change the result
        return _answer(example, environment, form, example.gold_sql)
    dialogue = ((question, feedback), (form.answer(wrong),))
    # A key of its own: a group is as long as its longest member.
    return Demonstration(*dialogue, form.answer(example.gold_sql), key=(example.db_id, "repair"))


def _transcript(example: Example, environment: Teacher, form: Form, *queries: str) -> Demonstration:
    """Call the tool with each query, and answer with the last one; that call is learnt too."""
    episode, question = environment.reset(example)
    observations, replies = [question], []
    for sql in queries:
        reply = form.call(sql, example)
        episode, response = environment.step(episode, reply)
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


def _long_transcript(example: Example, environment: Teacher, form: Form) -> Demonstration:
    assert form.agent is not None
    wrong = corrupt(example.gold_sql) if form.agent.calls > 1 else None
    queries = (example.gold_sql,) if wrong is None else (wrong, example.gold_sql)
    return _transcript(example, environment, form, *queries)
