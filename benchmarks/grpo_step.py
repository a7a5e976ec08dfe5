"""Time one GRPO step: 8 prompts x 8 samples, 256 + 128 tokens, 7M parameters, one update.

    python benchmarks/grpo_step.py

Prints one line of JSON, of the fastest runs: gen_s and gen_tok_s (sampled tokens a second),
update_s and update_tok_s (prompt and answer tokens of all 64 sequences a second, each counted whole
as the peers compute it; here a prompt is computed once a group).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from minirl.config import BatchingConfig, Grpo, OptimizerConfig, SamplerConfig
from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder
from minirl.sample.rollout import flatten, rollout
from minirl.sample.sampler import NativeSampler
from minirl.train.advantages import estimate
from minirl.train.batching import micro_batches
from minirl.train.optimizer import make_optimizer
from minirl.train.update import Learner, policy_objective
from minirl.types import TokenRow, Trajectory

MODEL = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    attention_bias=True,
    qk_norm=False,
)
PROMPTS, SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 8, 8, 256, 128
SAMPLER = SamplerConfig(
    slots=PROMPTS * SAMPLES, max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=ANSWER_TOKENS
)


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


class OneTurn:
    """An environment of one turn; an example is its prompt's ids."""

    def reset(self, example: Any) -> tuple[None, Any]:
        return None, example

    def step(self, episode: None, reply: str) -> tuple[None, None]:
        return None, None


def time_generation(model: Decoder, *, runs: int) -> tuple[float, list[list[Trajectory]]]:
    """Return the seconds of the fastest run, each with prompts of its own, and the last groups."""
    rng = np.random.default_rng(0)
    sampler = NativeSampler(model, SAMPLER, RandomTokens(), group_size=SAMPLES, seed=0)
    sampler.set_weights(nnx.state(model), version=0)
    seconds, groups = [], []
    # The first run compiles and is not timed.
    for number in range(runs + 1):
        prompts = rng.integers(0, MODEL.vocab_size, (PROMPTS, PROMPT_TOKENS)).tolist()
        started = time.perf_counter()
        groups = rollout(
            sampler,
            RandomTokens(),
            OneTurn(),
            prompts,
            config=SAMPLER,
            group_size=SAMPLES,
            first_episode=number * PROMPTS * SAMPLES,
            max_turns=1,
        )
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:]), groups


def rewarded(groups: list[list[Trajectory]]) -> list[list[TokenRow]]:
    """Return what the update learns from, with random rewards."""
    rewards_NG = np.random.default_rng(0).random((PROMPTS, SAMPLES))
    advantages_NG = estimate(rewards_NG, estimator="group_normalised")
    return [
        [
            TokenRow(flat.ids, flat.is_action, flat.logprobs, float(advantage), flat.prompt_length)
            for flat, advantage in zip(map(flatten, group), advantages, strict=True)
        ]
        for group, advantages in zip(groups, advantages_NG, strict=True)
    ]


def time_update(
    model: Decoder,
    rows: list[list[TokenRow]],
    sizes: BatchingConfig,
    optimizer: OptimizerConfig,
    *,
    runs: int,
) -> float:
    """Return the seconds of the fastest update; the learner takes the model's weights over."""
    graph, params = nnx.split(model)
    del model
    learner = Learner(
        graph, policy_objective(Grpo(), temperature=1.0), make_optimizer(optimizer, steps=runs + 1)
    )
    state, seconds = learner.init(params), []
    del params
    # The first run compiles and is not timed.
    for _ in range(runs + 1):
        started = time.perf_counter()
        batches = micro_batches(rows, aggregation="sequence_mean", sizes=sizes, pad_id=0)
        state, _ = learner.update(state, batches)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="timed runs; the fastest counts")
    runs = parser.parse_args().runs
    model = Decoder(MODEL, key=jax.random.key(0))
    gen_s, groups = time_generation(model, runs=runs)
    sizes = BatchingConfig(groups_per_batch=1)
    update_s = time_update(model, rewarded(groups), sizes, OptimizerConfig(), runs=runs)
    sampled = PROMPTS * SAMPLES * ANSWER_TOKENS
    figures = {
        "gen_s": round(gen_s, 3),
        "gen_tok_s": round(sampled / gen_s),
        "update_s": round(update_s, 3),
        "update_tok_s": round(PROMPTS * SAMPLES * (PROMPT_TOKENS + ANSWER_TOKENS) / update_s),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
