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
from launch.data.demonstrations import demonstrations
from launch.data.reply_format import ReplyFormat
from launch.run_folder import WARM_MODEL, claimed
from minirl.model import huggingface
from minirl.run import distributed
from minirl.train.supervised import supervise
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
