"""Our `compute_score`, loaded and called by verl's own reward managers.

    python tests/rewards/adapters/verl_step.py DATABASE LINES

LINES are docs/rewards.md's overrides of verl's settings. Needs verl (`pip install . verl`).
Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
import torch  # ty: ignore[import-not-found]  (no dependency of ours)
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.workers.reward_manager import get_reward_manager_cls

GOLD = "SELECT name FROM singer WHERE age > 20"
REPLIES = (f"<think></think><sql>{GOLD}</sql>", "<sql>SELECT name FROM singer</sql>", "no idea")


class Characters:
    """A tokenizer of characters."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids.tolist() if i)


def main(database: str, lines: str) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines.split())
    data = batch(database)
    manager = load_reward_manager(config, Characters())
    loop = [manager.loop.run_until_complete(manager.run_single(data[i : i + 1])) for i in range(3)]
    classic = get_reward_manager_cls("naive")(
        Characters(), num_examine=0, compute_score=get_custom_reward_fn(config)
    )(data, return_dict=True)
    told = {
        "run_single": [one["reward_score"] for one in loop],
        "extra": loop[0]["reward_extra_info"],
        "reward_tensor": classic["reward_tensor"].sum(-1).tolist(),
        "acc": list(classic["reward_extra_info"]["acc"]),
    }
    sys.stdout.write(json.dumps(told) + "\n")


def batch(database: str) -> DataProto:
    length = max(map(len, REPLIES))
    ids = torch.tensor([[*map(ord, r), *[0] * (length - len(r))] for r in REPLIES])
    prompts = torch.full((len(REPLIES), 2), ord("?"))
    tensors = {
        "prompts": prompts,
        "responses": ids,
        "attention_mask": torch.cat([torch.ones_like(prompts), (ids > 0).long()], 1),
    }
    row = {
        "data_source": "demo",
        "reward_model": {"style": "rule", "ground_truth": GOLD},
        "extra_info": {"database": database},
    }
    arrays = {name: np.array([one] * len(REPLIES), dtype=object) for name, one in row.items()}
    return DataProto(TensorDict(tensors, batch_size=len(REPLIES)), arrays)


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    main(*sys.argv[1:])
