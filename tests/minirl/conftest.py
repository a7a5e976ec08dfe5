"""A toy decoder, a tokenizer of one id a character and what the tests of sampling share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minirl.config import SamplerConfig
from minirl.exchange import Message
from minirl.model.config import Hybrid, ModelConfig
from minirl.model.decoder import Decoder
from minirl.model.lora import trained
from minirl.model.sharding import param_path
from minirl.sample.sampler import NativeSampler
from minirl.sglang import pool
from tests.plain_model import logits

VOCAB = 64
# Several, so that a random model stops now and then.
STOP_IDS = (1, 60, 61, 62, 63)
# Nothing that the model could draw.
NEVER = (VOCAB,)
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=True,
)
# The same as a Qwen3.5: one period, more value heads than key heads, half of a head is turned.
HYBRID = replace(
    CONFIG,
    num_hidden_layers=4,
    attention_bias=False,
    hybrid=Hybrid(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=4,
        partial_rotary_factor=0.5,
    ),
)


@dataclass(frozen=True)
class ToyTokenizer:
    """Ids 4 to 59 are characters; 2 and 3 stand around a message, 1 ends a reply."""

    stop_ids: tuple[int, ...] = STOP_IDS
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        return [4 + (ord(character) - 65) % 56 for character in text]

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        return [i for message in messages for i in [2, *self.encode(message.content), 3]]

    def encode_next(self, messages: Sequence[Any], *, closed: bool) -> list[int]:
        return ([] if closed else [1]) + self.encode_chat(messages)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(61 + i) for i in ids)


@functools.cache
def toy_model(seed: int = 0, layers: int = 2, *, hybrid: bool = False) -> Decoder:
    """Make a decoder with clear preferences; drawn by NumPy, which compiles nothing.

    A hybrid's memory lasts: strong decays, whose logs sum to hundreds in a chunk, are rounded.
    """
    config = HYBRID if hybrid else replace(CONFIG, num_hidden_layers=layers)
    rng = np.random.default_rng(seed)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, key=jax.random.key(0))))

    def draw(path: Any, leaf: Any) -> Any:
        mean = -3.0 if param_path(path).endswith("a_log") else 0.0
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape), jnp.float32)

    return nnx.merge(graphdef, jax.tree.map_with_path(draw, shapes))


def make_sampler(
    model: Decoder,
    *,
    group_size: int = 1,
    seed: int = 0,
    stop_ids: tuple[int, ...] = STOP_IDS,
    **settings: Any,
) -> NativeSampler:
    sizes: dict[str, Any] = {"slots": 4, "max_prompt_tokens": 48, "max_response_tokens": 48}
    config = SamplerConfig(**{**sizes, **settings})
    tokenizer = ToyTokenizer(stop_ids)
    sampler = NativeSampler(model, config, tokenizer, group_size=group_size, seed=seed)
    sampler.set_weights(trained(model), version=0)
    return sampler


def next_logprobs(model: Decoder, ids: Sequence[int], *, temperature: float = 1.0) -> np.ndarray:
    """Return log-probabilities of the next token after every prefix, by a full forward pass."""
    tokens_BT = np.zeros((1, -(-len(ids) // 128) * 128), np.int32)
    tokens_BT[0, : len(ids)] = ids
    logits_TV = np.asarray(logits(model, tokens_BT))[0, : len(ids)] / np.float32(temperature)
    return logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)


def run(sampler: NativeSampler, requests: Sequence[Any]) -> dict[int, Any]:
    """Sample one reply an episode until all have ended."""
    replies: dict[int, Any] = {}
    for request in requests:
        sampler.submit(request)
    while len(replies) < len(requests):
        for episode, reply in sampler.advance(max_steps=32):
            replies[episode] = reply
            sampler.release(episode)
    return replies


TOY: Any = SimpleNamespace(
    CONFIG=CONFIG,
    HYBRID=HYBRID,
    Message=Message,
    Tokenizer=ToyTokenizer,
    NEVER=NEVER,
    STOP_IDS=STOP_IDS,
    model=toy_model,
    sampler=make_sampler,
    next_logprobs=next_logprobs,
    run=run,
)


@pytest.fixture(scope="session")
def toy() -> Any:
    """Hand the helpers of this file to the tests."""
    return TOY


@pytest.fixture
def fakes():
    """Two servers on 127.0.0.1."""
    from .fake_sglang import Fake  # this file is also imported by scripts, which are in no package

    made = [Fake(), Fake()]
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The folder of a model that the fakes serve."""
    shape = SimpleNamespace(hybrid=None)
    monkeypatch.setattr("minirl.sglang.sampler.read_config", lambda _: shape)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy", "architectures": ["Toy"]}')
    return folder


@pytest.fixture
def soon(monkeypatch):
    """Let a pool look after its servers more often."""
    monkeypatch.setattr(pool, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(pool, "_HEARTBEAT_S", 0.1)
