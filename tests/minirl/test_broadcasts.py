"""Weights that are broadcast to servers in parts: fakes on 127.0.0.1 that fail on the way.

PyTorch is not needed: a stand-in hands over what it would send.
"""
# ruff: noqa: F401, F811  (fixtures of another file)

from __future__ import annotations

import queue
import signal
import socket
import threading
import time

import jax.numpy as jnp
import pytest

from minirl.config import SglangConfig
from minirl.errors import UserError
from minirl.run import preemption
from minirl.run.preemption import Preempted
from minirl.sglang import transfer
from minirl.sglang.transfer import Bucket

from .test_pool import (
    SEEN,
    _forget,
    ask,
    numbers_are,
    send,
    serve,
    start,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("soon")

NAMES = ("a", "b", "c", "d")
# Those of this test; a server that is not there leaves what its broadcasts bring.
GROUPS: list[Group] = []


class Group:
    """Stands for a process group: a channel that the fake server of its name reads."""

    backend = "gloo"

    def __init__(self, ranks, *, timeout_s):
        self.name, self.size, self.port = f"{len(GROUPS)}", 1 + ranks, 1
        self.timeout_s, self.channel = timeout_s, queue.Queue(1)
        GROUPS.append(self)

    def join(self):
        self.channel.put("joined", timeout=self.timeout_s)

    def broadcast(self, arrays):
        try:
            self.channel.put([float(array.sum()) for array in arrays], timeout=self.timeout_s)
        except queue.Full:
            raise RuntimeError("Gloo: connection closed by peer") from None

    def close(self): ...


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    monkeypatch.setattr(transfer, "Group", Group)
    monkeypatch.setattr("minirl.sglang.sampler.check_installed", lambda _: None)
    GROUPS.clear()


@pytest.fixture(autouse=True)
def _receive(fakes):
    for fake in fakes:
        fake.receive = lambda name: GROUPS[int(name)].channel.get(timeout=20)


@pytest.fixture
def begin(fakes, serve):
    """Return `begin(**settings)`: servers in use, which weights are broadcast to."""

    def begin(**settings):
        return serve(fakes, push=False, push_with="nccl", **settings)

    return begin


def buckets(value):
    """Give a bucket for each of the names; all of the value."""
    for name in NAMES:
        yield Bucket(((name, jnp.full(2, value, jnp.float32)),), is_last=name == NAMES[-1])


def of(value):
    return dict.fromkeys(NAMES, 2.0 * value)


PART = "/update_weights_from_distributed"


def test_parts_come_in_order_and_only_the_last_has_the_name(fakes, begin):
    fakes[0].sizes["tp_size"] = 3
    servers = begin()
    for fake in fakes:
        fake.order.clear()
    send(servers, "x", buckets(3))
    assert sorted(group.size for group in GROUPS) == [2, 4]  # all ranks of a server, and ours
    for fake in fakes:
        assert fake.order == [
            "/pause_generation", "/flush_cache", "/init_weights_update_group",
            "/end_weight_update", "/begin_weight_update", *[PART] * 4, "/end_weight_update",
            "/destroy_weights_update_group", "/continue_generation", "/generate",
        ]  # fmt: skip
        assert fake.versions == ["x-partial"] * 3 + ["x"]
        assert (fake.weights, fake.taken, fake.paused) == ("x", of(3), False)
    assert ask(servers)[0].ids == (10, 11, 1)


def test_a_server_that_misses_weights_holds_nobody_up_and_joins_with_the_next(
    fakes, begin, monkeypatch
):
    servers = begin(push_s=3)
    send(servers, "x", buckets(3))
    find, missing = transfer._own_address, []

    def found(url):
        if url in missing:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return find(url)

    monkeypatch.setattr(transfer, "_own_address", found)
    # It hangs, and is not found where the next come from.
    for weights, value in (("y", 4), ("z", 5)):
        fakes[0].faults[PART] = [None, "hang"] if weights == "y" else []
        missing += [fakes[0].url] if weights == "z" else []
        begun = time.monotonic()
        send(servers, weights, buckets(value))
        assert time.monotonic() - begun < 30
        assert (fakes[1].weights, fakes[1].taken) == (weights, of(value))
        fakes[0].hung.set()
        wait_until(lambda: servers.pool._replicas[0].is_waiting)
        assert numbers_are(servers, servers=1, taken_back=0)
        assert not any(fake.paused for fake in fakes)
    missing.clear()
    send(servers, "w", buckets(6))
    assert numbers_are(servers, servers=2, left_out=1, taken_back=1)
    assert sum(value for key, value in SEEN.items() if key.startswith("failed_")) == 2
    assert fakes[0].taken == fakes[1].taken == of(6)


def test_until_new_weights_are_there_replies_with_the_old_ones_are_right(fakes, begin):
    """The learner may take long to make the first bucket; servers sample on."""
    servers = begin()
    send(servers, "x", buckets(3))
    found = []

    def made():
        found.extend(ask(servers, range(4)))
        yield from buckets(4)

    send(servers, "y", made())
    assert [reply.versions for reply in found] == [("x",) * 3] * 4
    assert ask(servers)[0].versions == ("y",) * 3
    assert numbers_are(servers, requests=5, retries=0, left_out=0)


def test_a_server_that_missed_nothing_comes_back_with_the_weights_it_has(fakes, begin):
    servers = begin()
    send(servers, "x", buckets(3))
    fakes[0].faults["/generate"] = [500]
    assert ask(servers)[0].ids == (10, 11, 1)
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1))
    assert fakes[0].versions == ["x-partial"] * 3 + ["x"]  # nothing was sent again


def test_a_signal_in_the_middle_leaves_servers_at_work(fakes, begin, monkeypatch):
    servers = begin()
    send(servers, "x", buckets(3))
    fakes[0].faults[PART] = [None, "hang"]
    noticed = threading.Event()
    number = signal.SIGTERM
    monkeypatch.setattr(preemption, "noticed", lambda: number if noticed.is_set() else None)

    def made():
        for count, bucket in enumerate(buckets(4)):
            if count == 3:
                wait_until(lambda: fakes[0].hanging)
                noticed.set()
            yield bucket

    with pytest.raises(Preempted):
        send(servers, "y", made())
    fakes[0].hung.set()
    wait_until(lambda: not any(fake.paused for fake in fakes))


def test_an_update_that_a_killed_run_left_open_is_closed_first(fakes, begin):
    for fake in fakes:
        fake.is_updating = fake.paused = True
    servers = begin()
    send(servers, "x", buckets(3))
    assert [fake.taken for fake in fakes] == [of(3)] * 2


def test_fewer_servers_than_processes_need_the_disk(fakes, begin, monkeypatch):
    monkeypatch.setattr("minirl.run.distributed.count", lambda: 3)
    with pytest.raises(UserError, match=r"push: .* needs a server for each of the 3 processes"):
        begin()


def test_without_torch_a_line_says_what_to_install(monkeypatch):
    from minirl.config import check_installed

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_installed(SglangConfig())
    with pytest.raises(UserError, match=r"push: .* pip install '\.\[torch\]', or use disk"):
        check_installed(SglangConfig(push="nccl"))
