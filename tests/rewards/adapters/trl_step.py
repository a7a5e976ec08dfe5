"""One step of TRL's own GRPOTrainer with every reward family, on the CPU, with a model made here.

    python tests/rewards/adapters/trl_step.py FOLDER LINES

LINES are those of docs/rewards.md, which make `trainer`.
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
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from minirl.config import TinyConfig
from minirl.model.tiny import make_tiny
from rewards.adapters.trl import SqlReward
from sqlenv.config import DataConfig, DemoConfig, SourceConfig
from sqlenv.data.loading import load
from sqlenv.demo import generate
from sqlenv.prompts import first_observation
from sqlenv.schema.reading import read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.types import Example

ROWS, GROUP = 2, 4
FAMILIES = ("progressive", "one_shot", "expo", "paverl", "astra")


def main(folder: Path, lines: str) -> None:
    examples = questions(folder / "data")
    rows = [row(example) for example in examples]
    answers = [f"<think></think><sql>{example.gold_sql}</sql>" for example in examples]
    texts = [f"{r['prompt'][0]['content']}\n{a}" for r, a in zip(rows, answers, strict=True)]
    shape = TinyConfig(
        vocab_size=600, hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1
    )
    make_tiny(folder / "model", texts, shape, 0)
    columns: dict[str, Any] = {name: [r[name] for r in rows] for name in rows[0]}
    told: dict[str, Any] = {}
    for family in FAMILIES:
        reward = SqlReward({"reward": {"kind": family}, "executor": {"workers": 1}})
        told[family] = train(folder, rows[:ROWS], reward)
        told[family]["gold_rewards"] = reward(answers, **columns)
    names: dict[str, Any] = {
        "trl": trl,
        "model": str(folder / "model"),
        "args": settings(folder),
        "dataset": Dataset.from_list(rows[:ROWS]),
    }
    exec(lines, names)  # noqa: S102  (the page's own lines)
    names["trainer"].train()
    steps = names["trainer"].state.global_step
    told["readme"] = {"steps": steps, "reward": names["reward"].__name__}
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


def train(folder: Path, rows: list[dict], reward: SqlReward) -> dict:
    """Take one step, and tell what the reward gave and how far the weights moved."""
    torch.manual_seed(0)
    seen, weights = Seen(reward), Weights()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=seen,
        train_dataset=Dataset.from_list(rows),
        args=settings(folder),
        callbacks=[weights],
    )
    trainer.train()
    logged = next(log for log in trainer.state.log_history if "reward" in log)
    return {
        "steps": trainer.state.global_step,
        "rewards": seen.rewards,
        "weights_moved": weights.moved,
        "logged": {k: v for k, v in logged.items() if "sql" in k or k == "reward"},
    }


class Seen:
    """Passes everything on to the reward, and sets one completion right.

    A model that has learnt nothing writes no SQL, so all rewards would be one number, and a group
    of equal rewards moves no weights.
    """

    __name__ = "sql_reward"

    def __init__(self, reward: SqlReward) -> None:
        self.reward = reward
        self.rewards: list[float] = []

    def __call__(self, completions, **columns):
        first = [{"role": "assistant", "content": f"<sql>{columns['gold_sql'][0]}</sql>"}]
        self.rewards = self.reward([first, *completions[1:]], **columns)
        return self.rewards


class Weights(TrainerCallback):
    """Sees whether the step changed the weights."""

    def on_train_begin(self, args, state, control, *, model: Any = None, **kwargs):
        self.before = [p.detach().clone() for p in model.parameters()]

    def on_train_end(self, args, state, control, *, model: Any = None, **kwargs):
        pairs = zip(self.before, model.parameters(), strict=True)
        self.moved = max(float((old - new).detach().abs().max()) for old, new in pairs)


def questions(folder: Path) -> tuple[Example, ...]:
    generate(folder, DemoConfig(train_databases=1, validation_databases=1, test_databases=1))
    source = SourceConfig(layout="spider", path=folder, limit=8)
    return load(DataConfig(sources=(source,))).examples


def row(example: Example) -> dict:
    text = render_schema(read_schema(example.database, examples=0), style="compact")
    messages = first_observation(example, text, style="demo")
    return {
        "prompt": [{"role": m.role, "content": m.content} for m in messages],
        "database": str(example.database),
        "gold_sql": example.gold_sql,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
