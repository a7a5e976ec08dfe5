"""Compare greedy replies of the native sampler with those of transformers or of an SGLang server.

    python benchmarks/reply_equality.py --model FOLDER --python OTHER/bin/python
    python benchmarks/reply_equality.py --model FOLDER --server http://127.0.0.1:30000 \
        --prompts-file prompts.json --prompts 32 --tokens 48

`--python` is that of an environment with torch and transformers, `--server` the address of a server
of the same model; both are to compute in float32. Prompts are questions about the demo's databases,
or a JSON list of texts. Prints one line of JSON: how many prompts and replies are the same token
for token, and the largest difference of the log-probabilities of their tokens; where a reply
differs, the place and both log-probabilities there. Exit status 1 unless all are the same, with a
difference of at most 1e-4 (a server: 1e-3).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks._step import demo_prompts, read_prompts, reply
from minirl.config import SamplerConfig
from minirl.model import huggingface
from minirl.model.lora import trained
from minirl.model.tokenizer import ChatTokenizer
from minirl.sample.sampler import NativeSampler
from sqlenv.types import Observation

BOUNDS = {"transformers": 1e-4, "sglang": 1e-3}
SLOTS = 8
THEIRS = Path(__file__).with_name("_transformers_replies.py")


def transformers_replies(
    python: Path, model: Path, tokenizer: ChatTokenizer, prompts: Sequence[Observation], tokens: int
) -> dict[str, Any]:
    """Let transformers reply, in a process that ends before ours takes its memory."""
    job = {
        "model": str(model),
        "tokens": tokens,
        "stop_ids": tokenizer.stop_ids,
        "pad_id": tokenizer.pad_id,
        "prompts": [[asdict(message) for message in prompt] for prompt in prompts],
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "replies.json"
        command = [str(python), str(THEIRS), str(out)]
        subprocess.run(command, input=json.dumps(job), text=True, check=True)
        return json.loads(out.read_text())


def server_replies(
    url: str, tokenizer: ChatTokenizer, prompts: Sequence[Observation], tokens: int
) -> dict[str, Any]:
    """Let an SGLang server reply, to one prompt at a time."""
    limits = {"max_new_tokens": tokens, "temperature": 0, "stop_token_ids": tokenizer.stop_ids}

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{url}/{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    replies = []
    for prompt in prompts:
        ids = list(tokenizer.encode_chat(prompt))
        body = {"input_ids": ids, "sampling_params": limits, "return_logprob": True}
        said = ask("generate", body)["meta_info"]["output_token_logprobs"]
        found = {"ids": [token for _, token, _ in said], "logprobs": [logp for logp, *_ in said]}
        replies.append({"prompt_ids": ids, **found})
    return {"replies": replies, "versions": {"sglang": ask("get_server_info")["version"]}}


def our_replies(
    folder: Path, tokenizer: ChatTokenizer, prompts: Sequence[Observation], tokens: int
) -> list[dict[str, Any]]:
    """Reply with the sampler that training and evaluation use."""
    longest = max(len(tokenizer.encode_chat(prompt)) for prompt in prompts)
    config = SamplerConfig(
        slots=SLOTS, max_prompt_tokens=longest, max_response_tokens=tokens, temperature=0.0
    )
    model = huggingface.load(folder)
    sampler = NativeSampler(model, config, tokenizer, group_size=1, seed=0)
    sampler.set_weights(trained(model), version=0)
    groups = reply(sampler, tokenizer, prompts, config, group_size=1)
    turns = [group[0].turns[0] for group in groups]
    parts = [(turn.observation_ids, turn.reply.ids, turn.reply.logprobs) for turn in turns]
    names = ("prompt_ids", "ids", "logprobs")
    return [dict(zip(names, map(list, one), strict=True)) for one in parts]


def compare(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count what is the same, and find the largest difference up to where replies part."""
    same_prompts, same_replies, tokens, gap = 0, 0, 0, 0.0
    parted = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        same_prompts += one["prompt_ids"] == other["prompt_ids"]
        same_replies += one["ids"] == other["ids"]
        pairs = list(zip(one["ids"], other["ids"], strict=False))
        alike = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        gaps = [abs(one["logprobs"][at] - other["logprobs"][at]) for at in range(alike)]
        tokens, gap = tokens + alike, max([gap, *gaps])
        if one["ids"] != other["ids"]:
            here = [side["logprobs"][alike : alike + 1] for side in (one, other)]
            parted.append({"prompt": number, "token": alike, "logprobs": here})
    same = {"prompts": len(ours), "same_prompts": same_prompts, "same_replies": same_replies}
    return {**same, "tokens": tokens, "largest_gap": gap, "parted": parted}


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--python", type=Path, help="of the environment of transformers")
    other.add_argument("--server", metavar="URL", help="address of an SGLang server")
    parser.add_argument("--prompts", type=int, default=32, help="how many (default: 32)")
    parser.add_argument("--prompts-file", type=Path, help="a JSON list of texts")
    parser.add_argument("--tokens", type=int, default=48, help="longest reply (default: 48)")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    count, tokens, file = options.prompts, options.tokens, options.prompts_file
    prompts = (read_prompts(file) if file else demo_prompts(count))[:count]
    tokenizer = ChatTokenizer(options.model)
    if options.server:
        theirs = server_replies(options.server.rstrip("/"), tokenizer, prompts, tokens)
    else:
        theirs = transformers_replies(options.python, options.model, tokenizer, prompts, tokens)
    ours = our_replies(options.model, tokenizer, prompts, tokens)
    found = compare(ours, theirs["replies"])
    print(json.dumps({"model": options.model.name, **found, **theirs["versions"]}))
    is_same = found["same_prompts"] == found["same_replies"] == found["prompts"]
    bound = min(BOUNDS[name] for name in theirs["versions"] if name in BOUNDS)
    sys.exit(0 if is_same and found["largest_gap"] <= bound else 1)


if __name__ == "__main__":
    main()
