"""What a pool does with servers that fail: fakes on 127.0.0.1, each with one fault."""

import itertools
import json
import math
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from minirl.config import SamplerConfig, SglangConfig
from minirl.errors import LostError
from minirl.exchange import UserError
from minirl.run import preemption
from minirl.run.preemption import Preempted
from minirl.sglang.answers import Generated, Requirements, ServerInfo
from minirl.sglang.sampler import Servers
from minirl.sglang.server import PushedWeights
from minirl.types import Decoding, Request
from tests.waiting import wait_until

from .fake_sglang import STOP, Fake

REQUEST = Request(0, (5, 6, 7), 8, Decoding())
NUMBERS = itertools.count()
DEADLINES: dict[str, Any] = dict.fromkeys(("timeout_s", "health_s", "wait_s"), 30.0)


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def serve(served, tmp_path):
    """Return `serve(fakes, **settings)`: servers in use, with the weights that fakes agree with."""
    opened = []

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


class Nurse:
    """Starts a fake anew, as a child process is."""

    is_running = True

    def __init__(self, fake):
        self.fake, self.url, self.starts = fake, fake.url, 0

    def start(self):
        self.starts += 1
        self.fake.faults.clear()
        self.fake.weights = "default"

    def close(self): ...


@pytest.fixture
def nurses(fakes, monkeypatch):
    """Let the servers be children, of which a run has two."""
    made = [Nurse(fake) for fake in fakes]
    monkeypatch.setattr("minirl.sglang.process.launch", lambda *_, **__: made)
    return made


def send(servers, name):
    """Push weights of this name; no server opens their folder."""
    folder = folder_of(servers, name)
    sent = PushedWeights(name, next(NUMBERS), ord(name), folder)
    servers.run(servers.pool.push(sent))


def folder_of(servers, name):
    return servers.root / f"version-{name}"


def start(servers, episode, request=REQUEST, stop_ids=(STOP,)):
    request = replace(request, episode=episode)
    return servers.start(servers.pool.sample(request, stop_ids))


def ask(servers, episodes=(0,), request=REQUEST, **more):
    futures = [start(servers, episode, request, **more) for episode in episodes]
    return [future.result(60) for future in futures]


def numbers(servers):
    found = servers.run(servers.pool.numbers())
    return {key.removeprefix("sglang/"): value for key, value in found.items()}


def answer(ids=(10, 11, STOP), **meta):
    """Return a right answer to `REQUEST`, or a wrong one."""
    right = {
        "id": "a", "prompt_tokens": 3, "weight_version": "a", "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1, i, None] for i in ids],
    }  # fmt: skip
    return {"output_ids": ids, "meta_info": right | meta}


def spans(*ends):
    """Return what a server says of the weights that sampled a reply: (name, end) of each part."""
    starts = [0, *(end for _, end in ends)]
    return [
        {"version": name, "start": start, "end": end}
        for (name, end), start in zip(ends, starts, strict=False)
    ]


IMPOSSIBLE = {
    "no reply": {},
    "NaN": answer(output_token_logprobs=[[math.nan, 10, None]]),
    "null": answer(output_token_logprobs=[[None, 10, None]]),
    "other ids": answer(output_token_logprobs=[[-1, i, None] for i in (10, 12, STOP)]),
    "too long": answer((10,) * 8 + (STOP,)),
    "empty": answer(()),
    "weights of no token": answer(weight_versions=spans(("a", 2))),
    "aborted": answer(finish_reason={"type": "abort"}),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_reply_that_cannot_be_true_is_refused(name):
    right = answer(weight_versions=spans(("a", 1), ("b", 3)))
    found = Generated.model_validate_json(json.dumps(right), context=REQUEST)
    assert (found.ids, found.versions) == ((10, 11, STOP), ("a", "b", "b"))
    with pytest.raises(ValidationError):
        Generated.model_validate_json(json.dumps(IMPOSSIBLE[name]), context=REQUEST)


def edited(**meta):
    return lambda right: {**right, "meta_info": {**right["meta_info"], **meta}}


# Which answers are garbage, the test above tells; other kinds come in the last test.
REPLY_FAULTS = {
    "hangs": ("hang", "deadline"),
    "503": (503, "status"),
    "cut short": (b'{"output_ids": [10, 1', "garbage"),
    "older weights": (edited(weight_version="a", weight_versions=[]), "stale"),
    "mixed weights": (edited(weight_versions=spans(("b", 1), ("c", 3))), "stale"),
}


def test_no_two_requests_share_a_connection(fakes, serve):
    """One may come after a pause in which the server has closed what was open."""
    servers = serve(fakes)
    for _ in range(3):
        ask(servers)
    for fake in fakes:
        assert len(set(fake.ports)) == len(fake.ports) > 5


@pytest.mark.parametrize("name", REPLY_FAULTS)
def test_a_failed_request_is_answered_elsewhere_once(fakes, serve, name):
    fault, kind = REPLY_FAULTS[name]
    servers = serve(fakes, timeout_s=2 if fault == "hang" else 30)
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
    for key, value in numbers(servers).items():
        keeps = key == "servers"
        SEEN[key] = value if keeps else SEEN.get(key, 0) + value
    return all(SEEN[key] == value for key, value in wanted.items())


@pytest.fixture(autouse=True)
def _forget():
    SEEN.clear()


def test_a_request_says_everything_that_a_server_could_have_preset(fakes, serve):
    servers = serve(fakes)
    request = Request(0, (5,), 2, Decoding(0.7, 0.9))
    (reply,) = ask(servers, request=request, stop_ids=(STOP, 3))
    assert reply.ids == (10, 11)
    body = next(b for f in fakes for b in f.bodies if b["sampling_params"]["max_new_tokens"] == 2)
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


def test_episodes_are_shared_out_and_stay_at_their_server(fakes, serve):
    servers = serve(fakes)

    def asked(*rounds):
        before = [len(fake.bodies) for fake in fakes]
        for episodes in rounds:
            ask(servers, episodes)
        return [len(fake.bodies) - count for fake, count in zip(fakes, before, strict=True)]

    assert asked(range(6)) == [3, 3]
    assert asked([0], [0], [0], [2], [2]) == [5, 0]
    assert numbers(servers)["cached_share"] == pytest.approx(1 / 3)  # as the fakes say


def test_the_episodes_of_a_lost_server_are_shared_out_over_the_others(fakes, serve):
    third = Fake()
    try:
        servers = serve([*fakes, third])
        third.down = True
        ask(servers, range(6))
        before = [len(fake.bodies) for fake in fakes]
        ask(servers, range(12))
        counts = zip(fakes, before, strict=True)
        assert [len(fake.bodies) - count for fake, count in counts] == [6, 6]
    finally:
        third.close()


def test_a_server_that_hangs_gives_its_requests_up_long_before_their_deadline(fakes, serve):
    servers = serve(fakes, timeout_s=90, health_s=3)
    fakes[0].faults["/generate"] = ["hang", "hang"]
    fakes[0].faults["/health"] = ["hang"] * 3
    start = time.monotonic()
    assert [found.ids for found in ask(servers, range(4))] == [(10, 11, STOP)] * 4
    assert time.monotonic() - start < 45
    fakes[0].hung.set()
    wait_until(lambda: numbers_are(servers, taken_back=1))
    assert SEEN["failed_hung"] == 3  # its health, and two requests
    assert (SEEN["requests"], SEEN["retries"], SEEN["left_out"]) == (4, 2, 1)


@pytest.mark.parametrize(("is_starting", "health"), [(False, ["hang"] * 99), (True, [503] * 3)])
def test_a_server_of_ours_is_started_anew_if_it_hangs_and_not_while_it_starts(
    fakes, serve, nurses, is_starting, health
):
    servers = serve(fakes, launch=2, health_s=2)
    fakes[0].faults |= {"/generate": ["drop" if is_starting else "hang"], "/health": health.copy()}
    assert [found.ids for found in ask(servers, range(4))] == [(10, 11, STOP)] * 4
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1))
    assert [nurse.starts for nurse in nurses] == [int(not is_starting), 0]
    assert SEEN["restarted"] == nurses[0].starts
    assert not (is_starting and fakes[0].faults["/health"])  # refused so many times
    assert fakes[0].weights == "a"


def test_when_none_is_left_the_rest_waits_and_goes_on(fakes, serve):
    servers = serve(fakes)
    for fake in fakes:
        fake.down = True
    futures = [start(servers, episode) for episode in range(5)]
    wait_until(lambda: numbers_are(servers, left_out=2))
    assert SEEN["servers"] == 0
    assert not any(future.done() for future in futures)
    fakes[1].weights = "default"  # it was started anew
    fakes[1].down = False
    assert [future.result(60).ids for future in futures] == [(10, 11, STOP)] * 5
    assert fakes[1].weights == "a"


def test_when_none_comes_back_the_servers_are_lost(fakes, serve):
    servers = serve(fakes, wait_s=2)
    for fake in fakes:
        fake.down = True
    for call in (ask, partial(send, name="b")):
        with pytest.raises(LostError):
            call(servers)


def test_a_server_that_misses_new_weights_holds_nobody_up_and_gets_them_later(
    fakes, serve, monkeypatch
):
    servers = serve(fakes, wait_s=90)
    monkeypatch.setattr("minirl.sglang.server.BRIEF_S", 3.0)
    fakes[0].faults["/flush_cache"] = ["hang"]
    start = time.monotonic()
    send(servers, "b")
    assert time.monotonic() - start < 45
    assert fakes[1].weights == "b"
    fakes[0].hung.set()
    wait_until(lambda: numbers_are(servers, taken_back=1, failed_deadline=1))
    assert fakes[0].weights == "b"


def test_a_signal_in_the_middle_of_a_push_leaves_servers_at_work(fakes, serve, monkeypatch):
    for fake in fakes:
        fake.paused = True  # by a run that was killed
    servers = serve(fakes)
    fakes[0].faults["/update_weights_from_disk"] = ["hang"]

    def noticed():
        return signal.SIGTERM if fakes[0].hanging else None

    monkeypatch.setattr(preemption, "noticed", noticed)
    with pytest.raises(Preempted):
        send(servers, "b")
    fakes[0].hung.set()
    wait_until(lambda: not any(fake.paused for fake in fakes))


def test_a_server_that_newer_weights_overtake_comes_back_with_these(fakes, serve):
    servers, go = serve(fakes), threading.Event()

    def late(right):
        go.wait(60)
        return right

    fakes[0].faults |= {"/generate": [500], "/update_weights_from_disk": [late]}
    ask(servers)
    wait_until(lambda: not fakes[0].faults["/update_weights_from_disk"])
    send(servers, "b")
    assert (fakes[0].weights, fakes[1].weights) == ("a", "b")
    go.set()
    wait_until(lambda: numbers_are(servers, taken_back=1))
    assert fakes[0].weights == "b"


RIGHT = {"version": "0.5.23", "architectures": ["Toy"], "data": [{"max_model_len": 64}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Other"]}, "serves a Other, and the learner's .* Toy"),
        ({"version": "0.4.9"}, "is SGLang 0.4.9; use 0.5.23"),
        ({"max_req_input_len": 28}, "takes 32 tokens, .*--max-total-tokens"),
        ({"dp_size": 2}, "loads no adapters with --dp-size"),
    ],
)
def test_a_server_that_cannot_serve_the_model_is_refused(change, words):
    requirements = Requirements(("Toy",), 64, has_adapters=True)
    requirements.check(ServerInfo.model_validate(RIGHT), "http://one")
    with pytest.raises(UserError, match=f"http://one .*{words}"):
        requirements.check(ServerInfo.model_validate(RIGHT | change), "http://one")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"faults": {"/server_info": [404]}}, "this is no SGLang server: .*404"),
        ({"down": True}, "serves nothing after wait_s = 0.5 s"),
    ],
)
def test_what_is_wrong_with_a_server_is_said_at_the_start(fakes, serve, change, words):
    for key, value in change.items():
        setattr(fakes[1], key, value)
    with pytest.raises(UserError, match=words):
        serve(fakes, wait_s=0.5 if "down" in change else 30)


def test_a_server_that_takes_no_weights_is_refused_at_the_first_push(fakes, serve):
    fakes[1].faults["/update_weights_from_disk"] = [400]
    with pytest.raises(UserError, match=r"does not take the learner's weights .* same path"):
        serve(fakes)


def test_a_request_that_is_refused_is_sent_once_and_stops_the_run(fakes, serve):
    servers = serve(fakes)
    for fake in fakes:
        fake.faults["/generate"] = [400] * 99
    with pytest.raises(UserError, match=r"/generate: 400 .*; the server's log says why"):
        ask(servers)
    assert sum(len(fake.faults["/generate"]) for fake in fakes) == 2 * 99 - 1
    assert numbers_are(servers, servers=2, left_out=0)


def test_a_slow_shutdown_does_not_hide_the_first_error(fakes, serve, monkeypatch):
    monkeypatch.setattr("minirl.sglang.sampler._CLOSE_S", 0.1)
    servers = serve(fakes)
    folder_of(servers, "a").mkdir(parents=True)
    servers._loop.call_soon_threadsafe(time.sleep, 1)

    def fail():
        with ExitStack() as stack:
            stack.push(servers)
            raise KeyError("the first")

    with pytest.raises(KeyError, match="the first"):
        fail()
    assert not folder_of(servers, "a").exists()
    wait_until(lambda: not servers._loop.is_running())
    servers._loop.close()


def test_counts_hold_under_many_faults(fakes, serve):
    """Every request has one answer, whatever goes wrong in between."""
    servers = serve(fakes)
    random = np.random.default_rng(0)
    choices = ["drop", 500, b"{", None, None, None, None, None]
    for fake in fakes:
        fake.faults["/generate"] = [choices[i] for i in random.integers(0, len(choices), 60)]
    episodes = range(60)
    found = ask(servers, episodes)
    assert [reply.ids for reply in found] == [(10, 11, STOP)] * len(episodes)
    wait_until(lambda: numbers_are(servers, servers=2, requests=len(episodes)))
    failed = sum(value for key, value in SEEN.items() if key.startswith("failed_"))
    assert failed >= SEEN["retries"] > 0
    assert SEEN["left_out"] == SEEN["taken_back"] > 0
