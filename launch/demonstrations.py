"""Replies to learn from before reinforcement learning: the warm start's demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from minirl.sft import Demonstration
from sqlenv.mistakes import mistake
from sqlenv.parse import tables_of
from sqlenv.types import Episode, Example, Observation


class Teacher(Protocol):
    """An environment that says what is wrong with a reply."""

    def reset(self, example: Example) -> tuple[Episode, Observation]:
        """Ask the question."""
        ...

    def step(self, episode: Episode, reply: str) -> tuple[Episode, Observation | None]:
        """Judge a reply."""
        ...


def write_reply(sql: str) -> str:
    """Write a query as a reply in the required form; the thought names the tables it reads."""
    return f"<think> {', '.join(tables_of(sql))} </think> <sql> {sql} </sql>"


def demonstrations(
    examples: Sequence[Example],
    environment: Teacher,
    *,
    mistake_share: float,
    repair_share: float,
    seed: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Demonstration]:
    """Make a demonstration of every example.

    Args:
        examples: Questions with gold queries.
        environment: Asks them, and diagnoses wrong replies.
        mistake_share: Of those that are no repairs, the share whose answer has a mistake
            (`sqlenv.mistakes`).
        repair_share: Share that first make that mistake, then mend it after the environment's
            feedback. Where the mistake does not change the result, the right answer alone is shown.
        seed: Decides which ones.
        progress: Called with (done, in all, "").
    """
    rng = Random(f"{seed} demonstrations")
    made = []
    for number, example in enumerate(examples, start=1):
        draw = rng.random()
        if draw < repair_share:
            made.append(_repair(example, environment))
        else:
            has_mistake = draw < repair_share + (1 - repair_share) * mistake_share
            made.append(_answer(example, environment, has_mistake=has_mistake))
        if progress is not None and number % 100 == 0:
            progress(number, len(examples), "")
    return made


def _answer(example: Example, environment: Teacher, *, has_mistake: bool) -> Demonstration:
    _, question = environment.reset(example)
    wrong = mistake(example.gold_sql) if has_mistake else None
    return Demonstration((question,), (), write_reply(wrong or example.gold_sql), key=example.db_id)


def _repair(example: Example, environment: Teacher) -> Demonstration:
    episode, question = environment.reset(example)
    wrong = mistake(example.gold_sql)
    _, feedback = environment.step(episode, write_reply(wrong)) if wrong else (None, None)
    if wrong is None or feedback is None:  # no feedback: that mistake does not change the result
        return _answer(example, environment, has_mistake=False)
    dialogue = ((question, feedback), (write_reply(wrong),))
    # A key of its own: a group is as long as its longest member.
    return Demonstration(*dialogue, write_reply(example.gold_sql), key=(example.db_id, "repair"))
