"""Weights that change while a real SGLang server writes: tokens know which ones sampled them."""

from __future__ import annotations

import json
import time
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minirl.config import SamplerConfig, SglangConfig, TinyConfig
from minirl.model import attention, huggingface
from minirl.model.tiny import make_tiny
from minirl.model.tokenizer import ChatTokenizer
from minirl.sglang.sampler import Servers, SglangSampler
from minirl.types import Decoding, Request

from .conftest import TINY
from .sglang_server import serve

LONGEST, EPISODES = 1000, 8


def logprobs_of(graph, params, ids):
    """Return the log-probability of each id but the first."""
    model = nnx.merge(graph, params)
    tokens = jnp.asarray([ids], jnp.int32)
    hidden, _ = model(tokens, jnp.arange(len(ids))[None], attention.causal())
    values = jax.nn.log_softmax(model.logits(hidden)[0])
    return np.asarray(values)[np.arange(len(ids) - 1), ids[1:]]


def running(url):
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=30) as answer:
        return sum(one["num_running_reqs"] for one in json.load(answer)["loads"])


@pytest.mark.timeout(900)
def test_a_reply_of_two_weights_has_the_log_probabilities_of_both(sglang_python, tmp_path):
    folder = tmp_path / "model"
    make_tiny(folder, ["How many students are there?"], TinyConfig(**TINY["model"]["tiny"]), 0)
    model, tokenizer = huggingface.load(folder), ChatTokenizer(folder)
    graph, old = nnx.split(model)
    key = jax.random.key(0)
    new = jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(key, leaf.shape), old)

    def learner(params, ids, prompt_length):
        return logprobs_of(graph, params, list(ids))[prompt_length - 1 :]

    prompt = tuple(range(100, 140))
    asked = [
        Request(episode, (*prompt, episode + 1), LONGEST, Decoding()) for episode in range(EPISODES)
    ]
    replies = {}
    limits = SamplerConfig(max_prompt_tokens=64, max_response_tokens=LONGEST)
    with serve(sglang_python, folder, tmp_path / "server.log") as url:
        config = SglangConfig(urls=(url,), tolerance=1e-4)
        with Servers(config, folder, limits, dtype="float32", seed=0, folder=tmp_path) as servers:
            sampler = SglangSampler(model, tokenizer, servers, logprobs=learner)
            sampler.set_weights(old, version=3)
            for request in asked:
                sampler.submit(request)
            end = time.monotonic() + 60
            while running(url) < EPISODES // 2:
                assert time.monotonic() < end
            sampler.set_weights(new, version=4)
            while len(replies) < EPISODES:
                replies.update(sampler.advance(max_steps=1))
            numbers = sampler.numbers()
    # None was asked twice, none was given up.
    assert numbers["sglang/requests"] == EPISODES
    assert numbers["sglang/retries"] == numbers["sglang/left_out"] == 0
    mixed = 0
    for episode, reply in replies.items():
        versions = np.array(reply.versions)
        assert len(versions) == len(reply.ids) == len(reply.logprobs)
        assert (np.diff(versions) >= 0).all()
        assert set(reply.versions) <= {3, 4}
        mixed += len(set(reply.versions)) == 2
        ids = [*asked[episode].ids, *reply.ids]
        for version, params in ((3, old), (4, new)):
            own = logprobs_of(graph, params, ids)[-len(reply.ids) :]
            gap = np.abs(own - np.array(reply.logprobs))[versions == version]
            assert (gap < 1e-4).all()
    assert mixed >= 1
