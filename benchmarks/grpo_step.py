"""Time one GRPO step: a group of replies to each prompt, and one update.

    python benchmarks/grpo_step.py
    python benchmarks/grpo_step.py --model FOLDER --prompts prompts.json --remat full
    python benchmarks/grpo_step.py --accel gpu --model qwen2.5-coder-7b --dtype bfloat16 \
        --max-prompt-tokens 2048 --max-tokens 512

Without a model: 7M parameters. That, a published shape (`minirl/plan/shapes.yaml`) and one of
Qwen3.5's layers in the size of qwen2.5-coder-0.5b (`qwen3.5-0.5b`) have random weights and prompts
of random tokens, and no token ends a reply. A Hugging Face folder replies at temperature 1 to
`--prompts`, a JSON list of texts, else to questions about the demo's databases. Prints one line of
JSON of each phase, of its fastest run: seconds, tokens a second (sampled; in the update those of
all sequences, each whole as peers compute it, where a prompt is computed once a group here), and
the speed of useful operations beside a product of matrices of the model's shape (`_step.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import yaml

from benchmarks import _step
from launch import cli
from minirl.config import BatchingConfig, LoraConfig, OptimizerConfig, SamplerConfig, TrainConfig
from minirl.model import huggingface
from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder
from minirl.model.lora import add_adapters
from minirl.model.tokenizer import ChatTokenizer
from minirl.plan.fit import published_shape
from minirl.types import Tokenizer

TINY = ModelConfig(
    model_type="qwen2",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)


def shape_of(name: str) -> ModelConfig:
    """Return a model's shape."""
    if name != "qwen3.5-0.5b":
        return published_shape(name)
    sizes = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 2560}
    return published_shape("qwen3.5-0.8b").model_copy(update=sizes)


def load(options: argparse.Namespace) -> tuple[Decoder, Tokenizer, Sequence[Any]]:
    """Return the model, its tokenizer and the prompts."""
    count, dtype = options.groups, jnp.dtype(options.dtype)
    is_random = options.model is None or not Path(options.model).exists()
    options.max_prompt_tokens = options.max_prompt_tokens or (256 if is_random else 2048)
    if is_random:
        shape = TINY if options.model is None else shape_of(options.model)
        # As they are read: frozen weights need no more precision than the computation has.
        stored = dtype if options.lora else jnp.float32
        model = huggingface.init(shape, 0, dtype=dtype, param_dtype=stored)
        prompts = _step.random_prompts(count, options.max_prompt_tokens, shape.vocab_size)
        return model, _step.RandomTokens(), prompts
    folder = Path(options.model)
    model = huggingface.load(folder, dtype=dtype)
    texts = _step.read_prompts(options.prompts) if options.prompts else _step.demo_prompts(count)
    return model, ChatTokenizer(folder), texts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accel", default="cpu", help="cpu (the default), gpu or tpu")
    parser.add_argument(
        "--runs", type=int, default=3, help="timed runs after one that compiles; the fastest counts"
    )
    parser.add_argument("--model", metavar="MODEL", help="a Hugging Face folder, or a shape's name")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a JSON list of texts")
    parser.add_argument("--groups", type=int, default=8, help="prompts without such a file")
    parser.add_argument("--samples", type=int, default=8, help="replies to each prompt")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest reply")
    parser.add_argument("--max-prompt-tokens", type=int, help="default: 2048; random prompts: 256")
    parser.add_argument("--only", choices=["sampling"], help="leave the update out")
    parser.add_argument("--dtype", default="float32", help="of the computation")
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="none")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters")
    parser.add_argument("--moments", default="float32", help="type of Adam's moments")
    parser.add_argument("--batching", default="{micro_batch_tokens: 2048}", help="YAML")
    options = parser.parse_args()
    cli.use_accelerator(options.accel)
    model, tokenizer, prompts = load(options)
    model.remat = options.remat
    if options.lora:
        add_adapters(model, LoraConfig(rank=options.lora), seed=0)
    train = TrainConfig(
        group_size=options.samples,
        batching=BatchingConfig.model_validate(yaml.safe_load(options.batching)),
        optimizer=OptimizerConfig(moments=options.moments),
    )
    sampler = SamplerConfig(
        slots=len(prompts) * options.samples,
        max_prompt_tokens=options.max_prompt_tokens,
        max_response_tokens=options.max_tokens,
    )
    groups, figures = _step.measure_sampling(
        model, tokenizer, prompts, sampler, group_size=options.samples, runs=options.runs
    )
    print(json.dumps({"sampling": figures}), flush=True)
    if options.only != "sampling":
        rows = _step.rewarded(groups)
        found = _step.measure_update(model, tokenizer, rows, train, sampler, runs=options.runs)
        print(json.dumps({"update": found}), flush=True)


if __name__ == "__main__":
    main()
