"""Rows that `launch.prepare --export` wrote, in the library that they are for: one step with them.

    python tests/rewards/adapters/exported_rows.py trl rows.jsonl LINES

LINES are those of docs/rewards.md, which load the file. Needs TRL, verl or SkyRL-gym.
Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

Told = dict[str, Any]


def trl(lines: str, folder: Path) -> Told:
    """Take a step of GRPO with the rows."""
    import torch  # ty: ignore[import-not-found]  (no dependency of ours)
    import trl_step
    from trl import GRPOTrainer

    from launch.config import TinyConfig
    from launch.tiny import make_tiny
    from rewards.adapters.trl import SqlReward

    names: Told = {}
    exec(lines, names)  # noqa: S102  (the page's own lines)
    rows = names["dataset"]
    shape = TinyConfig(
        vocab_size=600, hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1
    )
    make_tiny(folder / "model", [row["prompt"][-1]["content"] for row in rows], shape, 0)
    torch.manual_seed(0)
    trainer = GRPOTrainer(
        str(folder / "model"),
        reward_funcs=SqlReward({"reward": {"kind": "execution"}}),
        args=trl_step.settings(folder),
        train_dataset=rows,
    )
    trainer.train()
    logged = next(log for log in trainer.state.log_history if "reward" in log)
    return {"rows": len(rows), "steps": trainer.state.global_step, "reward": logged["reward"]}


def verl(lines: str, folder: Path) -> Told:
    """Load the rows as verl's trainer does, and have its reward manager score replies to them."""
    import numpy as np
    import torch  # ty: ignore[import-not-found]
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from transformers import AutoTokenizer
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    from launch.tiny import train_tokenizer

    asyncio.set_event_loop(asyncio.new_event_loop())
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines.split())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "model").mkdir()
    train_tokenizer(["SELECT"], vocab_size=300).save(str(folder / "model" / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(kind))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    settings = OmegaConf.merge(config.data, {"max_prompt_length": 100_000})
    rows = RLHFDataset(str(config.data.train_files), tokenizer, settings)
    batch = collate_fn([rows[0], rows[0]])
    gold = batch["reward_model"][0]["ground_truth"]
    texts = [f"<think></think><sql>{sql}</sql>" for sql in (gold, "SELECT 1 WHERE 0")]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    length = max(map(len, ids))
    told = torch.tensor([[*one, *[0] * (length - len(one))] for one in ids])
    mask = torch.tensor([[1] * len(one) + [0] * (length - len(one)) for one in ids])
    prompts = torch.zeros((2, 1), dtype=torch.long)
    tensors = {
        "prompts": prompts,
        "responses": told,
        "attention_mask": torch.cat([torch.ones_like(prompts), mask], 1),
    }
    arrays = {name: value for name, value in batch.items() if isinstance(value, np.ndarray)}
    data = DataProto(TensorDict(tensors, batch_size=2), arrays)
    manager = load_reward_manager(config, tokenizer)
    scored = [manager.loop.run_until_complete(manager.run_single(data[i : i + 1])) for i in (0, 1)]
    return {"rows": len(rows), "acc": [one["reward_extra_info"]["acc"] for one in scored]}


def skyrl(lines: str, _folder: Path) -> Told:
    """Make SkyRL's environment of a row, and play it."""
    names: Told = {}
    exec(lines, names)  # noqa: S102  (the page's own lines)
    rows, env = names["rows"], names["env"]
    env.init(rows[0]["prompt"])
    gold = rows[0]["reward_spec"]["ground_truth"]
    step = env.step(f"<think></think><sql>{gold}</sql>")
    return {"rows": len(rows), "done": step["done"], "correct": step["metadata"]["correct"]}


if __name__ == "__main__":
    place = Path(sys.argv[2]).absolute().parent
    made = {"trl": trl, "verl": verl, "skyrl": skyrl}[sys.argv[1]](sys.argv[3], place)
    sys.stdout.write(json.dumps(made) + "\n")
