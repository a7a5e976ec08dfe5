"""A toy decoder, a byte tokenizer and a small environment for the tests of the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minirl import attention
from minirl.config import SamplerConfig
from minirl.model import Decoder, ModelConfig
from minirl.sampler import NativeSampler

VOCAB = 64
STOP, PAD = 1, 0


@dataclass(frozen=True)
class Said:
    role: str
    content: str


class ByteTokenizer:
    """One id a character (63 of them), and chat glue: 2 opens a message, 1 ends a reply."""

    stop_ids = (STOP,)
    pad_id = PAD

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        return [i for m in messages for i in [2, *self.encode(m.content), 3]]

    def encode_next(self, messages: Sequence[Any], *, closed: bool) -> list[int]:
        return ([] if closed else [STOP]) + self.encode_chat(messages)

    def encode(self, text: str) -> list[int]:
        return [4 + ord(character) % (VOCAB - 4) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(48 + i) for i in ids)


def toy_model(*, vocab: int = VOCAB, scale: float = 1.0, seed: int = 0) -> Decoder:
    """Make a two-layer decoder; a larger `scale` makes its choices surer."""
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
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
    model = Decoder(config, rngs=nnx.Rngs(seed))
    model.unembed.set_value(model.unembed[...] * 20 * scale)
    return model


def make_sampler(model: Decoder, *, group_size: int = 2, seed: int = 0, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"slots": 4, "max_prompt_tokens": 48, "max_response_tokens": 48}
    config = SamplerConfig(**{**defaults, **settings})
    return NativeSampler(model, config, ByteTokenizer(), group_size=group_size, seed=seed)


@nnx.jit
def _log_softmax(model: Decoder, tokens_BT: jax.Array, temperature: float) -> jax.Array:
    positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    hidden_BTD, _ = model(tokens_BT, positions_BT, attention.causal())
    return jax.nn.log_softmax(model.logits(hidden_BTD)[0] / temperature)


def next_logprobs(model: Decoder, ids: Sequence[int], *, temperature: float = 1.0) -> np.ndarray:
    """Return the log-probability of every next token after every prefix, by the learner's way."""
    padded = jnp.zeros((1, 128), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
    return np.asarray(_log_softmax(model, padded, temperature))[: len(ids)]


def run(sampler: Any, requests: Sequence[Any]) -> dict[int, Any]:
    """Sample single replies until all ended."""
    replies: dict[int, Any] = {}
    for request in requests:
        sampler.submit(request)
    while len(replies) < len(requests):
        for episode, reply in sampler.advance(max_steps=32):
            replies[episode] = reply
            sampler.release(episode)
    return replies


@pytest.fixture(scope="session")
def toy() -> Any:
    """Hand the helpers of this file to the tests."""
    return SimpleNamespace(
        Said=Said,
        tokenizer=ByteTokenizer(),
        model=toy_model,
        sampler=make_sampler,
        next_logprobs=next_logprobs,
        run=run,
        STOP=STOP,
    )
