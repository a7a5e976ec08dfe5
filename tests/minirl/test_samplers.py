"""Samplers behind servers: weights are brought once, and a thousand episodes stay apart."""

from __future__ import annotations

import json
import resource
import threading
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from minirl.config import SamplerConfig, SglangConfig
from minirl.model.lora import split
from minirl.sample.rollout import rollout
from minirl.sglang.sampler import Servers
from minirl.train.rollouts import gather_metrics, make_sampler

from .fake_sglang import Fake
from .scripted_server import scripted

LIMITS = SamplerConfig(max_prompt_tokens=40, max_response_tokens=60)


@pytest.fixture
def serve(toy, tmp_path, monkeypatch):
    """Return `serve(urls, **settings)`: servers in use for the toy model."""
    size = toy.CONFIG.vocab_size
    monkeypatch.setattr(
        "minirl.sglang.sampler.read_config", lambda _: SimpleNamespace(vocab_size=size)
    )
    (tmp_path / "config.json").write_text('{"model_type": "toy", "architectures": ["Toy"]}')
    opened = []

    def start(urls, **settings):
        config = SglangConfig(urls=tuple(urls), tolerance=1e9, **settings)
        servers = Servers(config, tmp_path, LIMITS, dtype="float32", seed=0, folder=tmp_path)
        opened.append(servers.__enter__())
        return servers

    yield start
    for servers in opened:
        servers.__exit__()


def test_samplers_of_the_same_servers_bring_weights_once(toy, serve):
    fake = Fake()
    try:
        servers = serve([fake.url])
        one, other = (
            make_sampler(
                toy.model(), LIMITS, toy.Tokenizer(), group_size=1, seed=0, servers=servers
            )
            for _ in range(2)
        )

        def pushes():
            return fake.order.count("/update_weights_from_disk")

        first, second = split(toy.model())[1], split(toy.model(1))[1]
        one.set_weights(first, version=3)
        other.set_weights(split(toy.model())[1], version=3)  # the same arrays
        assert pushes() == 1
        other.set_weights(second, version=3)  # a second stage starts from other weights
        assert pushes() == 2
        one.set_weights(second, version=4)
        assert pushes() == 3
        one.set_weights(first, version=4)  # as from a checkpoint: equal, but other arrays
        assert pushes() == 4
    finally:
        fake.close()


def test_as_many_connections_as_the_system_has_are_allowed(serve):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fake = Fake()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        serve([fake.url], parallel=300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        fake.close()


class Deep:
    """Three turns."""

    def __init__(self, said):
        self.said = said

    def reset(self, example):
        return 0, [self.said("user", example)]

    def step(self, episode, reply):
        return episode + 1, None if episode == 2 else [self.said("user", "GO")]


def told(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/replies", timeout=30) as answer:
        return json.load(answer)


def test_numbers_of_processes_add_up_or_tell_the_worst(monkeypatch):
    told = [
        {"sglang/retries": 1.0, "sglang/servers": 2.0, "sglang/probe_gap": 1e-6},
        {"sglang/retries": 3.0, "sglang/servers": 1.0, "sglang/probe_gap": 2e-6},
    ]
    monkeypatch.setattr("minirl.train.rollouts.distributed.gather", lambda _: told)
    sampler: Any = SimpleNamespace(numbers=None)
    found = gather_metrics(sampler)
    assert found == {"sglang/retries": 4.0, "sglang/servers": 1.0, "sglang/probe_gap": 2e-6}


def test_a_thousand_episodes_are_played_by_few_threads_and_connections(toy, serve):
    parallel, workers = 64, 4
    environment = Deep(toy.Said)
    before = threading.active_count()
    most: list[int] = []
    reply = [10, 11, 1]
    with scripted(0.01, reply) as one, scripted(0.01, reply) as two:
        servers = serve([one, two], parallel=parallel)
        sampler = make_sampler(
            toy.model(), LIMITS, toy.Tokenizer(), group_size=4, seed=0, servers=servers
        )
        sampler.set_weights(split(toy.model())[1], version=0)
        groups = rollout(
            sampler, toy.Tokenizer(), environment, ["AB", "CDE"] * 125, config=LIMITS,
            group_size=4, first_episode=0, max_turns=3, env_workers=workers,
            ended=lambda *_: most.append(threading.active_count()),
        )  # fmt: skip
        counts = [told(url) for url in (one, two)]
    assert [len(group) for group in groups] == [4] * 250
    assert all(len(episode.turns) == 3 for group in groups for episode in group)
    assert {len(episode.turns[0].observation_ids) for episode in groups[1]} == {5}
    assert sum(count["replies"] for count in counts) == 3000  # none lost, none asked twice
    assert all(count["most_at_once"] <= parallel for count in counts)
    # One that was idle for long is replaced, and the server may see the new one first.
    assert all(count["most_connections"] <= 2 * (parallel + 4) for count in counts)
    assert max(most) <= before + workers + 2  # the event loop, and a name look-up
