"""Verbal RL (PaVeRL-SQL, section III-B): `--decode judge@K` on all questions of a split.

A model writes queries until K of them run, judges them, and the best one answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from launch.build import SqlSide
from launch.config import JobConfig
from launch.evaluation.client import CachedClient
from launch.evaluation.sources import Answers, Sampled, Show
from rewards import verbal
from rewards.verbal import Choice, Task
from sqlenv.dialects import run_many
from sqlenv.errors import UserError
from sqlenv.sql.extraction import extract_sql
from sqlenv.types import Example, Result

_CHUNK = 256  # questions that are asked about together
_COUNTS = ("attempts", "executable", "refused", "judged", "left_out")


def deliberate(
    config: JobConfig, examples: Sequence[Example], client: CachedClient, sql: SqlSide, show: Show
) -> Answers:
    """Let the model write several queries for each question, judge them, and take the best."""
    found: dict[str, Choice] = {}
    for at in range(0, len(examples), _CHUNK):
        games = {
            one.id: verbal.deliberate(_task(one, config, sql), config.verbal, seed=config.seed)
            for one in examples[at : at + _CHUNK]
        }
        wishes = {name: next(game) for name, game in games.items()}
        while wishes:
            answers = client.texts(list(wishes.items()))
            for name, texts in zip(list(wishes), answers, strict=True):
                try:
                    wishes[name] = games[name].send(texts)
                except StopIteration as end:
                    found[name] = end.value
                    del wishes[name]
            show(len(found), len(examples), f"{client.spent.completion_tokens:,} tokens written")
        if client.refusal:
            raise UserError(client.refusal)
    choices = [found[one.id] for one in examples]
    return Answers(
        [Sampled((choice.sql,), choice=asdict(choice)) for choice in choices],
        {
            **{name: sum(getattr(choice, name) for choice in choices) for name in _COUNTS},
            "cost": {kind: asdict(cost) for kind, cost in sorted(client.cost.items())},
        },
    )


def _task(example: Example, config: JobConfig, sql: SqlSide) -> Task:
    def execute(queries: Sequence[str]) -> Sequence[Result]:
        return run_many(sql.executor.execute_many, [(example, query) for query in queries])

    return Task(
        prompt=sql.prompts.single_turn(example),
        judge_prompt=partial(sql.prompts.judge, example),
        extract=partial(extract_sql, tag=config.env.wrapping),
        execute=execute,
        name=example.id,
    )
