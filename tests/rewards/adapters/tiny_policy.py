"""A tiny policy with which the real trainers take a step on a CPU.

    python tests/rewards/adapters/tiny_policy.py ROWS FOLDER

writes a model that has learnt to answer about half of its replies to the rows right, so that groups
of replies differ in reward. ROWS are those that `launch.prepare --export` wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch  # ty: ignore[import-not-found]  (no dependency of ours)
from datasets import load_dataset
from torch import Tensor  # ty: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.config import TinyConfig
from launch.tiny import make_tiny

MOST_TOKENS = 40
SHAPE = TinyConfig(
    vocab_size=600, hidden_size=64, intermediate_size=128, layers=2, heads=2, kv_heads=1
)


def teach(rows: Path, folder: Path) -> None:
    """Make a model, and train it on the gold queries until it gives every other one."""
    kind = {".jsonl": "json"}.get(rows.suffix, "parquet")
    examples = [
        (row["prompt"], f"```sql\n{_gold(row)}\n```<|im_end|>")
        for row in load_dataset(kind, data_files=str(rows), split="train")
    ]
    make_tiny(folder, [prompt[-1]["content"] + answer for prompt, answer in examples], SHAPE, 0)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) + answer
        for prompt, answer in examples
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    answers = [len(tokenizer(answer)["input_ids"]) for _, answer in examples]
    labels = batch["input_ids"].clone()
    for row, length in zip(labels, answers, strict=True):
        row[:-length] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(1000):
        loss = model(**batch, labels=labels).loss
        if loss * sum(answers) / len(answers) < 0.7:  # -log of a half
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def _gold(row: Mapping[str, Any]) -> str:
    return row.get("gold_sql") or (row.get("reward_model") or row["reward_spec"])["ground_truth"]


class Sampler:
    """Samples replies in a process of its own, from weights that the trainer sends."""

    def __init__(self, folder: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.version = 0
        torch.manual_seed(0)

    def load(self, weights: Mapping[str, Tensor], version: int = 0) -> None:
        self.model.load_state_dict(weights)
        self.version = version

    def sample(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        """Return the ids of a reply and their log-probabilities."""
        ids = torch.tensor([prompt_ids])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=MOST_TOKENS,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        reply = made.sequences[0, ids.shape[1] :]
        logp = torch.stack(made.logits, 1)[0].log_softmax(-1)
        return reply.tolist(), logp.gather(-1, reply[:, None])[:, 0].tolist()


if __name__ == "__main__":
    teach(Path(sys.argv[1]), Path(sys.argv[2]))
