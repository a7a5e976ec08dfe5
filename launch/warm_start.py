"""The warm start: supervised training on demonstrations, before reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import jax
from flax import nnx

from launch import cli
from launch.build import SqlSide, load_model, model_folder
from launch.config import JobConfig, dump
from launch.data.contamination import check_overlap
from launch.data.prompts import ReplyFormat
from launch.run_folder import WARM_MODEL, claimed
from minirl.model import huggingface
from minirl.run import distributed
from minirl.train.supervised import Demonstration, supervise
from minirl.types import Progress
from sqlenv.data.corruptions import corrupt
from sqlenv.envs.single_turn import BaseEnvironment
from sqlenv.types import Example


def start_model(config: JobConfig, folder: Path, sql: SqlSide, train: Sequence[Example]) -> Path:
    """Return the model folder that reinforcement learning starts from, after the warm start."""
    source = distributed.from_first(lambda: model_folder(config, folder, sql, train))
    warm = config.warm_start
    target = folder / WARM_MODEL
    if warm is None or distributed.from_first(target.exists):
        return source if warm is None else target
    model, tokenizer = load_model(config, source, lora=warm.lora)
    if warm.examples is not None and warm.examples < len(train):
        rng = Random(f"{config.seed} warm start")
        train = [train[number] for number in sorted(rng.sample(range(len(train)), warm.examples))]
    with cli.progress_bar("demonstrations") as progress:
        taught = demonstrations(
            train, sql.environment(tokenizer),
            mistake_share=warm.mistake_share, repair_share=warm.repair_share,
            seed=config.seed, reply_format=ReplyFormat.of(config), progress=progress,
        )  # fmt: skip
    warm_folder = folder / "warm"
    with cli.progress_bar("warm start") as progress:
        progress(0, warm.steps, "")
        params = supervise(
            model, taught, tokenizer, warm,
            seed=config.seed, folder=warm_folder, progress=progress,
        )  # fmt: skip
    nnx.update(model, params)
    if distributed.count() > 1:
        nnx.update(model, jax.tree.map(distributed.whole, nnx.state(model)))
    distributed.from_first(lambda: huggingface.save(model, target, source=source))
    return target


def only_warm_start(config: JobConfig) -> Path:
    """Run the warm start of a job, or what is left of it; return the model's folder."""
    claim = claimed(config.folder, dump(config))
    with distributed.held_by_first(claim) as folder, SqlSide(config, folder) as sql:
        train = sql.examples("train")
        distributed.from_first(lambda: check_overlap(config, {"train": train}))
        return start_model(config, folder, sql, train)


def demonstrations(
    examples: Sequence[Example],
    environment: BaseEnvironment,
    *,
    mistake_share: float,
    repair_share: float,
    seed: int,
    reply_format: ReplyFormat,
    progress: Progress | None = None,
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
    example: Example, env: BaseEnvironment, form: ReplyFormat, queries: Sequence[str]
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
    example: Example, env: BaseEnvironment, form: ReplyFormat, queries: Sequence[str]
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
