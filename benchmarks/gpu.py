"""Measure real model shapes on one GPU: update, decoding, and the memory that was planned.

    python benchmarks/gpu.py --json gpu.json

Weights are random. The update has one group of 8 trajectories of 8,192 tokens with a prompt of
6,144. Decoding has 64 slots, 8 prompts of 2,048 tokens, and 512 new tokens each. The model `tiny`
(64 + 32 tokens) tries the benchmark itself, anywhere. Every part runs in its own process. MFU
counts 6 operations for each weight and computed token, without attention. The byte limit of a
decode step is reading all weights and the existing keys and values once. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

MODELS = tuple(f"qwen2.5-coder-{size}" for size in ("0.5b", "1.5b", "7b"))
G, RUNS = 8, 3


@dataclass(frozen=True)
class Lengths:
    """Tokens of the update, and of decoding: prompts, and what comes after each."""

    prompt: int = 6144
    answer: int = 2048
    prompts: int = 8
    decode_prompt: int = 2048
    decode_answer: int = 512


TINY = Lengths(prompt=64, answer=32, decode_prompt=64, decode_answer=32)


def lengths_of(model: str) -> Lengths:
    """Return the lengths that a model is measured at."""
    return TINY if model == "tiny" else Lengths()


def main() -> None:
    """Measure what was asked for, or (`--part`) one thing in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options.models[0])))
        return
    figures = {model: measure(model) for model in options.models}
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


def measure(model: str) -> dict[str, Any]:
    """Measure all parts of a model."""
    found = {part: in_process(part, model) for part in PARTS} | {"plan": plan(model)}
    measured, planned = found["update"].get("peak_bytes"), found["plan"].get("update_bytes")
    ratio = round(measured / planned, 3) if measured and planned else None
    return found | {"memory_over_plan": ratio}


def in_process(part: str, model: str) -> dict[str, Any]:
    """Run one part in a process of its own; what went wrong is a result too."""
    print(f"{model}: {part}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--part", part, "--models", model]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def plan(model: str) -> dict[str, Any]:
    """Predict the memory of the same update."""
    lengths = lengths_of(model)
    config = "progress-demo.yaml" if model == "tiny" else "progress.yaml"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "plan.json")
        command = [sys.executable, "-m", "launch.plan", "--cfg", config, "--json", str(out)]
        command += ["--topology", "cpux1" if model == "tiny" else "h200x1"]
        command += [] if model == "tiny" else ["--model", model]
        command += [
            "model.remat=full",
            "train.optimizer.moments=bfloat16",
            "train.prompts_per_step=1",
            f"train.group_size={G}",
            f"sampler.max_prompt_tokens={lengths.prompt}",
            f"sampler.max_response_tokens={lengths.answer}",
            "sampler.max_reply_tokens=null",
            "sampler.slots=8",
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1:]}
        memory = json.loads(out.read_text())["update_memory_bytes"]
    # What the measured update holds: no sampler, and no start weights.
    parts = ("weights", "optimizer", "gradient", "batch", "temporaries")
    return {"update_bytes": sum(memory.get(part, 0) for part in parts), "memory_bytes": memory}


def shape_of(model: str) -> Any:
    """Return the shape of a model by its name."""
    from minirl.plan.fit import published_shape

    if model != "tiny":
        return published_shape(model)
    return replace(
        published_shape("qwen2.5-coder-0.5b"),
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )


def peak_flops() -> float | None:
    """Return the dense bf16 operations a second of an H100 or H200, by NVIDIA's data sheets."""
    import jax

    kind = jax.devices()[0].device_kind.lower()
    return 989e12 if "h100" in kind or "h200" in kind else None


def update(model: str) -> dict[str, Any]:
    """Time an update of one group, and tell the most memory that it took."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks._operations import Tokens, model_flops
    from benchmarks.grpo_step import time_update
    from minirl.config import BatchingConfig, OptimizerConfig
    from minirl.model import huggingface
    from minirl.types import TokenRow

    shape, lengths = shape_of(model), lengths_of(model)
    policy = huggingface.init(shape, 0, dtype=jnp.bfloat16)
    policy.remat = "full"
    rng = np.random.default_rng(0)
    length = lengths.prompt + lengths.answer
    is_action = np.arange(length) >= lengths.prompt
    prompt = rng.integers(0, shape.vocab_size, lengths.prompt)
    group = [
        TokenRow(
            np.concatenate([prompt, rng.integers(0, shape.vocab_size, lengths.answer)]),
            is_action,
            np.where(is_action, -np.log(shape.vocab_size), 0.0),
            float(rng.normal()),
            lengths.prompt,
        )
        for _ in range(G)
    ]
    best = time_update(
        policy,
        [group],
        BatchingConfig(prompt_multiple=lengths.prompt, answer_multiple=lengths.answer),
        OptimizerConfig(moments="bfloat16"),
        runs=RUNS,
    )
    tokens = Tokens(1, lengths.prompt, G, lengths.answer)
    peak = peak_flops()
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "seconds": best,
        "tokens": G * length,
        "computed_tokens": tokens.computed,
        "tokens_s": G * length / best,
        "computed_tokens_s": tokens.computed / best,
        "mfu": model_flops(shape, tokens) / best / peak if peak else None,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "device": jax.devices()[0].device_kind,
    }


def decode(model: str) -> dict[str, Any]:
    """Time decoding with 64 slots, and the least time that reading takes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from benchmarks._operations import decode_bytes, matmul_parameters
    from benchmarks.grpo_step import OneTurn, RandomTokens
    from minirl.config import SamplerConfig
    from minirl.model import huggingface
    from minirl.plan.compile import CHIPS
    from minirl.sample.decode import compilations
    from minirl.sample.rollout import Rollout
    from minirl.sample.sampler import NativeSampler

    shape, lengths = shape_of(model), lengths_of(model)
    config = SamplerConfig(
        slots=lengths.prompts * G,
        max_prompt_tokens=lengths.decode_prompt,
        max_response_tokens=lengths.decode_answer,
    )
    policy = huggingface.init(shape, 0, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    sampler = NativeSampler(policy, config, RandomTokens(), group_size=G, seed=0)
    sampler.set_weights(nnx.state(policy), version=0)
    rng = np.random.default_rng(0)

    def seconds(number: int, answer: int) -> float:
        started = perf_counter()
        Rollout(
            sampler,
            RandomTokens(),
            OneTurn(),
            rng.integers(0, shape.vocab_size, (lengths.prompts, lengths.decode_prompt)).tolist(),
            config=config.model_copy(update={"max_response_tokens": answer}),
            group_size=G,
            first_episode=number * lengths.prompts * G,
            max_turns=1,
        ).play()
        return perf_counter() - started

    seconds(0, lengths.decode_answer)  # compiles
    whole = min(seconds(number, lengths.decode_answer) for number in (1, 2))
    # With the prompts, which are no part of decoding: what one token takes is taken off.
    prefill = min(seconds(number, 1) for number in (3, 4, 5))
    a_step = (whole - prefill) / (lengths.decode_answer - 1)
    cached = decode_bytes(
        shape,
        slots=config.slots,
        prompts=lengths.prompts,
        prompt=lengths.decode_prompt,
        answer=lengths.decode_answer / 2,
        item=2,
    )
    read = 2 * sum(matmul_parameters(shape)) + cached
    kind = jax.devices()[0].device_kind.lower()
    speed = next((chip.memory_bytes_s for name, chip in CHIPS.items() if name in kind), None)
    return {
        "seconds": whole,
        "prefill_s": prefill,
        "step_s": a_step,
        "tokens_s": config.slots / a_step,
        "bytes_a_step": read,
        "over_byte_limit": a_step / (read / speed) if speed else None,
        "compilations": compilations(),
    }


PARTS = {"update": update, "decode": decode}


if __name__ == "__main__":
    main()
