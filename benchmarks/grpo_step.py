"""Time one GRPO step: 8 prompts x 8 samples, one update.

    python benchmarks/grpo_step.py
    python benchmarks/grpo_step.py --model FOLDER --prompts prompts.json --remat full

Without a model: 7M parameters, 256 + 128 tokens. Prints one line of JSON, of the fastest runs:
gen_s and gen_tok_s (sampled tokens a second), update_s and update_tok_s (prompt and answer tokens
of all 64 sequences a second, each counted whole as the peers compute it; here a prompt is computed
once a group).

With a Hugging Face folder: that model in float32, real prompts, and replies of at most 96 tokens
that it samples at temperature 1. `--prompts` is a JSON list of texts; without it questions are
asked of the demo's databases. Prints one line of JSON of each phase: seconds, the operations a
second that useful tokens took, and their share of a product of matrices of the model's shape,
measured in the same run (`_real_step.py` says what counts).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from flax import nnx

from benchmarks._real_step import (
    OneTurn,
    demo_prompts,
    measure_sampling,
    measure_update,
    read_prompts,
    rewarded,
)
from launch import cli
from minirl.config import (
    BatchingConfig,
    Grpo,
    LoraConfig,
    OptimizerConfig,
    SamplerConfig,
    TrainConfig,
)
from minirl.model import huggingface
from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder
from minirl.model.lora import add_adapters
from minirl.model.tokenizer import ChatTokenizer
from minirl.sample.rollout import Rollout
from minirl.sample.sampler import NativeSampler
from minirl.train.batching import MicroBatches
from minirl.train.losses import policy_loss
from minirl.train.optimizer import make_optimizer
from minirl.train.update import Learner
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
        groups = Rollout(
            sampler,
            RandomTokens(),
            OneTurn(),
            prompts,
            config=SAMPLER,
            group_size=SAMPLES,
            first_episode=number * PROMPTS * SAMPLES,
            max_turns=1,
        ).play()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:]), groups


def time_update(
    model: Decoder,
    rows: list[list[TokenRow]],
    sizes: BatchingConfig,
    optimizer: OptimizerConfig,
    *,
    runs: int,
) -> float:
    """Return the seconds of the fastest update; the learner takes the model's weights over."""
    learner = Learner(model, partial(policy_loss, Grpo()), make_optimizer(optimizer))
    state, seconds = learner.init(nnx.state(model)), []
    del model
    # The first run compiles and is not timed.
    for _ in range(runs + 1):
        started = time.perf_counter()
        batches = MicroBatches(rows, aggregation="sequence_mean", sizes=sizes, pad_id=0)
        state, *_ = learner.update(state, batches, rate=optimizer.learning_rate)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def measure_tiny(runs: int) -> dict[str, float]:
    """Measure a model of fresh weights on random prompts."""
    model = Decoder(MODEL, key=jax.random.key(0))
    gen_s, groups = time_generation(model, runs=runs)
    sizes = BatchingConfig(micro_batch_tokens=2048)
    update_s = time_update(model, rewarded(groups), sizes, OptimizerConfig(), runs=runs)
    sampled = PROMPTS * SAMPLES * ANSWER_TOKENS
    return {
        "gen_s": round(gen_s, 3),
        "gen_tok_s": round(sampled / gen_s),
        "update_s": round(update_s, 3),
        "update_tok_s": round(PROMPTS * SAMPLES * (PROMPT_TOKENS + ANSWER_TOKENS) / update_s),
    }


def measure_real(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a model of a Hugging Face folder."""
    tokenizer = ChatTokenizer(options.model)
    model = huggingface.load(options.model)
    model.remat = options.remat
    if options.lora:
        add_adapters(model, LoraConfig(rank=options.lora), seed=0)
    prompts = read_prompts(options.prompts) if options.prompts else demo_prompts(PROMPTS)
    train = TrainConfig(
        group_size=options.samples,
        batching=BatchingConfig.model_validate(yaml.safe_load(options.batching)),
    )
    sampler = SamplerConfig(
        slots=len(prompts) * options.samples,
        max_prompt_tokens=options.max_prompt_tokens,
        max_response_tokens=options.max_tokens,
    )
    size = options.samples
    groups, sampling = measure_sampling(
        model, tokenizer, prompts, sampler, group_size=size, runs=options.runs
    )
    yield {"sampling": sampling}
    if options.only != "sampling":
        rows = rewarded(groups)
        yield {"update": measure_update(model, tokenizer, rows, train, sampler, runs=options.runs)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="timed runs after one that compiles; the fastest counts"
    )
    real = parser.add_argument_group("with a real model")
    real.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face folder")
    real.add_argument("--prompts", type=Path, metavar="FILE", help="a JSON list of texts")
    real.add_argument("--samples", type=int, default=SAMPLES, help="replies to each prompt")
    real.add_argument("--max-tokens", type=int, default=96, help="longest reply")
    real.add_argument("--max-prompt-tokens", type=int, default=2048, help="room for a prompt")
    real.add_argument("--only", choices=["sampling"], help="leave the update out")
    real.add_argument("--remat", choices=["none", "dots", "full"], default="full")
    real.add_argument("--lora", type=int, metavar="RANK", help="train adapters")
    real.add_argument("--batching", default="{}", help="settings of train.batching, as YAML")
    options = parser.parse_args()
    cli.use_accelerator("cpu")
    found = measure_real(options) if options.model else [measure_tiny(options.runs)]
    for figures in found:
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
