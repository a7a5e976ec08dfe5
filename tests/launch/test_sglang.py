"""Evaluation and rollouts with real SGLang servers: by text, under changing weights."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from launch import eval as evaluation
from launch.config import TinyConfig
from launch.tiny import make_tiny
from minirl.config import (
    BatchingConfig,
    OptimizerConfig,
    SamplerConfig,
    SftConfig,
    SglangConfig,
)
from minirl.exchange import Message
from minirl.model import huggingface
from minirl.model.tokenizer import ChatTokenizer
from minirl.sglang.sampler import Servers, SglangSampler
from minirl.train.supervised import Demonstration, Lessons, supervise
from minirl.types import Decoding, Request
from sqlenv.types import Observation
from tests.plain_model import logits

from .conftest import TINY, loaded, verbal_folder
from .sglang_server import serve

QUESTIONS, JUDGEMENTS = 3, 2
ANSWERS = tuple(f"<sql>SELECT {number}</sql>" for number in range(4))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a config that reads it, and a model that has learnt to write queries that run."""
    settings = {
        "candidates": 2, "attempts": 20, "judgements": JUDGEMENTS, "judge_retries": 1,
        "max_tokens": 24, "parallel": 1, "retries": 1, "timeout_s": 60,
    }  # fmt: skip
    folder = verbal_folder(tmp_path_factory.mktemp("sglang"), settings, questions=QUESTIONS)
    records = json.loads((folder / "data" / "train_spider.json").read_text(encoding="utf-8"))
    # Two answers to each: of some samples of a question, some are of each kind.
    shown = [
        ((Message("user", record["question"]),), ANSWERS[(n + other) % 4])
        for other in range(2)
        for n, record in enumerate(records)
    ]
    teach(folder, shown, steps=120, together=12, learning_rate=0.01)
    return folder


def teach(
    folder: Path,
    shown: Sequence[tuple[Observation, str]],
    *,
    steps: int,
    together: int,
    learning_rate: float = 0.02,
) -> None:
    """Make a model that answers prompts as it was shown, in `folder / "model"`."""
    shape = TinyConfig(**TINY["model"]["tiny"])
    texts = [text for prompt, answer in shown for text in (prompt[-1].content, answer)]
    make_tiny(folder / "raw", texts, shape, 0)
    model, tokenizer = huggingface.load(folder / "raw"), ChatTokenizer(folder / "raw")
    demonstrations = [Demonstration((prompt,), (), answer) for prompt, answer in shown]
    batching = BatchingConfig(prompt_multiple=64, answer_multiple=16)
    optimizer = OptimizerConfig(kind="muon", learning_rate=learning_rate, warmup_steps=2)
    config = SftConfig(
        steps=steps,
        groups_per_step=together,
        optimizer=optimizer,
        batching=batching,
        checkpoint_every=steps,
    )
    lessons = Lessons.of(demonstrations, tokenizer, config, seed=0)
    params = supervise(model, lessons, config, folder=folder / "warm")
    nnx.update(model, params)
    huggingface.save(model, folder / "model", source=folder / "raw")


def notes_of(out: Path) -> dict[str, Any]:
    return loaded(out)["notes"]


@pytest.mark.timeout(600)
def test_a_real_server_writes_candidates_and_judges_them_by_text(sglang_python, place, tmp_path):
    out = tmp_path / "out"
    named = ["--cfg", str(place / "verbal.yaml"), "--model", "tiny", "--decode", "judge"]
    with serve(sglang_python, place / "model", tmp_path / "sglang.log") as server:
        evaluation.main([*named, "--out", str(out), "--endpoint", f"{server}/v1"])
    result = notes_of(out)
    for cost in result["cost"].values():
        assert min(cost[name] for name in ("calls", "prompt_tokens", "completion_tokens")) > 0
    choices = [one["choice"] for one in loaded(out)["questions"]]
    assert len(choices) == QUESTIONS
    assert result["executable"] >= sum(len(choice["candidates"]) for choice in choices) > 0
    # Judging is beyond a model this small: its judgements are left out, and counted.
    sets = [choice for choice in choices if len(choice["candidates"]) == 2]
    assert sets
    assert all(choice["judged"] + choice["left_out"] == JUDGEMENTS for choice in sets)
    assert result["left_out"] > 0
    assert all(choice["sql"] in choice["candidates"] for choice in sets)


# Weights that change while a server writes: tokens know which ones sampled them.

LONGEST, EPISODES = 1000, 8


def logprobs_of(graph, params, ids):
    """Return the log-probability of each id but the first."""
    values = jax.nn.log_softmax(logits(nnx.merge(graph, params), np.array([ids]))[0])
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

    prompt = tuple(range(100, 140))
    asked = [
        Request(episode, (*prompt, episode + 1), LONGEST, Decoding()) for episode in range(EPISODES)
    ]
    replies = {}
    limits = SamplerConfig(max_prompt_tokens=64, max_response_tokens=LONGEST)
    with serve(sglang_python, folder, tmp_path / "server.log") as url:
        config = SglangConfig(urls=(url,))
        with Servers(config, folder, limits, dtype="float32", seed=0, folder=tmp_path) as servers:
            sampler = SglangSampler(tokenizer, servers)
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
