"""Reply greedily with transformers, one prompt at a time; run by the Python of an environment of
its own (torch, transformers). Reads a job as JSON from standard input and writes JSON to a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # ty: ignore[import-not-found]  (no dependency of ours)
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


@torch.inference_mode()
def replies(job: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of each prompt and reply, and the log-probability of each id of the reply."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    # Not the folder's, which may ask for a penalty of repetitions.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=job["tokens"],
        eos_token_id=job["stop_ids"],
        pad_token_id=job["pad_id"],
    )
    found = []
    for messages in job["prompts"]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        made = model.generate(**ids, output_logits=True, return_dict_in_generate=True)
        start = ids["input_ids"].shape[1]
        reply = made.sequences[0, start:].tolist()
        logprobs = [
            float(torch.log_softmax(step[0], -1)[i])
            for step, i in zip(made.logits, reply, strict=True)
        ]
        prompt = ids["input_ids"][0].tolist()
        found.append({"prompt_ids": prompt, "ids": reply, "logprobs": logprobs})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"replies": found, "versions": versions}


if __name__ == "__main__":
    result = replies(json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps(result))
