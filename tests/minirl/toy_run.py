"""A toy run of reinforcement learning: test_trainer.py runs it whole, and as a script to be killed.

python toy_run.py FOLDER [MOMENT STEP [COURSE [COORDINATOR PROCESSES PROCESS]]]
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from launch import cli
from minirl.config import (
    BatchingConfig,
    Grpo,
    OptimizerConfig,
    SamplerConfig,
    SecondStage,
    TrainConfig,
)
from minirl.model.sharding import make_mesh, param_shardings
from minirl.run import distributed, preemption
from minirl.run.metrics import JsonLines
from minirl.train.rollouts import TrainingTask
from minirl.train.trainer import Trainer

STEPS = 8
CONFIG = TrainConfig(
    steps=STEPS,
    prompts_per_step=4,
    group_size=8,
    algorithm=Grpo(),
    optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=0.0),
    # Two micro-batches a step, all of one shape.
    batching=BatchingConfig(groups_per_batch=2, prompt_multiple=8, answer_multiple=24),
    eval_every=2,
    checkpoint_every=2,
    # Needs one more compilation, in every life that comes so far.
    kl_every=8,
    sample_every=3,
    env_workers=2,
)
SAMPLER = SamplerConfig(slots=16, max_prompt_tokens=8, max_response_tokens=20, max_reply_tokens=6)
EXAMPLES = ("AB", "CDE", "F", "GH", "IJKL", "MNO")
# What is said of the weights after so many updates; step 4 is the best and not among the newest.
ACCURACY = {2: 0.25, 4: 0.75, 6: 0.5, 8: 0.5}


# Courses that a run can take, by name: changes of the settings, and what is said of its weights.
COURSES = {
    "plain": ({}, ACCURACY),
    # The first stage fluctuates; its best checkpoint is the second of four.
    "two stages": (
        {"steps": 4, "second_stage": SecondStage(steps=3), "eval_every": 1, "checkpoint_every": 1},
        {1: 0.25, 2: 0.75, 3: 0.5, 4: 0.25, 5: 0.5, 6: 0.75, 7: 0.5},
    ),
    # Few groups are mixed, so that a step takes several rounds; then two updates, each of two
    # micro-batches, whose correction is that of the step's start.
    "all": (
        {
            "steps": 3,
            "second_stage": SecondStage(steps=2),
            "mini_batches": 2,
            "algorithm": Grpo(correctness_filter="mixed", max_rounds=3, correction="truncated"),
            "optimizer": OptimizerConfig(learning_rate=0.1, schedule="cosine", weight_decay=0.0),
            "batching": BatchingConfig(groups_per_batch=1, prompt_multiple=8, answer_multiple=24),
            "eval_every": 1,
            "checkpoint_every": 1,
        },
        {1: 0.25, 2: 0.75, 3: 0.5, 4: 0.5, 5: 0.5},
    ),
}


@dataclass(frozen=True)
class Said:
    role: str
    content: str


@dataclass(frozen=True)
class Episode:
    example: str
    replies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    turn: int
    start: int
    end: int
    value: float


@dataclass(frozen=True)
class Score:
    total: float
    correct: bool
    spans: tuple = ()

    @property
    def parts(self):
        return {"letters": self.total}


class Capitals:
    """Wants replies of capital letters alone, and gives a second chance."""

    def reset(self, example):
        return Episode(example), [Said("user", example)]

    def step(self, episode, reply):
        episode = replace(episode, replies=(*episode.replies, reply))
        is_over = score(episode).correct or len(episode.replies) == 2
        return episode, None if is_over else [Said("user", "NO")]


def score(episode):
    """Pay the share of capitals in the last reply."""
    reply = episode.replies[-1]
    share = sum("A" <= letter < "a" for letter in reply) / max(len(reply), 1)
    return Score(share, share == 1)


def describe(episode):
    return {"toy/letters": float(len(episode.replies[-1]))}


def seldom_mixed(episode):
    """Call some replies to two of the examples correct, and none to the others."""
    letter = episode.replies[-1][:1]
    is_right = episode.example in {"AB", "GH"} and letter < "P"
    return Score(score(episode).total, is_right)


def take_course(toy, folder, course):
    """Make the trainer of a course."""
    changes, accuracy = COURSES[course]
    judge = seldom_mixed if course == "all" else score
    validate = lambda params, version: accuracy[version]  # noqa: E731
    return make_trainer(toy, folder, validate=validate, judge=judge, **changes)


def make_trainer(
    toy, folder, *, seed=0, examples=EXAMPLES, validate=None, judge=score, mesh=None,
    servers=None, rollout=None, **changes,
):  # fmt: skip
    """Make a trainer on a copy of the toy model: the update takes the arrays over."""
    task = TrainingTask(
        environment=Capitals(),
        score=judge,
        describe=describe,
        record=lambda episode: {
            "example": {"id": episode.example},
            "turns": [{"said": reply} for reply in episode.replies],
        },
        train=examples,
        validate=validate or (lambda params, version: ACCURACY[version]),
        max_turns=2,
    )
    return Trainer(
        spread(toy.model(), make_mesh() if distributed.count() > 1 else mesh),
        toy.Tokenizer(),
        task,
        CONFIG.model_copy(update=changes),
        SAMPLER,
        seed=seed,
        folder=folder,
        servers=servers,
        rollout=rollout,
    )


def spread(model, mesh):
    """Copy a model to the devices of a mesh; None for the first device."""
    graph, params = nnx.split(model)
    if mesh is None:
        return nnx.merge(graph, jax.tree.map(jnp.copy, params))

    def place(leaf, to):
        return jax.make_array_from_callback(leaf.shape, to, np.asarray(leaf).__getitem__)

    copied = nnx.merge(graph, jax.tree.map(place, params, param_shardings(params, mesh)))
    for _, node in nnx.iter_graph(copied):
        if isinstance(node, nnx.Module) and hasattr(node, "mesh"):
            node.mesh = mesh
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


def be_noticed():
    signal.raise_signal(signal.SIGTERM)


def deadly_from_the_second(trainer, function, at):
    """Let the process be killed at the second call in a step."""
    steps = []

    def call(*args, **kwargs):
        if trainer.steps_done + 1 == at and at in steps:
            die()
        steps.append(trainer.steps_done + 1)
        return function(*args, **kwargs)

    return call


def arm(trainer, moment, at):
    """Let the process be killed at a moment of a step."""

    def deadly(function, *, is_time=None, before=lambda *_: None, end=die):
        def call(*args, **kwargs):
            if is_time(*args) if is_time else trainer.steps_done + 1 == at:
                before(*args)
                end()
            return function(*args, **kwargs)

        return call

    if moment in ("rollout", "notice"):
        end = die if moment == "rollout" else be_noticed
        Capitals.step = deadly(Capitals.step, end=end)
    elif moment in ("update", "apply"):
        # Between its micro-batches; after them.
        name = {"update": "_accumulate", "apply": "_apply"}[moment]
        setattr(trainer._learner, name, deadly(getattr(trainer._learner, name)))
    elif moment == "second update":
        trainer._learner.update = deadly_from_the_second(trainer, trainer._learner.update, at)
    elif moment == "metrics":

        def half_a_line(lines, *_):
            with lines._path.open("a") as file:
                file.write('{"step": ')

        JsonLines.write = deadly(
            JsonLines.write, is_time=lambda lines, step, _: step == at, before=half_a_line
        )
    elif moment == "checkpoint":
        # All is written, but the folder does not yet have its name.
        os.rename = deadly(os.rename, is_time=is_commit(at))
        os.replace = deadly(os.replace, is_time=is_commit(at))


def is_commit(at):
    """Return what tells whether a folder that is given its name is a step's checkpoint."""

    def tell(source, *_):
        name = Path(os.fsdecode(source)).name
        return name.startswith(f"{at}.") and "tmp" in name

    return tell


def main(folder, moment="", at="0", course="plain", coordinator="", processes="1", process="0"):
    if coordinator:
        distributed.join(
            distributed.ProcessConfig(coordinator, int(processes), int(process), heartbeat_s=10)
        )
    import conftest

    toy = SimpleNamespace(model=conftest.toy_model, Tokenizer=conftest.ToyTokenizer)
    trainer = take_course(toy, Path(folder), course)
    # Of several processes the one that writes alone, or the last.
    is_doomed = int(process) == (0 if moment == "checkpoint" else int(processes) - 1)
    arm(trainer, moment if is_doomed else "", int(at))

    def progress(done, steps, line):
        # While the checkpoint of this step is being written, or just after.
        if is_doomed and moment == "progress" and done == int(at):
            die()

    with preemption.watched():
        trainer.run(progress)


if __name__ == "__main__":
    # As a command, so that its end is one's.
    cli.run(lambda arguments: main(*arguments))
