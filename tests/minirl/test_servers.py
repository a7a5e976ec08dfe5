"""Servers that fail, are given weights and adapters, and are children of a run."""

import errno
import json
import math
import os
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from minirl.config import SGLANG_PYTHON, LoraConfig, SamplerConfig, SglangConfig
from minirl.exchange import LostError, UserError
from minirl.model import huggingface
from minirl.model.lora import trained
from minirl.model.sharding import make_mesh
from minirl.run import preemption
from minirl.run.preemption import Preempted
from minirl.sample.rollout import Rollout
from minirl.sglang import process, transfer
from minirl.sglang.sampler import Servers
from minirl.sglang.server import PushedWeights
from minirl.train.rollouts import gather_metrics, make_sampler
from minirl.types import Request
from tests.plain_model import assert_same
from tests.waiting import is_alive, wait_until

from . import toy
from .fake_sglang import STOP, Fake
from .test_rollout import Turns
from .toy import adapted, spread

REQUEST = Request(0, (5, 6, 7), 8)
LORA = LoraConfig(rank=2)
DEADLINES: dict[str, Any] = dict.fromkeys(("timeout_s", "wait_s"), 30.0)


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def serve(served, tmp_path):
    """Return `serve(fakes, **settings)`: servers in use, with the weights that fakes agree with."""
    opened = []
    SEEN.clear()

    def begin(fakes, *, push=True, lora=None, **settings):
        if "launch" not in settings:
            settings["urls"] = tuple(fake.url for fake in fakes)
        config = SglangConfig(**{**DEADLINES, **settings})
        limits = SamplerConfig(max_prompt_tokens=40, max_response_tokens=24)
        found = Servers(config, served, limits, dtype="float32", seed=0, folder=tmp_path, lora=lora)
        opened.append(found.__enter__())
        if push:
            send(found, "a")
        return found

    yield begin
    for servers in opened:
        servers.__exit__()


def send(servers, name):
    """Push weights of this name; no server opens their folder."""
    folder = folder_of(servers, name)
    sent = PushedWeights(name, ord(name), ord(name), folder)
    servers.run(servers.pool.push(sent))


def folder_of(servers, name):
    return servers.root / f"version-{name}"


def start(servers, episode, request=REQUEST, stop_ids=(STOP,)):
    request = replace(request, episode=episode)
    return servers.start(servers.pool.sample(request, stop_ids))


def ask(servers, episodes=(0,), request=REQUEST, **more):
    futures = [start(servers, episode, request, **more) for episode in episodes]
    return [future.result(60) for future in futures]


def edited(ids=(10, 11, STOP), **meta):
    """Return what makes a right answer one of these ids, and changes what is said of them."""
    return lambda right: {"output_ids": ids, "meta_info": right["meta_info"] | meta}


def scores(*ids, logprob=-1.0):
    return {"output_token_logprobs": [[logprob, i, None] for i in ids], "weight_versions": []}


def spans(*parts):
    """Return what a server says of the weights that sampled a reply: (name, start, end) of each."""
    said = [dict(zip(("version", "start", "end"), part, strict=True)) for part in parts]
    return {"weight_versions": said}


LONG = (10,) * 8 + (STOP,)
REPLY_FAULTS = {
    "hangs": ("hang", "deadline"),
    "503": (503, "status"),
    "cut short": (b'{"output_ids": [10, 1', "garbage"),
    "no reply": (lambda _: {}, "garbage"),
    "NaN": (edited(**scores(10, 11, STOP, logprob=math.nan)), "garbage"),
    "null": (edited(**scores(10, 11, STOP, logprob=None)), "garbage"),
    "other ids": (edited(**scores(10, 12, STOP)), "garbage"),
    "too long": (edited(LONG, **scores(*LONG)), "garbage"),
    "empty": (edited((), **scores()), "garbage"),
    "weights of no token": (edited(**spans(("b", 0, 2))), "garbage"),
    "weights of a trillion": (edited(**spans(("b", 0, 10**12))), "garbage"),
    "weights of a token twice": (edited(**spans(("b", 0, 2), ("b", 1, 3))), "garbage"),
    "aborted": (edited(finish_reason={"type": "abort"}), "garbage"),
    "older weights": (edited(weight_version="a", weight_versions=[]), "stale"),
    "mixed weights": (edited(**spans(("b", 0, 1), ("c", 1, 3))), "stale"),
}


@pytest.mark.parametrize("name", REPLY_FAULTS)
def test_a_failed_request_is_answered_elsewhere_once(fakes, serve, name):
    fault, kind = REPLY_FAULTS[name]
    servers = serve(fakes, timeout_s=5 if fault == "hang" else 30)
    send(servers, "b")
    for fake in fakes:
        fake.bodies.clear()
    fakes[0].faults["/generate"] = [fault]
    found = ask(servers)[0]  # an even one is asked of the first
    assert found.ids == (10, 11, STOP)
    assert found.logprobs == (-1 / 10, -1 / 11, -1 / STOP)
    assert fakes[1].bodies[0]["input_ids"] == list(REQUEST.ids)
    if fault == "hang":  # one that was given up is aborted by its name
        wait_until(lambda: fakes[0].aborted == fakes[0].hanging)
    fakes[0].hung.set()
    wait_until(lambda: numbers_are(servers, taken_back=1))
    assert SEEN["requests"] == SEEN["retries"] == SEEN["left_out"] == SEEN[f"failed_{kind}"] == 1
    assert SEEN["servers"] == 2
    assert sum(value for key, value in SEEN.items() if key.startswith("failed_")) == 1


SEEN: dict[str, float] = {}


def numbers_are(servers, /, **wanted):
    """Add up what happened since the test began, and compare."""
    for name, value in servers.run(servers.pool.numbers()).items():
        key = name.removeprefix("sglang/")
        SEEN[key] = value if key == "servers" else SEEN.get(key, 0) + value
    return all(SEEN[key] == value for key, value in wanted.items())


def test_a_request_says_everything_that_a_server_could_have_preset(fakes, serve):
    servers = serve(fakes[:1])
    request = Request(0, (5,), 2, 0.7, 0.9)
    for _ in range(3):
        (reply,) = ask(servers, request=request, stop_ids=(STOP, 3))
    assert reply.ids == (10, 11)
    # No two share a connection: one may come after a pause in which the server has closed it.
    assert len(set(fakes[0].ports)) == len(fakes[0].ports) > 5
    body = fakes[0].bodies[-1]
    assert body.pop("rid")
    assert body == {
        "input_ids": [5],
        "lora_path": None,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0,
            "min_new_tokens": 0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
            "presence_penalty": 0.0, "stop_token_ids": [STOP, 3],
        },
    }  # fmt: skip


def test_episodes_are_shared_out_and_stay_at_their_server_until_it_is_lost(fakes, serve):
    third = Fake()
    fakes.append(third)  # and closed as the others are
    servers = serve(fakes)

    def asked(*rounds):
        before = [len(fake.bodies) for fake in fakes]
        for episodes in rounds:
            ask(servers, episodes)
        return [len(fake.bodies) - count for fake, count in zip(fakes, before, strict=True)]

    assert asked(range(6)) == [2, 2, 2]
    assert asked([0], [0], [0], [3], [3]) == [5, 0, 0]
    assert numbers_are(servers, cached_share=pytest.approx(1 / 3))  # as the fakes say
    third.down = True
    ask(servers, range(6))
    assert asked(range(12)) == [6, 6, 0]


@pytest.mark.parametrize(("lora", "has_ended"), [(LORA, True), (None, False)])
def test_a_child_is_started_anew_if_it_has_ended(fakes, serve, lora, has_ended, monkeypatch):
    monkeypatch.setattr("minirl.sglang.process.launch", lambda *_, **__: fakes)
    servers = serve(fakes, launch=2, lora=lora)
    fakes[0].down = has_ended
    fakes[0].faults |= {"/generate": ["drop"], "/health": [503] * 3}
    assert [found.ids for found in ask(servers, range(4))] == [(10, 11, STOP)] * 4
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1))
    assert [fake.starts for fake in fakes] == [int(has_ended), 0]
    assert SEEN["restarted"] == fakes[0].starts
    assert not fakes[0].faults["/health"]  # refused so many times
    assert lora or fakes[0].weights == "a"
    assert ask(servers)[0].versions == ("a",) * 3


def test_a_reply_of_a_server_that_did_not_take_weights_is_refused(fakes, serve):
    """It may have a part of them, and call them as before."""
    servers, go = serve(fakes), threading.Event()
    for fake in fakes:
        fake.held = lambda _: go.wait(60)
    under_way = [start(servers, episode) for episode in range(2)]
    wait_until(lambda: [len(fake.bodies) for fake in fakes] == [1, 1])
    fakes[0].faults["/update_weights_from_disk"] = [500]
    send(servers, "b")
    assert fakes[0].weights == "a"
    go.set()
    versions = [future.result(60).versions for future in under_way]
    assert versions == [("b",) * 3, ("a", "b", "b")]  # of the other one the rest is new
    assert numbers_are(servers, failed_stale=1, failed_status=1)


def test_when_none_is_left_the_rest_waits_and_goes_on(fakes, serve):
    servers = serve(fakes)
    for fake in fakes:
        fake.down = True
    futures = [start(servers, episode) for episode in range(5)]
    wait_until(lambda: numbers_are(servers, left_out=2))
    assert SEEN["servers"] == 0
    assert not any(future.done() for future in futures)
    fakes[1].start()
    assert [future.result(60).ids for future in futures] == [(10, 11, STOP)] * 5
    assert fakes[1].weights == "a"


def test_when_none_comes_back_the_servers_are_lost(fakes, serve):
    servers = serve(fakes, wait_s=2)
    for fake in fakes:
        fake.down = True
    for call in (ask, partial(send, name="b")):
        with pytest.raises(LostError, match="no SGLang server came back"):
            call(servers)


# Adapters whose loading was not answered in time are there already.
@pytest.mark.parametrize(
    ("path", "settings"),
    [("/flush_cache", {"wait_s": 90}), ("/load_lora_adapter", {"wait_s": 5, "lora": LORA})],
)
def test_a_server_that_misses_new_weights_holds_nobody_up_and_gets_them_later(
    fakes, serve, monkeypatch, path, settings
):
    servers, go = serve(fakes, **settings), threading.Event()
    monkeypatch.setattr("minirl.sglang.server.BRIEF_S", 3.0)
    fakes[0].faults[path] = [lambda right: go.wait(60) and right]
    begun = time.monotonic()
    send(servers, "b")
    assert time.monotonic() - begun < 45
    assert ask(servers)[0].versions == ("b",) * 3
    go.set()
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1, failed_deadline=1))
    assert [found.versions for found in ask(servers, range(4))] == [("b",) * 3] * 4


def test_a_signal_in_the_middle_of_a_push_leaves_servers_at_work(fakes, serve, monkeypatch):
    for fake in fakes:
        fake.paused = True  # by a run that was killed
    servers = serve(fakes)
    fakes[0].faults["/update_weights_from_disk"] = ["hang"]

    def noticed():
        return signal.SIGTERM if fakes[0].hanging else None

    monkeypatch.setattr(preemption, "noticed", noticed)
    folder_of(servers, "b").mkdir(parents=True)
    with pytest.raises(Preempted) as stop:
        send(servers, "b")
    servers.__exit__(stop.type, stop.value, stop.tb)
    assert folder_of(servers, "b").exists()  # which a server may be reading
    fakes[0].hung.set()
    wait_until(lambda: not any(fake.paused for fake in fakes))


def test_a_server_that_newer_weights_overtake_comes_back_with_these(fakes, serve):
    servers, go = serve(fakes), threading.Event()
    late = [lambda right: go.wait(60) and right]
    fakes[0].faults |= {"/generate": [500], "/update_weights_from_disk": late}
    ask(servers)
    wait_until(lambda: not fakes[0].faults["/update_weights_from_disk"])
    send(servers, "b")
    assert (fakes[0].weights, fakes[1].weights) == ("a", "b")
    go.set()
    wait_until(lambda: numbers_are(servers, taken_back=1))
    assert fakes[0].weights == "b"


def informed(**facts):
    return {"/server_info": [lambda right: right | facts]}


@pytest.mark.parametrize(
    ("faults", "settings", "words"),
    [
        ({"/server_info": [404]}, {}, "this is no SGLang server: .*404"),
        (informed(version="0.4.9"), {}, r"is SGLang 0\.4\.9; use 0\.5\.23"),
        # 64 are needed; of the last one asked for, a prompt has all before.
        (informed(max_req_input_len=63), {}, "takes 63 tokens, .*--max-total-tokens"),
        (informed(dp_size=2), {"lora": LORA}, "loads no adapters with --dp-size"),
        (
            {"/model_info": [lambda right: right | {"weight_version": "b"}]},
            {"lora": LORA},
            "has weights b in place of those that",
        ),
        (None, {"wait_s": 0.5}, "serves nothing after wait_s = 0.5 s"),
        ({"/update_weights_from_disk": [400]}, {}, "does not take the learner's weights"),
        ({"/load_lora_adapter": [400]}, {"lora": LORA}, "does not take the learner's weights"),
    ],
)
def test_what_is_wrong_with_a_server_is_said_at_the_start(fakes, serve, faults, settings, words):
    fakes[1].faults, fakes[1].down = faults or {}, faults is None
    with pytest.raises(UserError, match=words):
        serve(fakes, **settings)


def test_a_request_that_is_refused_is_sent_once_and_stops_the_run(fakes, serve):
    servers = serve(fakes)
    for fake in fakes:
        fake.faults["/generate"] = [400] * 99
    with pytest.raises(UserError, match=r"/generate: 400 .*; the server's log says why"):
        ask(servers)
    assert sum(len(fake.faults["/generate"]) for fake in fakes) == 2 * 99 - 1
    assert numbers_are(servers, servers=2, left_out=0)


def test_requests_of_a_run_that_ends_are_taken_back(fakes, serve):
    servers, go = serve(fakes), threading.Event()
    for fake in fakes:
        fake.held = lambda _: go.wait(60)
    for episode in range(4):
        start(servers, episode)
    wait_until(lambda: [len(fake.bodies) for fake in fakes] == [2, 2])
    servers.__exit__()
    go.set()
    for fake in fakes:
        assert {*fake.aborted} == {body["rid"] for body in fake.bodies}


def test_each_process_has_servers_of_its_own(fakes, serve, monkeypatch):
    """SGLang ends where two bring it weights at the same time."""
    processes = SimpleNamespace(count=lambda: 3, from_first=lambda make: make())
    monkeypatch.setattr("minirl.sglang.sampler.distributed", processes)
    with pytest.raises(UserError, match="2 servers for 3 processes"):
        serve(fakes)


def test_a_slow_shutdown_does_not_hide_the_first_error(fakes, serve, monkeypatch):
    monkeypatch.setattr("minirl.sglang.sampler._CLOSE_S", 0.1)
    servers = serve(fakes)
    folder_of(servers, "a").mkdir(parents=True)
    servers._loop.call_soon_threadsafe(time.sleep, 1)
    servers.__exit__()  # raises nothing in its place
    assert not folder_of(servers, "a").exists()
    wait_until(lambda: not servers._loop.is_running())
    servers._loop.close()


# Adapters: one name a version, replies of one version, nothing paused, none lost.


def test_adapters_alone_are_pushed_and_a_reply_ends_with_those_that_it_began_with(fakes, serve):
    servers, go = serve(fakes, lora=LORA), threading.Event()
    fakes[0].held = lambda _: go.wait(60)
    under_way = start(servers, 0)
    wait_until(lambda: fakes[0].bodies)
    send(servers, "b")
    go.set()
    assert under_way.result(60).versions == ("a",) * 3
    assert ask(servers)[0].versions == ("b",) * 3
    send(servers, "c")
    assert ask(servers)[0].versions == ("c",) * 3
    for fake in fakes:
        # The newest, and those before, with which replies may be under way.
        assert fake.adapters == {name: str(folder_of(servers, name)) for name in "bc"}
        assert (fake.weights, fake.folder) == ("default", "")
        assert not {"/pause_generation", "/flush_cache"} & {*fake.order}
    assert numbers_are(servers, retries=0)


def test_a_server_that_lacks_the_adapters_or_has_others_below_is_left_out(fakes, serve):
    """It refuses at once: half of the requests would fail."""
    servers = serve(fakes, lora=LORA)
    fakes[0].adapters.clear()
    assert [found.versions for found in ask(servers, range(20))] == [("a",) * 3] * 20
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1))
    assert (SEEN["left_out"], SEEN["requests"]) == (1, 20)
    assert [{*fake.adapters} for fake in fakes] == [{"a"}] * 2
    fakes[0].weights, failed = "others", SEEN["failed_stale"]
    assert [found.versions for found in ask(servers, range(4))] == [("a",) * 3] * 4
    looks = fakes[0].order.count("/v1/models")
    wait_until(lambda: fakes[0].order.count("/v1/models") > looks + 1)
    assert numbers_are(servers, servers=1, left_out=2)
    assert SEEN["failed_stale"] > failed
    fakes[0].weights = "default"
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=2))


# Samplers before servers: weights are brought once, and many episodes stay apart.


LIMITS = SamplerConfig(max_prompt_tokens=40, max_response_tokens=60)


def sampler_of(servers, *, group_size=1):
    return make_sampler(
        toy.model(), LIMITS, toy.Tokenizer(), group_size=group_size, seed=0, servers=servers
    )


def test_samplers_of_the_same_servers_bring_weights_once(serve, fakes):
    servers = serve(fakes[:1], push=False)
    one, other = sampler_of(servers), sampler_of(servers)

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


def test_weights_come_while_the_learner_does_other_things(serve, fakes):
    sampler, go = sampler_of(serve(fakes[:1], push=False)), threading.Event()
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
    assert gather_metrics(sampler, since=found) == {"sglang/retries": 4.0 + 4.0}


def test_many_episodes_are_played_by_few_threads_and_connections(serve, fakes):
    parallel, workers, lock = 8, 4, threading.Lock()
    now, at_once, threads = Counter(), [], []

    def count_threads():
        # Those of the fakes have the names that Python gives.
        return sum("process_request" not in one.name for one in threading.enumerate())

    def held(fake, _):
        with lock:
            now[fake] += 1
            at_once.append(now[fake])
        time.sleep(0.005)
        with lock:
            now[fake] -= 1

    for fake in fakes:
        fake.held = partial(held, fake)
    servers = serve(fakes, push=False, parallel=parallel)
    before = count_threads()
    sampler = sampler_of(servers, group_size=4)
    sampler.set_weights(trained(toy.model()), version=0)
    groups = Rollout(
        sampler, toy.Tokenizer(), Turns(3), ["AB", "CDE"] * 25, config=LIMITS, group_size=4,
        first_episode=0, env_workers=workers, check=lambda: threads.append(count_threads()),
    ).play()  # fmt: skip
    assert [len(episode.turns) for group in groups for episode in group] == [3] * 200
    asked = [body["rid"] for fake in fakes for body in fake.bodies]
    assert len(set(asked)) == len(asked) == 600  # none lost, none asked twice
    assert 2 < max(at_once) <= parallel
    assert max(threads) <= before + workers + 2  # the event loop, and a name look-up


# Servers that are children of a run.


# A server with a process of its own, which ends with it as SGLang's do; neither takes notice of a
# polite end.
SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = [sys.executable, "-c", "import time; time.sleep(600)"]
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), *line])
print(os.getpid(), worker.pid, os.environ["WORD"], "end", flush=True)
time.sleep(600)
"""
# A run with such a server.
RUN = """
import sys, time
from pathlib import Path
from minirl.sglang.process import _TIED, ChildServer
child = ChildServer([sys.executable, "-c", sys.argv[1], _TIED], {"WORD": "x"}, 1, Path(sys.argv[2]))
time.sleep(600)
"""


def said(log):
    """Wait until a child has said `end`; return its words before."""
    wait_until(lambda: log.exists() and log.read_text().endswith("end\n"))
    return log.read_text().split()[:-1]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_children_end_with_a_run_that_is_killed(copies, tmp_path):
    log = tmp_path / "log"
    run = copies(SERVER, log, cwd=tmp_path, code=RUN, WORD="the run's")
    *pids, word = said(log)
    assert word == "x"  # its own
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_children_are_ended_side_by_side_with_what_they_have_started(tmp_path):
    """Each of these takes the whole grace period."""
    line, logs = [sys.executable, "-c", SERVER, process._TIED], [tmp_path / n for n in "abcd"]
    children = [process.ChildServer(line, {"WORD": "x"}, 1, log) for log in logs]
    pids = [pid for log in logs for pid in said(log)[:2]]
    begun = time.monotonic()
    process.close(children)
    assert time.monotonic() - begun < 4 * process._GRACE_S
    assert not any(child.is_running for child in children)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_launched_servers_have_their_interpreter_and_their_devices(tmp_path, monkeypatch):
    named, default = (tmp_path / name / "python" for name in ("named", "default"))
    for program in (named, default):
        program.parent.mkdir()
        program.touch(0o755)
    monkeypatch.setenv(SGLANG_PYTHON, str(default))
    monkeypatch.setattr(process, "ChildServer", lambda *given: given)
    for given, expected in ((str(named), named), (None, default)):
        config = SglangConfig(python=given, launch=2, devices=("4,5", "6,7"))
        children: Any = process.launch(config, tmp_path, dtype="float32", seed=0, logs=tmp_path)
        for number, (command, variables, _, log) in enumerate(children):
            assert command[:3] == [str(expected), "-m", "sglang.launch_server"]
            path = f"{expected.parent}:{os.environ['PATH']}"
            assert variables == {"PATH": path, "CUDA_VISIBLE_DEVICES": config.devices[number]}
            assert log == tmp_path / f"sglang-{number}.log"
    monkeypatch.setenv(SGLANG_PYTHON, "no-such-python")
    with pytest.raises(UserError, match=r"python \(or MINIRL_SGLANG_PYTHON\): .* no-such-python"):
        SglangConfig(launch=1).find_python()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_connection_takes_a_port_before_its_server_listens():
    ports = process.free_ports(20)
    assert len(set(ports)) == 20
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= port <= last for port in ports)


# Weights as files.


def test_a_version_is_the_model_wherever_it_lies_in_the_type_that_servers_compute_in(tmp_path):
    params = nnx.state(toy.spread(toy.model(), make_mesh({"fsdp": 4, "tensor": 2})), nnx.Param)
    folder = transfer.write_version(tmp_path / "w", "x-3", params, dtype="bfloat16")
    assert folder == tmp_path / "w" / "version-x-3"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    written = load_file(folder / "model.safetensors")
    own = huggingface.tensors(nnx.state(toy.model(), nnx.Param))
    expected = {name: array.astype(jnp.bfloat16) for name, array in own}
    assert written.keys() == expected.keys()
    assert_same(written, expected)
    for _, array in transfer.whole_tensors(params, "bfloat16"):
        assert len(array.sharding.device_set) == 1


def test_a_disk_that_is_full_here_leaves_no_process_waiting_in_a_collective(tmp_path, monkeypatch):
    def full(folder, *_, **named):
        path = f"{folder}/{named['name']}.safetensors"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    brought_together = iter(range(3))
    monkeypatch.setattr(transfer, "write_files", full)
    monkeypatch.setattr(transfer, "whole_tensors", lambda *_: brought_together)
    params = nnx.state(toy.model(), nnx.Param)
    with pytest.raises(OSError, match=r"No space.*model\.safetensors"):
        transfer.write_version(tmp_path / "w", "x", params, dtype="float32")
    assert not [*brought_together]  # all of them
    assert not (tmp_path / "w" / "version-x").exists()


@pytest.mark.parametrize(
    ("hybrid", "targets", "modules"),
    [
        (None, ("q", "down", "out"), ["q_proj", "down_proj"]),
        (toy.HYBRID, ("in_qkv", "in_z", "q"), ["in_proj_qkvz", "q_proj"]),
        (toy.HYBRID, ("in_z",), ["in_proj_qkvz"]),
        (toy.HYBRID, ("in_qkv", "out"), ["in_proj_qkvz", "out_proj"]),
    ],
)
def test_of_adapters_a_version_is_peft_s_folder_as_sglang_joins_them(
    tmp_path, hybrid, targets, modules
):
    """It stacks A and B of linear attention's queries, keys, values and gates, and wants all four;
    it is launched with room for these and for no others. They may lie anywhere.
    """
    lora, mesh = LoraConfig(rank=2, targets=targets), make_mesh({"fsdp": 4, "tensor": 2})
    params = trained(adapted(spread(toy.model(hybrid=hybrid is not None), mesh), lora))
    folder = transfer.write_adapters(tmp_path, "x-3", params, lora, base=tmp_path, hybrid=hybrid)
    assert folder == tmp_path / "version-x-3"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["target_modules"], config["r"]) == (modules, 2)
    assert config["base_model_name_or_path"] == str(tmp_path)
    stored = load_file(folder / "adapter_model.safetensors")
    names = {re.sub("in_proj_.$", "in_proj_qkvz", name.split(".")[-3]) for name in stored}
    assert names == {*modules}
    # No name of linear attention is on SGLang's list of what may be named.
    assert transfer.lora_options(lora, hybrid) == [
        "--enable-lora", "--max-lora-rank", "2", "--max-loras-per-batch", "3",
        "--lora-target-modules", *(["all"] if hybrid else modules),
    ]  # fmt: skip
    found = {name.removeprefix("base_model.model."): array for name, array in stored.items()}
    expected, own = dict(huggingface.tensors(params)), "model.layers.2.linear_attn.in_proj_"
    for name, array in expected.items():
        if ".in_proj_" not in name:
            np.testing.assert_array_equal(found.pop(name), array)
    assert len(found) == (0 if hybrid is None else 3 * 8)

    def change(tensors, part, size):
        a, b = (tensors.get(f"{own}{part}.lora_{end}.weight") for end in "AB")
        return np.zeros((size, 16)) if a is None else b @ a

    ours = [change(found, *part) for part in zip("qkvz", (16, 16, 24, 24), strict=True)]
    theirs = [change(expected, *part) for part in (("qkv", 56), ("z", 24))]
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs))


def test_only_one_version_is_kept(tmp_path):
    for name in ("version-a-2", "version-a-1", ".version-a-9.7.new", "other"):
        (tmp_path / name).mkdir()
    transfer.remove_versions(tmp_path, but=tmp_path / "version-a-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "version-a-2"]
