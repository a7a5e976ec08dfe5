"""New weights come to two real servers, whole or as adapters, while a request is under way."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import pytest

from launch.config import TinyConfig
from launch.tiny import make_tiny
from minirl.config import LoraConfig, SamplerConfig, SglangConfig
from minirl.model import huggingface
from minirl.model.lora import add_adapters, trained
from minirl.model.sharding import make_mesh
from minirl.model.tokenizer import ChatTokenizer
from minirl.sglang.sampler import Servers, SglangSampler
from minirl.train.rollouts import make_sampler
from minirl.types import Decoding, Request

from .conftest import TINY
from .sglang_server import ARGUMENTS, VARIABLES, serve

LIMITS = SamplerConfig(max_prompt_tokens=40, max_response_tokens=24)
LONG = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "model"
    make_tiny(folder, ["SELECT name FROM emp"], TinyConfig(**TINY["model"]["tiny"]), 0)
    return folder


@pytest.fixture(scope="module")
def urls(sglang_python, model) -> Generator[tuple[str, ...]]:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starts = [serve(sglang_python, model, model.with_name(f"{n}.log")) for n in range(2)]
        yield tuple(pool.map(stack.enter_context, starts))


@pytest.mark.timeout(900)
def test_servers_compute_what_the_learner_does(model, urls, tmp_path):
    """The learner's weights are split over four devices."""
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    policy, tokenizer = huggingface.load(model, mesh=mesh), ChatTokenizer(model)
    params = trained(policy)
    config = SglangConfig(urls=urls, wait_s=60)
    told = []
    with Servers(config, model, LIMITS, dtype="float32", seed=0, folder=tmp_path) as servers:
        sampler = make_sampler(policy, LIMITS, tokenizer, group_size=1, seed=0, servers=servers)
        assert isinstance(sampler, SglangSampler)
        probe = servers.requirements.probe_ids
        for version in range(3):
            before = sampler._logprobs(params, probe, 2)
            params = jax.tree.map(lambda leaf: leaf * 1.2, params)
            # What the weights of the step before would be off by.
            assert abs(sampler._logprobs(params, probe, 2) - before).mean() > 1e-2
            if version == 1:
                request = Request(1, (5, 6, 7), LONG, Decoding())
                asked = servers.start(servers.pool.sample(request, tokenizer.stop_ids))
            sampler.set_weights(params, version=version)
            told.append(sampler.numbers())
        assert 0 < len(asked.result(200).ids) <= LONG
        told.append(sampler.numbers())
    assert max(numbers["sglang/probe_gap"] for numbers in told[:3]) < 1e-4
    assert sum(numbers["sglang/requests"] for numbers in told) == 1
    assert told[0]["sglang/servers"] == 2
    for numbers in told:
        # A reply that old and new weights wrote together may be asked for once more.
        failed = {key for key, value in numbers.items() if "/failed_" in key and value}
        assert failed <= {"sglang/failed_stale"}
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.timeout(900)
def test_a_server_is_given_adapters_alone(sglang_python, model, tmp_path):
    """Some MB are pushed and nothing is paused: a reply under way is all of one version."""
    lora = LoraConfig(rank=4, targets=("q", "v", "down"))
    policy, tokenizer = huggingface.load(model), ChatTokenizer(model)
    add_adapters(policy, lora, seed=0)
    params, rng = trained(policy), np.random.default_rng(0)
    config = SglangConfig(
        launch=1, python=sglang_python, arguments=ARGUMENTS | {"lora-backend": "torch_native"},
        variables=VARIABLES, wait_s=480,
    )  # fmt: skip
    gaps, request = [], Request(1, (5, 6, 7), LONG, Decoding())
    with Servers(
        config, model, LIMITS, dtype="float32", seed=0, folder=tmp_path, lora=lora
    ) as servers:
        sampler = make_sampler(policy, LIMITS, tokenizer, group_size=1, seed=0, servers=servers)
        assert isinstance(sampler, SglangSampler)
        probe, before, versions = servers.requirements.probe_ids, 0.0, []
        for version in range(4):
            logprobs = sampler._logprobs(params, probe, 2)
            assert version == 0 or abs(logprobs - before).mean() > 1e-2
            sampler.set_weights(params, version=version)
            gaps.append(sampler.numbers()["sglang/probe_gap"])
            asked = servers.start(servers.pool.sample(request, tokenizer.stop_ids))
            versions.append(asked)
            before = logprobs
            params = jax.tree.map(
                lambda leaf: leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32), params
            )
        for version, asked in enumerate(versions):
            assert {*map(servers.pool.version_of, asked.result(200).versions)} == {version}
        assert sampler.numbers()["sglang/retries"] == 0
    assert max(gaps) < 1e-4
