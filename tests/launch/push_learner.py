"""A learner that pushes to servers by one backend, and tells what came of it as JSON.

    python push_learner.py MODEL WORK PUSH VICTIM URL...

It changes the weights and pushes them three times, the second time while a request is under way. A
process VICTIM, if it is not 0, is stopped in the middle of the third push, and woken after it.
PyTorch comes from the folder MINIRL_TORCH, where it is not installed beside the learner.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if "MINIRL_TORCH" in os.environ:
    sys.path.append(os.environ["MINIRL_TORCH"])

import jax
import pytest
from flax import nnx

from minirl.config import SamplerConfig, SglangConfig
from minirl.model import huggingface
from minirl.model.lora import split
from minirl.model.sharding import make_mesh
from minirl.model.tokenizer import ChatTokenizer
from minirl.sglang import transfer
from minirl.sglang.sampler import Servers, SglangSampler
from minirl.train.rollouts import make_sampler
from minirl.types import Decoding, Request

LONG = 64


def main(
    model_folder: Path, work: Path, push: str, victim: int, urls: Sequence[str]
) -> dict[str, Any]:
    mesh = make_mesh({"fsdp": 2, "tensor": 2}) if jax.device_count() == 4 else None
    model = huggingface.load(model_folder, mesh=mesh)
    _, params, _ = split(model)
    sampler = SamplerConfig(max_prompt_tokens=40, max_response_tokens=24)
    settings = {"urls": tuple(urls), "push": push, "start_s": 60, "wait_s": 60}
    config = SglangConfig.model_validate({**settings, "push_s": 20 if victim else 60})

    found: dict[str, Any] = {"gaps": [], "pushes": [], "asked": LONG}
    servers = Servers(config, model_folder, sampler, dtype="float32", seed=0, folder=work)
    with servers:
        tokenizer = ChatTokenizer(model_folder)
        one = make_sampler(model, sampler, tokenizer, group_size=1, seed=0, servers=servers)
        assert isinstance(one, SglangSampler)
        request = Request(1, (5, 6, 7), LONG, Decoding())
        asked = None
        for version in range(3):
            probe = servers.requirements.probe_ids
            before = one._logprobs(params, probe, 2)
            params = jax.tree.map(lambda leaf: leaf * 1.2, params)
            moved = float(abs(one._logprobs(params, probe, 2) - before).mean())
            found["moved"] = min(found.get("moved", 1e9), moved)
            if version == 1:
                asked = servers.start(servers.pool.sample(1, request, tokenizer.stop_ids))
            if version == 2 and victim:
                stop_in_the_middle(servers, victim)
            one.set_weights(params, version=version)
            numbers = one.numbers()
            found["gaps"].append(numbers.pop("sglang/probe_gap"))
            found["pushes"].append(numbers)
        assert asked is not None
        found["reply"] = len(asked.result(200).ids)
        found["numbers"] = one.numbers()
        if victim:
            os.kill(victim, signal.SIGCONT)
            found["after"] = until_all_are_back(servers, one, params, len(urls))
    return found


def stop_in_the_middle(servers: Servers, victim: int) -> None:
    """Let buckets be small, and stop a server before the second of the next push."""
    make = servers.transfer.buckets
    monkey = pytest.MonkeyPatch()
    monkey.setattr(transfer, "_BUCKET_BYTES", 1)

    def buckets(params: nnx.State, name: str) -> Iterator[Any]:
        for number, bucket in enumerate(make(params, name)):
            if number == 1:
                os.kill(victim, signal.SIGSTOP)
            yield bucket
        monkey.undo()

    monkey.setattr(servers.transfer, "buckets", buckets)


def until_all_are_back(
    servers: Servers, sampler: SglangSampler, params: nnx.State, count: int
) -> dict[str, float]:
    """Wait until the server that missed a push is well, push again, and return what happened."""
    assert any(any(one.is_waiting for one in servers.pool._replicas) for _ in polls())
    sampler.set_weights(params, version=3)
    found: dict[str, float] = {}
    for _ in polls():
        found = {key: max(value, found.get(key, 0)) for key, value in sampler.numbers().items()}
        if found["sglang/servers"] == count:
            return found
    raise AssertionError(found)


def polls() -> Iterator[None]:
    end = time.monotonic() + 200
    while time.monotonic() < end:
        yield
        time.sleep(0.2)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    folder, work, push, victim, *urls = sys.argv[1:]
    told = main(Path(folder), Path(work), push, int(victim), urls)
    sys.stdout.write(json.dumps(told) + "\n")
