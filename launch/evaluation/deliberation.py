"""Verbal RL (PaVeRL-SQL, paper 003, section III-B): `--decode judge@K` on all questions of a split.

A model writes queries until K of them run, judges them, and the best one answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial

from launch import cli
from launch.evaluation.client import CachedClient
from launch.evaluation.endpoint import Endpoint
from launch.evaluation.sources import Answers, EvaluationJob, Sampled
from rewards import verbal
from rewards.verbal import Ask, Choice, Task, Texts
from sqlenv.dialects import transpile
from sqlenv.errors import UserError
from sqlenv.sql.extraction import extract_sql
from sqlenv.types import Example, Result, SqlError

_log = logging.getLogger(__name__)

# Questions of a policy in this process that are played side by side.
_CHUNK = 32

Game = Generator[list[Ask], Texts, Choice]
Play = Callable[[Mapping[str, Game], CachedClient], Iterator[tuple[str, Choice]]]


_COUNTS = ("attempts", "executable", "refused", "judged", "left_out")


def deliberate(
    job: EvaluationJob,
    examples: Sequence[Example],
    client: CachedClient,
    play: Play,
    show: Callable[[int, int, str], None],
) -> Answers:
    """Let the model write several queries for each question, judge them, and take the best.

    Raises:
        UserError: The model refuses every request.
    """
    config = job.config
    games = {
        one.id: verbal.deliberate(_task(one, job), config.verbal, seed=config.seed)
        for one in examples
    }
    found: dict[str, Choice] = {}
    for name, choice in play(games, client):
        found[name] = choice
        written = client.spent.completion_tokens
        show(len(found), len(examples), f"{written:,} tokens written")
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
        prompt=sql.single_turn_prompt(example),
        judge_prompt=partial(sql.judge_prompt, example),
        extract=partial(extract_sql, tag=job.config.env.wrapping),
        execute=execute,
        name=example.id,
    )


def play_in_step(games: Mapping[str, Game], client: CachedClient) -> Iterator[tuple[str, Choice]]:
    """Play questions side by side, so that a sampler in this process has many asks at a time."""
    names = list(games)
    for at in range(0, len(names), _CHUNK):
        yield from _together({name: games[name] for name in names[at : at + _CHUNK]}, client)


def play_apart(endpoint: Endpoint, parallel: int, timeout_s: float) -> Play:
    """Return what plays questions in threads, each at its own pace, as an endpoint serves best."""

    def play(games: Mapping[str, Game], client: CachedClient) -> Iterator[tuple[str, Choice]]:
        def alone(name: str, game: Game) -> tuple[str, Choice]:
            try:
                return next(_together({name: game}, client))
            finally:
                client.release()

        threads = ThreadPoolExecutor(parallel, thread_name_prefix="question")
        try:
            futures = [threads.submit(alone, *item) for item in games.items()]
            for future in as_completed(futures):
                yield future.result()
        except KeyboardInterrupt:
            _log.warning(
                "calls under way end, in %g s at most; interrupt again not to wait for them",
                timeout_s,
            )
            raise
        finally:
            # After a failure or an interruption calls under way end, and no more begin.
            endpoint.stop()
            try:
                threads.shutdown(cancel_futures=True)
            except KeyboardInterrupt:
                cli.give_up()

    return play


def _together(games: Mapping[str, Game], client: CachedClient) -> Iterator[tuple[str, Choice]]:
    """Play questions in step, so that their asks are answered together."""
    wishes = {name: next(game) for name, game in games.items()}
    while wishes:
        answers = client.texts(list(wishes.items()))
        for name, texts in zip(list(wishes), answers, strict=True):
            try:
                wishes[name] = games[name].send(texts)
            except StopIteration as end:
                del wishes[name]
                yield name, end.value
