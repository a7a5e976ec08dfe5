"""Gold replies to learn from before reinforcement learning: the warm start's demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from minirl.sft import Demonstration
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


def gold_reply(sql: str) -> str:
    """Write a query as a reply in the required form; the thought names the tables it reads."""
    return f"<think> {', '.join(tables_of(sql))} </think> <sql> {sql} </sql>"


def demonstrations(
    examples: Sequence[Example],
    environment: Teacher,
    *,
    repair_share: float,
    seed: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Demonstration]:
    """Make a demonstration of every example.

    Args:
        examples: Questions with gold queries.
        environment: Asks them, and diagnoses wrong replies.
        repair_share: Share that first give another question's query of the same database, then
            mend it after the environment's feedback.
        seed: Decides which ones.
        progress: Called with (done, in all, "").
    """
    rng = Random(f"{seed} demonstrations")
    of_database: dict[str, list[Example]] = {}
    for example in examples:
        of_database.setdefault(example.db_id, []).append(example)
    made = []
    for number, example in enumerate(examples, start=1):
        is_repair = rng.random() < repair_share
        wrong = rng.choice(of_database[example.db_id]) if is_repair else None
        made.append(_demonstrate(example, wrong, environment))
        if progress is not None and number % 100 == 0:
            progress(number, len(examples), "")
    return made


def _demonstrate(example: Example, wrong: Example | None, environment: Teacher) -> Demonstration:
    episode, question = environment.reset(example)
    target = gold_reply(example.gold_sql)
    if wrong is not None and wrong.gold_sql != example.gold_sql:
        mistake = gold_reply(wrong.gold_sql)
        _, feedback = environment.step(episode, mistake)
        if feedback is not None:  # None: another query with the same result is no mistake
            return Demonstration((question, feedback), (mistake,), target, key=example.db_id)
    return Demonstration((question,), (), target, key=example.db_id)
