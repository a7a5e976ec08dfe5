"""Verbal RL (PaVeRL-SQL, paper 003, section III-B): `--decode judge@K` on all questions of a split.

A model writes queries until K of them run, judges them, and the best one answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from launch.evaluation.client import CachedClient
from launch.evaluation.sources import Answers, EvaluationJob, Sampled
from rewards import verbal
from rewards.verbal import Choice, Task
from sqlenv.dialects import transpile
from sqlenv.errors import UserError
from sqlenv.sql.extraction import extract_sql
from sqlenv.types import Example, Result, SqlError

_CHUNK = 256  # questions that are asked about together
_COUNTS = ("attempts", "executable", "refused", "judged", "left_out")


def deliberate(
    job: EvaluationJob,
    examples: Sequence[Example],
    client: CachedClient,
    show: Callable[[int, int, str], None],
) -> Answers:
    """Let the model write several queries for each question, judge them, and take the best."""
    found: dict[str, Choice] = {}
    for at in range(0, len(examples), _CHUNK):
        games = {
            one.id: verbal.deliberate(_task(one, job), job.config.verbal, seed=job.config.seed)
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
        raise UserError(f"the model took no request at all: {client.refusal}")
    choices = [found[one.id] for one in examples]
    return Answers(
        [Sampled((choice.sql,), choice=asdict(choice)) for choice in choices],
        {
            **{name: sum(getattr(choice, name) for choice in choices) for name in _COUNTS},
            "cost": {kind: asdict(cost) for kind, cost in sorted(client.cost.items())},
        },
    )


def _task(example: Example, job: EvaluationJob) -> Task:
    sql = job.sql

    def execute(queries: Sequence[str]) -> Sequence[Result]:
        texts = [transpile(query, example.dialect) for query in queries]
        pairs = [(example.database, text) for text in texts if isinstance(text, str)]
        results = iter(sql.executor.execute_many(pairs))
        return [text if isinstance(text, SqlError) else next(results) for text in texts]

    return Task(
        prompt=sql.prompts.single_turn(example),
        judge_prompt=partial(sql.prompts.judge, example),
        extract=partial(extract_sql, tag=job.config.env.wrapping),
        execute=execute,
        name=example.id,
    )
