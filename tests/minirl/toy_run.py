"""A toy run of reinforcement learning, also as a script that ends in the middle (see `main`)."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minirl.config import (
    BatchingConfig,
    Grpo,
    OptimizerConfig,
    SamplerConfig,
    TrainConfig,
)
from minirl.exchange import Message, Score
from minirl.model.sharding import make_mesh, param_shardings
from minirl.run import distributed
from minirl.run.metrics import JsonLines
from minirl.train.rollouts import TrainingTask
from minirl.train.trainer import Trainer
from minirl.train.update import Learner

STEPS = 8
SAMPLED = "sampled.jsonl"
# Gradients are cut to Adam's epsilon, so that a weight moves in proportion to its own. Otherwise it
# moves by the learning rate, and where its gradient is nearly 0 rounding decides which way.
SMOOTH = OptimizerConfig(learning_rate=2.0, weight_decay=0.0, max_grad_norm=1e-8)
CONFIG = TrainConfig(
    steps=STEPS,
    prompts_per_step=4,
    group_size=8,
    algorithm=Grpo(),
    optimizer=SMOOTH,
    # Two groups a micro-batch, whatever they say: wide rows, and lists of few lengths, so that few
    # programs are compiled.
    batching=BatchingConfig(micro_batch_tokens=2048, prompt_multiple=8, answer_multiple=192),
    eval_every=2,
    checkpoint_every=2,
    # Needs one more compilation, in every life that comes so far.
    kl_every=8,
    sample_every=3,
    env_workers=2,
)
SAMPLER = SamplerConfig(slots=16, max_prompt_tokens=8, max_response_tokens=20, max_reply_tokens=6)
# Of two processes with two devices each.
OF_SEVERAL = {"fsdp": 2, "tensor": 2}
EXAMPLES = ("AB", "CDE", "F", "GH", "IJKL", "MNO")
# What is said of the weights after so many updates; step 4 is the best and not among the newest.
ACCURACY = {2: 0.25, 4: 0.75, 6: 0.5, 8: 0.5}


_SHORT = {"steps": 4, "eval_every": 2, "checkpoint_every": 1, "kl_every": 2, "average": 0.5}
# Courses that a run can take, by name: changes of the settings, what is said of its weights, and
# the steps of a second stage, which starts from the second step's.
COURSES = {
    "short": (_SHORT, ACCURACY, 0),
    # The same of a model with linear attention, in steps small enough for what they round to stay.
    "hybrid": (
        _SHORT | {"optimizer": SMOOTH.model_copy(update={"learning_rate": 0.1})},
        ACCURACY,
        0,
    ),
    # Few groups are mixed, so that a step takes several rounds; then two updates, each of two
    # micro-batches, whose ratio compares with the step's start; some are skipped.
    "all": (
        {
            "steps": 4,
            "mini_batches": 2,
            "algorithm": Grpo(correctness_filter="mixed", max_rounds=3),
            "optimizer": SMOOTH.model_copy(update={"schedule": "cosine"}),
            "average": 0.5,
            "batching": BatchingConfig(
                micro_batch_tokens=1024, prompt_multiple=8, answer_multiple=192
            ),
            "eval_every": 1,
            "checkpoint_every": 2,
        },
        # The best of the first stage has no checkpoint.
        {1: 0.25, 2: 0.5, 3: 0.75, 4: 0.25, 5: 0.25, 6: 0.25},
        2,
    ),
}


@dataclass(frozen=True)
class Episode:
    example: str
    replies: tuple[str, ...] = ()


class Capitals:
    """Wants replies of capital letters alone, and gives a second chance."""

    def reset(self, example):
        return Episode(example), [Message("user", example)]

    def step(self, episode, reply):
        episode = replace(episode, replies=(*episode.replies, reply))
        is_over = score(episode).correct or len(episode.replies) == 2
        return episode, None if is_over else [Message("user", "NO")]


def scored(total, correct, spans=()):
    return Score(total, correct, {"letters": total}, spans)


def score(episode):
    """Pay the share of capitals in the last reply."""
    reply = episode.replies[-1]
    share = sum("A" <= letter < "a" for letter in reply) / max(len(reply), 1)
    return scored(share, share == 1)


def describe(episode):
    return {"toy/letters": float(len(episode.replies[-1]))}


def seldom_mixed(episode):
    """Call some replies to two of the examples correct, and none to the others; a reward that is
    no number lets an update be skipped.
    """
    letter = episode.replies[-1][:1]
    is_right = episode.example in {"AB", "GH"} and letter < "P"
    return scored(math.nan if letter == "b" else score(episode).total, is_right)


def take_course(toy, folder, course):
    """Make the trainer of a course."""
    changes, accuracy, _ = COURSES[course]
    judge = seldom_mixed if course == "all" else score

    def validate(params, version):
        distributed.check()  # as the rollouts of an evaluation do
        return accuracy[version]

    hybrid = course == "hybrid"
    return make_trainer(toy, folder, validate=validate, judge=judge, hybrid=hybrid, **changes)


def run(trainer, course, progress):
    """Run all stages of a trainer's course."""
    config, (*_, second) = trainer._config, COURSES[course]
    trainer.run(progress)
    if second:
        trainer.begin_stage(config.optimizer, first=config.steps, steps=second, start=2)
        trainer.run(progress)


class Writer:
    """Writes what a sampled step hands on, a line a trajectory."""

    def __init__(self, folder):
        self.path, self.lines = folder / SAMPLED, None

    def __call__(self, step, groups, rows):
        if self.lines is None:
            self.lines = JsonLines(self.path, resume_step=step - 1)
        for group, known in zip(groups, rows, strict=True):
            for trajectory, row in zip(group, known or [None] * len(group), strict=True):
                advantage = None if row is None else np.round(row.advantage, 6).tolist()
                line = {"record": trajectory.episode.record, "advantage": advantage}
                self.lines.write(step, line)


# Learners by what their programs depend on: they hold no weights of a model without adapters, and
# each would trace and compile all of them anew.
LEARNERS: dict[Any, Learner] = {}


def known_learner(settings, model, loss, optimizer, **options):
    """Return a learner with the programs of an earlier one of the same settings."""
    if model.layers.lora is not None:
        return Learner(model, loss, optimizer, **options)
    key = (*settings, nnx.graphdef(model))
    if key not in LEARNERS:
        LEARNERS[key] = Learner(model, loss, optimizer, **options)
    return copy.copy(LEARNERS[key])


def make_trainer(
    toy, folder, *, seed=0, examples=EXAMPLES, validate=None, judge=score, mesh=None,
    servers=None, rollout=None, write=None, hybrid=False, **changes,
):  # fmt: skip
    """Make a trainer on a copy of a toy model: the update takes the arrays over.

    It has one layer, or a hybrid's one period: nothing of a run depends on their number, and
    programs compile sooner.
    """
    config, tokenizer = CONFIG.model_copy(update=changes), toy.Tokenizer()
    task = TrainingTask(
        environment=Capitals(),
        score=judge,
        describe=describe,
        record=lambda episode: {
            "example": {"id": episode.example},
            "turns": [{"said": reply} for reply in episode.replies],
        },
        write=write or Writer(folder),
        train=examples,
        validate=validate or (lambda params, version: ACCURACY[version]),
        max_turns=2,
    )
    model = toy.model(layers=1, hybrid=hybrid)
    model = spread(model, make_mesh(OF_SEVERAL) if distributed.count() > 1 else mesh)
    settings = (config.algorithm, config.optimizer, SAMPLER.temperature)
    with patch("minirl.train.trainer.Learner", partial(known_learner, settings)):
        return Trainer(
            model, tokenizer, task, config, SAMPLER,
            seed=seed, folder=folder, servers=servers, rollout=rollout,
        )  # fmt: skip


def spread(model, mesh):
    """Copy a model to the devices of a mesh; None for the first device."""
    graph, params = nnx.split(model)
    if mesh is None:
        return nnx.merge(graph, jax.tree.map(jnp.copy, params))

    def shard(leaf, to):
        return jax.make_array_from_callback(leaf.shape, to, np.asarray(leaf).__getitem__)

    copied = nnx.merge(graph, jax.tree.map(shard, params, param_shardings(params, mesh)))
    copied.mesh = mesh
    return copied


def without_times(folder):
    """Return the lines of `metrics.jsonl`, written anew without what depends on the clock."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        json.dumps({key: value for key, value in record.items() if not key.startswith("time/")})
        for record in records
    ]


def metrics_of(folder):
    return [json.loads(line) for line in without_times(folder)]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def be_told():
    # The handler has run when this returns; after os.kill Python 3.11 may run it later.
    signal.raise_signal(signal.SIGTERM)


def arm(trainer, moment, at, end, *, nth=1):
    """Let `end` be called before the nth call of a method in a step, or of a checkpoint's rename.

    By then all of the checkpoint is written, but its folder does not yet have its name.
    """
    if moment == "rename":

        def rename(source, *rest, own):
            name = Path(os.fsdecode(source)).name
            if name.startswith(f"{at}.") and "tmp" in name:
                end()
            return own(source, *rest)

        for name in ("rename", "replace"):
            setattr(os, name, partial(rename, own=getattr(os, name)))
        return
    owner = {
        "advance": trainer._sampler,
        "_apply": trainer._learner,
        "update": trainer._learner,
        "save": trainer._checkpoints,
    }[moment]
    function, steps = getattr(owner, moment), []

    def call(*args, **kwargs):
        # A checkpoint is written after its step, everything else happens within it.
        steps.append(trainer.steps_done + (moment != "save"))
        if steps[-1] == at and steps.count(at) == nth:
            end()
        return function(*args, **kwargs)

    setattr(owner, moment, call)


def main(folder, course, moment, at, coordinator="", processes="1", process="0"):
    """Run a course; the last of its processes is killed."""
    if coordinator:
        place = int(processes), int(process)
        distributed.join(distributed.ProcessConfig(coordinator, *place, heartbeat_s=10))
    from tests.minirl import conftest

    toy = SimpleNamespace(model=conftest.toy_model, Tokenizer=conftest.ToyTokenizer)
    trainer = take_course(toy, Path(folder), course)
    if int(process) == int(processes) - 1:
        arm(trainer, moment, int(at), die)
    run(trainer, course, lambda *_: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
