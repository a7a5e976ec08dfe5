"""New weights come to two real servers, whole or as adapters, while a request is under way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from launch.config import TinyConfig
from launch.tiny import make_tiny
from minirl.config import LoraConfig, SamplerConfig, SglangConfig
from minirl.model import huggingface
from minirl.model.lora import add_adapters, split, trained
from minirl.model.sharding import make_mesh
from minirl.model.tokenizer import ChatTokenizer
from minirl.sglang.sampler import Servers, SglangSampler
from minirl.train.rollouts import make_sampler
from minirl.types import Decoding, Reply, Request, Sampler
from tests.plain_model import logits

from .conftest import TINY
from .sglang_server import ARGUMENTS, VARIABLES, serve

LIMITS = SamplerConfig(max_prompt_tokens=40, max_response_tokens=24)
LONG = 64
# On a CPU SGLang keeps no states beside those in use, which overlapping batches would need.
FLAGS = {"qwen2": (), "qwen3.5": ("disable-overlap-schedule",)}


@pytest.fixture(scope="module", params=["qwen2", "qwen3.5"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "model"
    shape = TINY["model"]["tiny"] | {"kind": kind, "layers": 4}
    make_tiny(folder, ["SELECT name FROM emp"], TinyConfig(**shape), 0)
    return folder


@pytest.fixture
def urls(sglang_python, kind, model) -> Generator[tuple[str, ...]]:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        logs = [model.with_name(f"{n}.log") for n in range(2)]
        starts = [serve(sglang_python, model, log, flags=FLAGS[kind]) for log in logs]
        yield tuple(pool.map(stack.enter_context, starts))


def with_tower(model, folder):
    """Copy a Qwen3.5 as it is published, with a vision tower, which servers leave out."""
    shutil.copytree(model, folder)
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": json.loads((model / "config.json").read_text()),
        "vision_config": {"model_type": "qwen3_5_vision"},
        "tie_word_embeddings": True,
        "language_model_only": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(params, rng, scale):
    """Move all weights, also those that begin with 0."""
    return jax.tree.map(
        lambda leaf: leaf + rng.normal(0, scale, leaf.shape).astype(np.float32), params
    )


def greedy_turns(sampler: Sampler) -> list[Reply]:
    """Return the greedy replies of an episode of two turns."""
    replies, request = [], Request(9, (5, 6, 7), 10, Decoding(temperature=0.0))
    for _ in range(2):
        sampler.submit(request)
        while not (ended := sampler.advance(max_steps=32)):
            pass
        ((_, reply),) = ended
        replies.append(reply)
        request = replace(request, ids=(*request.ids, *reply.ids, 8, 9))
    sampler.release(9)
    return replies


def gaps_of(servers, policy, weights, episode, tokenizer):
    """Let a server sample 16 tokens; return by how much its log-probabilities are off those of the
    policy with each of these weights, on average.
    """
    request = Request(episode, (5, 6, 7), 16, Decoding())
    reply = servers.start(servers.pool.sample(request, tokenizer.stop_ids)).result(200)
    graph, _, frozen = split(policy)
    ids = [*request.ids, *reply.ids]
    found = []
    for one in weights:
        values = jax.nn.log_softmax(logits(nnx.merge(graph, one, frozen), np.array([ids]))[0])
        own = np.asarray(values)[np.arange(2, len(ids) - 1), ids[3:]]
        found.append(np.abs(own - np.array(reply.logprobs)).mean())
    return found


@pytest.mark.timeout(900)
def test_servers_compute_what_the_learner_does(model, urls, tmp_path):
    """And their greedy replies are the native sampler's. The weights of both are split over four
    devices.
    """
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    policy, tokenizer = huggingface.load(model, mesh=mesh), ChatTokenizer(model)
    params, rng = trained(policy), np.random.default_rng(0)
    native = make_sampler(policy, LIMITS, tokenizer, group_size=1, seed=0)
    config = SglangConfig(urls=urls, wait_s=60)
    told = []
    with Servers(config, model, LIMITS, dtype="float32", seed=0, folder=tmp_path) as servers:
        sampler = make_sampler(policy, LIMITS, tokenizer, group_size=1, seed=0, servers=servers)
        assert isinstance(sampler, SglangSampler)
        for version in range(3):
            before = params
            params = changed(jax.tree.map(lambda leaf: leaf * 1.2, params), rng, 0.02)
            if version == 1:
                request = Request(1, (5, 6, 7), LONG, Decoding())
                asked = servers.start(servers.pool.sample(request, tokenizer.stop_ids))
            sampler.set_weights(params, version=version)
            for episode in range(len(urls)):
                close, far = gaps_of(servers, policy, (params, before), episode, tokenizer)
                assert close < 1e-4
                assert far > 1e-2  # what the weights of the step before would be off by
            native.set_weights(params, version=version)
            for served, own in zip(greedy_turns(sampler), greedy_turns(native), strict=True):
                assert served.ids == own.ids
                np.testing.assert_allclose(served.logprobs, own.logprobs, atol=1e-4)
            told.append(sampler.numbers())
        assert 0 < len(asked.result(200).ids) <= LONG
        told.append(sampler.numbers())
    assert sum(numbers["sglang/requests"] for numbers in told) == 1 + 3 * (len(urls) + 2)
    assert told[0]["sglang/servers"] == 2
    for numbers in told:
        # A reply that old and new weights wrote together may be asked for once more.
        failed = {key for key, value in numbers.items() if "/failed_" in key and value}
        assert failed <= {"sglang/failed_stale"}
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.timeout(900)
def test_a_server_is_given_adapters_alone(sglang_python, kind, model, tmp_path):
    """Some MB are pushed and nothing is paused: a reply under way is all of one version."""
    if kind == "qwen3.5":
        model = with_tower(model, tmp_path / "model")
    lora = LoraConfig(rank=4, targets=("q", "v", "down", "in_qkv", "out"))
    policy, tokenizer = huggingface.load(model), ChatTokenizer(model)
    add_adapters(policy, lora, seed=0)
    params, rng = trained(policy), np.random.default_rng(0)
    arguments = ARGUMENTS | {"lora-backend": "torch_native"} | dict.fromkeys(FLAGS[kind], True)
    config = SglangConfig(
        launch=1, python=sglang_python, arguments=arguments, variables=VARIABLES, wait_s=480
    )
    request = Request(1, (5, 6, 7), LONG, Decoding())
    with Servers(
        config, model, LIMITS, dtype="float32", seed=0, folder=tmp_path, lora=lora
    ) as servers:
        sampler = make_sampler(policy, LIMITS, tokenizer, group_size=1, seed=0, servers=servers)
        assert isinstance(sampler, SglangSampler)
        before, versions = params, []
        for version in range(4):
            sampler.set_weights(params, version=version)
            asked = servers.start(servers.pool.sample(request, tokenizer.stop_ids))
            versions.append(asked)
            close, far = gaps_of(servers, policy, (params, before), 0, tokenizer)
            assert close < 1e-4
            assert version == 0 or far > 1e-2
            before = params
            params = changed(params, rng, 0.1)
        for version, asked in enumerate(versions):
            assert {*map(servers.pool.version_of, asked.result(200).versions)} == {version}
        assert sampler.numbers()["sglang/retries"] == 0
