"""Sampling and update of a GRPO step, measured: seconds, memory and speed.

Speed counts useful operations alone: two a weight and token forward, a prompt once for its group,
logits where a token is sampled, three times as many for a gradient. Attention, padding and what is
computed twice count as nothing. What the machine can do is a product of the model's own shape,
measured before and after each phase. Both also by processor time, which other work beside it hardly
changes; that does not tell what one core does while others wait.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from launch.build import SqlSide
from launch.config import load_config
from minirl.config import SamplerConfig, TrainConfig
from minirl.exchange import Message
from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder
from minirl.model.huggingface import tensor_shapes
from minirl.model.lora import described, trained
from minirl.run.memory import peak_bytes
from minirl.sample import decode
from minirl.sample.rollout import Rollout, flatten
from minirl.sample.sampler import NativeSampler
from minirl.train.advantages import group_normalised
from minirl.train.batching import Groups, MicroBatches
from minirl.train.losses import policy_loss
from minirl.train.optimizer import make_optimizer
from minirl.train.update import Learner
from minirl.types import Tokenizer, TokenRow, Trajectory
from sqlenv.types import Observation

_PRODUCT_ROWS, _PRODUCTS = 512, 20


class OneTurn:
    """An environment of one turn; an example is its first observation."""

    def reset(self, example: Any) -> tuple[None, Any]:
        return None, example

    def step(self, episode: None, reply: str) -> tuple[None, None]:
        return None, None


@dataclass(frozen=True)
class RandomTokens:
    """A tokenizer for prompts that are ids already; no token stops a reply."""

    stop_ids: tuple[int, ...] = ()
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        return list(messages)

    def encode_next(self, messages: Sequence[Any], *, closed: bool) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        return ""


def random_prompts(count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    """Draw prompts for `RandomTokens`."""
    return np.random.default_rng(0).integers(0, vocab_size, (count, tokens)).tolist()


def read_prompts(path: Path) -> Sequence[Observation]:
    """Read a JSON list of texts, each the user's first message."""
    return [(Message("user", text),) for text in json.loads(path.read_text(encoding="utf-8"))]


def demo_prompts(count: int) -> Sequence[Observation]:
    """Put questions to the demo's databases as OmniSQL does."""
    prompt = "prompt={style: omnisql, schema_style: omnisql, example_values: 2}"
    config = load_config("progress-demo.yaml", [prompt, "env.wrapping=any"])
    with tempfile.TemporaryDirectory() as folder, SqlSide(config, Path(folder)) as sql:
        return [sql.prompts.single_turn(one) for one in sql.examples("train", limit=count)]


def matmul_parameters(config: ModelConfig) -> tuple[int, int]:
    """Count the weights of the matrices that multiply a token: of all layers, and of the logits."""
    shapes = tensor_shapes(trained(described(config)))
    layers = (shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    return sum(map(prod, layers)), config.vocab_size * config.hidden_size


class Lap(NamedTuple):
    """Seconds by the clock, and of all processors."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Lap:
        """Return what a lap begins with."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Lap) -> Lap:
        """Return the seconds from a start to this."""
        return Lap(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s)


class LapTimer:
    """Times the runs of a phase: the first, which compiles, and the later ones."""

    def __init__(self, shape: ModelConfig) -> None:
        self._shape, self._products, self._laps = shape, [product(shape)], list[Lap]()
        # Linux then counts the peak from here on; elsewhere it is that of the whole process.
        if (counter := Path("/proc/self/clear_refs")).exists():
            counter.write_text("5")

    def lap(self, start: Lap) -> None:
        """Note a run."""
        self._laps.append(Lap.now().since(start))
        self._products.append(product(self._shape))

    def figures(self, useful_operations: float, tokens: int) -> dict[str, float]:
        """Return the numbers to print, of the fastest run that handled so many tokens."""
        first, *rest = self._laps
        best = min(rest, default=first)
        usual = [float(np.median(one)) for one in zip(*self._products, strict=True)]
        return {
            "s": round(best.wall_s, 3),
            "cpu_s": round(best.cpu_s, 3),
            "first_s": round(first.wall_s, 2),
            "tokens_s": round(tokens / best.wall_s),
            "useful_gflop_s": round(useful_operations / best.wall_s / 1e9, 1),
            "product_gflop_s": round(1e-9 / usual[0], 1),
            "share": round(useful_operations * usual[0] / best.wall_s, 3),
            "cpu_share": round(useful_operations * usual[1] / best.cpu_s, 3),
            "peak_gb": round(peak_bytes(jax.local_devices()[0]) / 1e9, 2),
        }


def product(shape: ModelConfig) -> Lap:
    """Return what an operation takes, of a product into the feed-forward's width and back."""
    width, inner = shape.hidden_size, shape.intermediate_size
    rng = np.random.default_rng(0)
    x, into, back = (
        jnp.asarray(rng.normal(size=size) * size[1] ** -0.5, jnp.float32)
        for size in ((_PRODUCT_ROWS, width), (width, inner), (inner, width))
    )

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _PRODUCTS, lambda _, x: x @ into @ back, x)

    run(x).block_until_ready()
    start = Lap.now()
    run(x).block_until_ready()
    operations = _PRODUCTS * 4 * _PRODUCT_ROWS * width * inner
    return Lap(*(seconds / operations for seconds in Lap.now().since(start)))


def reply(
    sampler: NativeSampler,
    tokenizer: Tokenizer,
    prompts: Sequence[Any],
    config: SamplerConfig,
    *,
    group_size: int,
) -> list[list[Trajectory]]:
    """Sample one reply for each member of the group of every prompt."""
    return Rollout(
        sampler,
        tokenizer,
        OneTurn(),
        prompts,
        config=config,
        group_size=group_size,
        first_episode=0,
        max_turns=1,
    ).play()


def measure_sampling(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Any],
    config: SamplerConfig,
    *,
    group_size: int,
    runs: int,
) -> tuple[list[list[Trajectory]], dict[str, Any]]:
    """Sample a group of replies to every prompt, once more than `runs`; return those of the last
    run, and figures. Every run draws the same replies.
    """
    timer, groups, work = LapTimer(model.config), [], dict[str, int]()
    compiled = decode.compilations()
    for _ in range(1 + runs):
        # Each of a new sampler: nothing is in a cache.
        sampler = NativeSampler(model, config, tokenizer, group_size=group_size, seed=0)
        start = Lap.now()
        sampler.set_weights(trained(model), version=0)
        groups = reply(sampler, tokenizer, prompts, config, group_size=group_size)
        timer.lap(start)
        work = dict(sampler.work)
    replies = [len(one.turns[0].reply.ids) for group in groups for one in group]
    known = [len(group[0].turns[0].observation_ids) for group in groups]
    layers, logits = matmul_parameters(model.config)
    useful = 2.0 * (layers * (sum(known) + sum(replies)) + logits * sum(replies))
    figures = timer.figures(useful, sum(replies)) | {
        "prompt_tokens": sum(known),
        "reply_tokens": sum(replies),
        "longest_reply": max(replies),
        "work": work,
        "programs": decode.compilations() - compiled,
    }
    return groups, figures


def rewarded(groups: Sequence[Sequence[Trajectory]]) -> list[list[TokenRow]]:
    """Return what the update learns from, with random rewards."""
    rewards_NG = np.random.default_rng(0).random((len(groups), len(groups[0])))
    advantages_NG = group_normalised(rewards_NG)
    return [
        [
            replace(flatten(one), advantage=float(advantage))
            for one, advantage in zip(group, advantages, strict=True)
        ]
        for group, advantages in zip(groups, advantages_NG, strict=True)
    ]


def measure_update(
    model: Decoder,
    tokenizer: Tokenizer,
    groups: Groups,
    train: TrainConfig,
    sampler: SamplerConfig,
    *,
    runs: int,
) -> dict[str, Any]:
    """Update the model on groups as `Trainer.step` does, once more than `runs`; return figures.

    The learner takes the model's weights over.
    """
    timer, shape = LapTimer(model.config), model.config
    learner = Learner(
        model,
        partial(policy_loss, train.algorithm),
        make_optimizer(train.optimizer),
        temperature=sampler.temperature,
    )
    state = learner.init(trained(model))
    del model
    stats: dict[str, float] = {}
    for _ in range(1 + runs):
        start = Lap.now()
        batches = MicroBatches(
            groups,
            aggregation=train.algorithm.aggregation,
            sizes=train.batching,
            pad_id=tokenizer.pad_id,
            divisor=sampler.max_response_tokens,
        )
        state, stats, _ = learner.update(state, batches, rate=train.optimizer.learning_rate)
        jax.block_until_ready(state.params)
        timer.lap(start)
    rows = [row for group in groups for row in group]
    prompt = sum(group[0].prompt_length for group in groups)
    answer = sum(len(row.ids) - row.prompt_length for row in rows)
    layers, logits = matmul_parameters(shape)
    useful = 6.0 * (layers * (prompt + answer) + logits * answer)
    # Peers compute the prompt of each sequence: their tokens are counted.
    return timer.figures(useful, sum(len(row.ids) for row in rows)) | {
        "computed_tokens": prompt + answer,
        "padding": round(batches.padding, 3),
        "programs": learner.programs,
        "loss": stats["loss"],
        "grad_norm": stats["grad_norm"],
    }
