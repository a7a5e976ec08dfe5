"""Samplers behind servers: weights are brought once, and many episodes stay apart."""
# ruff: noqa: F811  (a fixture of another file)

from __future__ import annotations

import resource
import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

from minirl.config import SamplerConfig
from minirl.model.lora import trained
from minirl.sample.rollout import Rollout
from minirl.train.rollouts import gather_metrics, make_sampler
from tests.waiting import wait_until

from .test_pool import serve  # noqa: F401
from .test_rollout import Turns

LIMITS = SamplerConfig(max_prompt_tokens=40, max_response_tokens=60)


def test_samplers_of_the_same_servers_bring_weights_once(toy, serve, fakes):
    servers = serve(fakes[:1], push=False)
    one, other = (
        make_sampler(toy.model(), LIMITS, toy.Tokenizer(), group_size=1, seed=0, servers=servers)
        for _ in range(2)
    )

    def pushes():
        return fakes[0].order.count("/update_weights_from_disk")

    first, second = trained(toy.model()), trained(toy.model(1))
    one.set_weights(first, version=3)
    other.set_weights(trained(toy.model()), version=3)  # the same arrays
    assert pushes() == 1
    other.set_weights(second, version=3)  # a second stage starts from other weights
    assert pushes() == 2
    one.set_weights(second, version=4)
    assert pushes() == 3
    one.set_weights(first, version=4)  # as from a checkpoint: equal, but other arrays
    assert pushes() == 4
    assert len(list(servers.root.iterdir())) == 1  # each is as large as the model


def test_weights_come_while_the_learner_does_other_things(toy, serve, fakes):
    servers = serve(fakes[:1], push=False)
    sampler = make_sampler(
        toy.model(), LIMITS, toy.Tokenizer(), group_size=1, seed=0, servers=servers
    )
    go = threading.Event()
    fakes[0].faults["/update_weights_from_disk"] = [lambda right: go.wait(60) and right]
    weights = trained(toy.model())
    sampler.send_weights(weights, version=3)
    wait_until(lambda: fakes[0].paused)
    time.sleep(0.5)  # nobody waits for it
    assert fakes[0].paused
    go.set()
    sampler.set_weights(weights, version=3)
    assert ("-3-" in fakes[0].weights, fakes[0].paused) == (True, False)
    numbers = sampler.numbers()
    assert 0.5 <= numbers["time/push_hidden_s"] <= numbers["time/push_s"]
    assert fakes[0].order.count("/update_weights_from_disk") == 1


def test_a_process_may_open_as_many_connections_as_the_system_allows(serve, fakes):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        serve(fakes[:1], push=False)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_numbers_of_processes_add_up_or_tell_the_worst(monkeypatch):
    told = [
        {"sglang/retries": 1.0, "sglang/servers": 2.0, "time/push_s": 0.1},
        {"sglang/retries": 3.0, "sglang/servers": 1.0, "time/push_s": 0.2},
    ]
    monkeypatch.setattr("minirl.train.rollouts.distributed.gather", lambda _: told)
    sampler: Any = SimpleNamespace(numbers=None)
    found = gather_metrics(sampler)
    assert found == {"sglang/retries": 4.0, "sglang/servers": 1.0, "time/push_s": 0.2}


def test_many_episodes_are_played_by_few_threads_and_connections(toy, serve, fakes):
    parallel, workers, lock = 8, 4, threading.Lock()
    now, at_once, threads = Counter(), Counter(), []

    def held(body, fake):
        with lock:
            now[fake] += 1
            at_once[fake] = max(at_once[fake], now[fake])
        time.sleep(0.005)
        with lock:
            now[fake] -= 1

    def count():
        # Those of the fakes have the names that Python gives.
        threads.append(sum("process_request" not in one.name for one in threading.enumerate()))

    for fake in fakes:
        fake.held = partial(held, fake=fake)
    servers = serve(fakes, push=False, parallel=parallel)
    before = sum("process_request" not in one.name for one in threading.enumerate())
    sampler = make_sampler(
        toy.model(), LIMITS, toy.Tokenizer(), group_size=4, seed=0, servers=servers
    )
    sampler.set_weights(trained(toy.model()), version=0)
    groups = Rollout(
        sampler, toy.Tokenizer(), Turns(toy.Message, turns=3), ["AB", "CDE"] * 25, config=LIMITS,
        group_size=4, first_episode=0, max_turns=3, env_workers=workers, check=count,
    ).play()  # fmt: skip
    assert [len(group) for group in groups] == [4] * 50
    assert all(len(episode.turns) == 3 for group in groups for episode in group)
    assert {len(episode.turns[0].observation_ids) for episode in groups[1]} == {5}
    asked = [body["rid"] for fake in fakes for body in fake.bodies
             if body["sampling_params"]["max_new_tokens"]]  # fmt: skip
    assert len(set(asked)) == len(asked) == 600  # none lost, none asked twice
    assert 2 < max(at_once.values()) <= parallel
    assert max(threads) <= before + workers + 2  # the event loop, and a name look-up
