"""Reply greedily with transformers; run by the Python of an environment of its own (torch,
transformers). Reads a job as JSON from standard input and writes JSON to a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # ty: ignore[import-not-found]  (no dependency of ours)
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

BATCH = 8


@torch.inference_mode()
def replies(job: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of each prompt and reply, and the log-probability of each id of the reply."""
    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    # Not the folder's, which may ask for a penalty of repetitions.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=job["tokens"],
        eos_token_id=job["stop_ids"],
        pad_token_id=job["pad_id"],
    )
    found = []
    for start in range(0, len(job["prompts"]), BATCH):
        prompts = [
            tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)
            for one in job["prompts"][start : start + BATCH]
        ]
        longest = max(map(len, prompts))
        ids = torch.tensor([[job["pad_id"]] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        made = model.generate(
            input_ids=ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True
        )
        steps = [torch.log_softmax(step, -1) for step in made.logits]
        for row, prompt in enumerate(prompts):
            reply = _until_stop(made.sequences[row, longest:].tolist(), job["stop_ids"])
            logprobs = [float(steps[at][row, i]) for at, i in enumerate(reply)]
            found.append({"prompt_ids": prompt, "ids": reply, "logprobs": logprobs})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"replies": found, "versions": versions}


def _until_stop(ids: list[int], stop_ids: list[int]) -> list[int]:
    return ids[: next((at + 1 for at, i in enumerate(ids) if i in stop_ids), len(ids))]


if __name__ == "__main__":
    result = replies(json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps(result))
