"""Rounds of episodes of several turns that real SGLang servers sample, without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from exchange import Message
from launch.config import TinyConfig
from launch.tiny import make_tiny
from minirl.config import LoraConfig, SamplerConfig, SglangConfig
from minirl.model import huggingface
from minirl.model.lora import add_adapters, trained
from minirl.model.tokenizer import ChatTokenizer
from minirl.sample.rollout import Rollout
from minirl.sglang.sampler import Servers, SglangSampler
from minirl.train.rollouts import make_sampler
from minirl.types import Decoding, Trajectory

from .sglang_server import ARGUMENTS, VARIABLES

TURNS, REPLY_TOKENS = 4, 16
SHAPE = TinyConfig(vocab_size=512, hidden_size=64, intermediate_size=128, layers=2)
WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "lambda", "theta", "iota")
SAMPLER = SamplerConfig(
    temperature=0.0,
    max_prompt_tokens=1200,
    max_response_tokens=600,
    max_reply_tokens=REPLY_TOKENS,
)


@dataclass
class Talk:
    """An environment that goes on for some turns, and asks each time for something else.

    Attributes:
        turns: Replies of an episode.
        at: From how many replies of all episodes on, what is called then.
    """

    turns: int = TURNS
    at: tuple[int, Callable[[], None]] | None = None
    replies: int = field(default=0, init=False)

    def reset(self, example: str) -> tuple[tuple[str, ...], list[Message]]:
        return (example,), [Message("user", example)]

    def step(self, episode: tuple[str, ...], reply: str) -> tuple[Any, list[Message] | None]:
        self.replies += 1
        if self.at is not None and self.replies == self.at[0]:
            self.at[1]()
        episode = (*episode, reply)
        if len(episode) > self.turns:
            return episode, None
        return episode, [Message("user", f"{WORDS[len(episode)]} and then what")]


def questions(count: int, *, words: int, seed: int = 0) -> list[str]:
    """Make first prompts that share no beginning."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, words)) for _ in range(count)]


def make_models(place: Path, count: int) -> list[Path]:
    """Write tiny models that differ in their weights alone."""
    folders = [place / f"model-{seed}" for seed in range(count)]
    for seed, folder in enumerate(folders):
        make_tiny(folder, questions(200, words=30), SHAPE, seed)
    return folders


@dataclass
class Served:
    """Servers in use and the sampler before them."""

    servers: Servers
    sampler: SglangSampler
    tokenizer: ChatTokenizer
    params: list[nnx.State]
    version: int = 0
    episodes: int = 0

    def push(self, number: int) -> None:
        """Give all servers the weights of a model, under a new version."""
        self.sampler.set_weights(self.params[number], version=self.version)
        self.version += 1

    def play(self, examples: Sequence[str], environment: Talk | None = None) -> list[Trajectory]:
        """Play an episode of each example."""
        first, self.episodes = self.episodes, self.episodes + len(examples)
        groups = Rollout(
            self.sampler, self.tokenizer, environment or Talk(), examples,
            config=SAMPLER, decoding=Decoding(SAMPLER.temperature), group_size=1,
            first_episode=first, max_turns=TURNS,
        ).play()  # fmt: skip
        return [group[0] for group in groups]


@contextmanager
def serving(
    config: SglangConfig, models: Sequence[Path], place: Path, lora: LoraConfig | None = None
) -> Generator[Served]:
    """Serve the first of these models; weights of all can be pushed, or as many adapters of it."""
    model = huggingface.load(models[0])
    params = [nnx.state(huggingface.load(folder), nnx.Param) for folder in models]
    if lora is not None:
        add_adapters(model, lora, seed=0)
        params = [_drawn(trained(model), seed) for seed in range(len(models))]
    servers = Servers(
        config, models[0], SAMPLER, dtype="float32", seed=0, folder=place / "run", lora=lora
    )
    with servers:
        tokenizer = ChatTokenizer(models[0])
        sampler = make_sampler(model, SAMPLER, tokenizer, group_size=1, seed=0, servers=servers)
        assert isinstance(sampler, SglangSampler)
        yield Served(servers, sampler, tokenizer, params)


def _drawn(params: nnx.State, seed: int) -> nnx.State:
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.array(random.normal(0, 0.3, leaf.shape), leaf.dtype), params
    )


def launched(python: str, **settings: Any) -> SglangConfig:
    """Return settings that start two servers on this machine's CPU."""
    arguments = ARGUMENTS | {"lora-backend": "torch_native"}  # where there are adapters
    return SglangConfig(
        launch=2, python=python, arguments=arguments, variables=VARIABLES, **settings
    )


def tokens(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Return all ids of an episode, observations and replies in turn."""
    return [part for turn in trajectory.turns for part in (turn.observation_ids, turn.reply.ids)]
