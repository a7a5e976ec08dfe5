"""Time an update with shared prompts against the plain layout, where every row has its own.

    python benchmarks/shared_prompt.py

The model is the demo's; 2 groups of G = 8 answers of C = 128 tokens, prompts of P tokens. The plain
layout is tried in several ways (whole rows, or a prompt for each answer; rows side by side), and
the fastest counts. Prints a line of JSON for each P: seconds of both, the speed-up, the ideal one
G (P + C) / (P + G C), and the share of it that is reached. That ideal counts tokens; `bound` is
what both layouts' operations allow, since answers look at all of the prompt and project on the
vocabulary in either.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from benchmarks._operations import update_flops
from launch.config import load_config
from minirl.config import BatchingConfig, Grpo, OptimizerConfig
from minirl.model.config import ModelConfig
from minirl.model.decoder import Decoder
from minirl.model.tiny import tiny_shape
from minirl.plan.memory import Tokens
from minirl.train.batching import micro_batches
from minirl.train.optimizer import make_optimizer
from minirl.train.update import Learner, policy_objective
from minirl.types import TokenRow

GROUPS, G, C = 2, 8, 128
PROMPTS = (256, 512, 1024, 2048, 4096)


def demo_shape() -> ModelConfig:
    """Return the shape of the demo's model."""
    tiny = load_config("progress-demo.yaml", []).model.tiny
    assert tiny is not None
    return tiny_shape(tiny)


def make_groups(vocab_size: int, prompt_tokens: int) -> list[list[TokenRow]]:
    """Make random trajectories; the prompt's last token stands before the answer."""
    rng = np.random.default_rng(0)
    length = prompt_tokens + 1 + C
    is_action = np.arange(length) > prompt_tokens
    groups = []
    for _ in range(GROUPS):
        prompt = rng.integers(0, vocab_size, prompt_tokens + 1)
        group = []
        for _ in range(G):
            ids = np.concatenate([prompt, rng.integers(0, vocab_size, C)])
            logprobs = np.where(is_action, -np.log(vocab_size), 0.0)
            group.append(TokenRow(ids, is_action, logprobs, float(rng.normal()), len(prompt)))
        groups.append(group)
    return groups


def time_update(
    learner: Learner,
    params: nnx.State,
    groups: list[list[TokenRow]],
    sizes: BatchingConfig,
    *,
    runs: int,
) -> float:
    """Return the seconds of the fastest update; the first compiles and does not count."""
    state = learner.init(jax.tree.map(lambda leaf: leaf.copy(), params))
    seconds = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        batches = micro_batches(groups, aggregation="sequence_mean", sizes=sizes, pad_id=0)
        state, _ = learner.update(state, batches)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def compare(prompt_tokens: int, *, runs: int) -> dict[str, float]:
    """Time both layouts."""
    P = prompt_tokens
    model = Decoder(demo_shape(), key=jax.random.key(0))
    graph, params = nnx.split(model)
    learner = Learner(
        graph,
        policy_objective(Grpo(), temperature=1.0),
        make_optimizer(OptimizerConfig(), steps=100),
    )
    groups = make_groups(model.config.vocab_size, P)
    alone = [[row] for group in groups for row in group]
    # A group of one whose prompt is one token is a row computed in one pass.
    whole = [[replace(row, prompt_length=1)] for (row,) in alone]

    def seconds(groups: list[list[TokenRow]], units: int, prompt: int, answer: int) -> float:
        sizes = BatchingConfig(
            groups_per_batch=units, prompt_multiple=prompt, answer_multiple=answer
        )
        return time_update(learner, params, groups, sizes, runs=runs)

    shared = seconds(groups, 1, P, C)
    plain = min(
        *[seconds(alone, units, P, C) for units in (1, 4, 8)],
        *[seconds(whole, units, 1, P + C) for units in (1, 4)],
    )
    ideal = G * (P + C) / (P + G * C)

    def operations(prompts: int) -> float:
        tokens = Tokens(prompts, P, G, C)
        return update_flops(model.config, tokens, remat="none", causal=True)

    bound = operations(G) / operations(1)
    return {
        "prompt_tokens": P,
        "shared_s": round(shared, 3),
        "plain_s": round(plain, 3),
        "speed_up": round(plain / shared, 2),
        "ideal": round(ideal, 2),
        "share": round(plain / shared / ideal, 2),
        "bound": round(bound, 2),
        "share_of_bound": round(plain / shared / bound, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="timed runs; the fastest counts")
    runs = parser.parse_args().runs
    for prompt_tokens in PROMPTS:
        print(json.dumps(compare(prompt_tokens, runs=runs)), flush=True)


if __name__ == "__main__":
    main()
