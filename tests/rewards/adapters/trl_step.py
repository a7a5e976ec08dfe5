"""One step of TRL's own GRPOTrainer with our reward, on the CPU, with a model made here.

    python tests/rewards/adapters/trl_step.py DATABASE LINES

LINES are those of docs/rewards.md, which make `reward` and `trainer`.
Needs TRL beside the `cpu` extra (`pip install '.[cpu]' trl`).
Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # ty: ignore[import-not-found]  (no dependency of ours)
import trl
from datasets import Dataset
from trl import GRPOConfig

from launch.config import TinyConfig
from launch.tiny import make_tiny
from rewards.adapters.trl import SqlReward

GOLD = "SELECT name FROM singer WHERE age > 20"
ROWS, GROUP = 2, 4


def main(database: str, lines: str) -> None:
    folder = Path(database).parent
    shape = TinyConfig(
        vocab_size=600, hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1
    )
    make_tiny(folder / "model", [f"Who is over 20? {GOLD}"], shape, 0)
    row = {
        "prompt": [{"role": "user", "content": "Who is over 20?"}],
        "database": database,
        "gold_sql": GOLD,
    }
    names: dict[str, Any] = {
        "trl": trl,
        "model": str(folder / "model"),
        "args": settings(folder),
        "dataset": Dataset.from_list([row] * ROWS),
    }
    torch.manual_seed(0)
    exec(lines, names)  # noqa: S102  (the page's own lines)
    trainer = names["trainer"]
    seen = trainer.reward_funcs[0] = Seen(names["reward"])
    before = [weights.detach().clone() for weights in trainer.model.parameters()]
    trainer.train()
    pairs = zip(before, trainer.model.parameters(), strict=True)
    told = {
        "name": names["reward"].__name__,
        "steps": trainer.state.global_step,
        "rewards": seen.rewards,
        "weights_moved": max(float((old - new).detach().abs().max()) for old, new in pairs),
        "logged": next(log for log in trainer.state.log_history if "reward" in log),
    }
    sys.stdout.write(json.dumps(told) + "\n")


def settings(folder: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=ROWS * GROUP,
        num_generations=GROUP,
        max_completion_length=24,
        max_steps=1,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


class Seen:
    """Passes everything on to the reward, and sets one completion right.

    A model that has learnt nothing writes no SQL, so all rewards would be one number, and a group
    of equal rewards moves no weights.
    """

    def __init__(self, reward: SqlReward) -> None:
        self.reward = reward
        self.rewards: list[float] = []

    def __call__(self, completions, **columns):
        first = [{"role": "assistant", "content": f"<sql>{GOLD}</sql>"}]
        self.rewards = self.reward([first, *completions[1:]], **columns)
        return self.rewards


if __name__ == "__main__":
    main(*sys.argv[1:])
