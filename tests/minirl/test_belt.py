"""Weights that come to servers in parts: fakes on 127.0.0.1 that fail on the way.

PyTorch is not needed: a stand-in says what it would send.
"""
# ruff: noqa: F401, F811  (fixtures of another file)

from __future__ import annotations

import base64
import json
import queue
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from minirl.config import SglangConfig
from minirl.errors import ServersLostError, UserError
from minirl.run import preemption
from minirl.run.preemption import Preempted
from minirl.sglang import transfer
from minirl.sglang.replica import Weights
from minirl.sglang.transfer import Bucket

from .test_fleet import (
    SEEN,
    WISH,
    _forget,
    ask,
    model,
    numbers_are,
    serve,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("soon")

NAMES = ("a", "b", "c", "d")
# What a broadcast brings, by the name of its group; a server that is not there leaves it.
CHANNELS: dict[str, queue.Queue] = {}
HANDSHAKE = ["/pause_generation", "/flush_cache"]


class Group:
    """Stands for a process group: a channel that the fake server of its name reads."""

    backend = "gloo"

    def __init__(self, ranks, *, timeout_s):
        self.name, self.size, self.port = f"group-{len(CHANNELS)}", 1 + ranks, 1
        self.timeout_s = timeout_s
        self.channel = CHANNELS[self.name] = queue.Queue(1)
        self.is_closed = threading.Event()

    def join(self):
        self.channel.put("joined", timeout=self.timeout_s)

    def broadcast(self, arrays):
        try:
            self.channel.put([float(array.sum()) for array in arrays], timeout=self.timeout_s)
        except queue.Full:
            raise RuntimeError("Gloo: connection closed by peer") from None

    def close(self):
        self.is_closed.set()


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    def pickled(tensors):
        return base64.b64encode(json.dumps({n: float(a.sum()) for n, a in tensors}).encode())

    stand_in = SimpleNamespace(pickled=pickled, Group=Group)
    monkeypatch.setitem(sys.modules, "minirl.sglang.nccl", stand_in)
    monkeypatch.setattr("minirl.sglang.servers.check_installed", lambda _: None)
    CHANNELS.clear()


@pytest.fixture(autouse=True)
def _receive(fakes):
    for fake in fakes:
        fake.receive = lambda name: CHANNELS[name].get(timeout=20)


@pytest.fixture(params=["tensor", "nccl"])
def way(request):
    return request.param


def parcels(value):
    """Give a bucket for each of the names; all of the value."""
    for name in NAMES:
        yield Bucket(((name, np.full(2, value)),), is_last=name == NAMES[-1])


def send(servers, name, value, *, made=None, again=True):
    weights = Weights((lambda: parcels(value)) if again else None, name, ord(name), [-0.25] * 10)
    return servers.push(weights, parcels(value) if made is None else made)


def of(value):
    return dict.fromkeys(NAMES, 2.0 * value)


PARTS = {
    "tensor": (["/end_weight_update", "/begin_weight_update"], "/update_weights_from_tensor", []),
    "nccl": (
        ["/init_weights_update_group", "/end_weight_update", "/begin_weight_update"],
        "/update_weights_from_distributed",
        ["/destroy_weights_update_group"],
    ),
}


def test_parts_come_in_order_and_only_the_last_has_the_name(fakes, serve, way):
    servers = serve(fakes, push=False, push_with=way)
    for fake in fakes:
        fake.order.clear()
    size, made_s = send(servers, "x", 3)
    assert size == 4 * 2 * 8
    assert made_s >= 0
    before, part, after = PARTS[way]
    for fake in fakes:
        assert fake.order == [
            *HANDSHAKE, *before, *[part] * 4, "/end_weight_update", *after, "/model_info",
            "/continue_generation", "/generate",
        ]  # fmt: skip
        assert fake.versions == ["x-partial"] * 3 + ["x"]
        assert (fake.weights, fake.taken, fake.paused) == ("x", of(3), False)
    assert ask(servers)[0].ids == (10, 11, 1)


def test_a_server_that_fails_half_way_holds_nobody_up_and_is_mended_alone(fakes, serve, way):
    servers = serve(fakes, push=False, push_with=way, push_s=12)
    send(servers, "x", 3)
    fakes[0].faults[PARTS[way][1]] = [None, None, 500]
    send(servers, "y", 4)
    assert (fakes[1].weights, fakes[1].taken) == ("y", of(4))
    wait_until(lambda: numbers_are(servers, taken_back=1))
    assert (fakes[0].weights, fakes[0].taken) == ("y", of(4))
    assert SEEN["left_out"] == SEEN["failed_status"] == 1
    assert not any(fake.paused or fake.is_updating for fake in fakes)


def test_a_server_that_hangs_half_way_is_given_up_at_its_deadline(fakes, serve, way):
    servers = serve(fakes, push=False, push_with=way, push_s=6)
    send(servers, "x", 3)
    fakes[0].faults[PARTS[way][1]] = [None, "hang"]
    start = time.monotonic()
    send(servers, "y", 4)
    assert time.monotonic() - start < 30
    assert fakes[1].taken == of(4)
    fakes[0].hung.set()
    wait_until(lambda: numbers_are(servers, taken_back=1))
    assert fakes[0].taken == of(4)


def test_until_new_weights_are_there_replies_with_the_old_ones_are_right(fakes, serve, way):
    """The learner may take long to make the first parcel; servers sample on."""
    servers = serve(fakes, push=False, push_with=way)
    send(servers, "x", 3)
    found = []

    def made():
        wait_until(lambda: "y" in servers.fleet._versions)
        found.extend(ask(servers, range(4)))
        yield from parcels(4)

    send(servers, "y", 4, made=made())
    assert [reply.versions for reply in found] == [("x",) * 3] * 4
    assert ask(servers)[0].versions == ("y",) * 3
    assert numbers_are(servers, requests=5, retries=0, left_out=0)


def test_a_server_that_fails_a_request_and_then_the_push_is_mended_once(fakes, serve, way):
    servers = serve(fakes, push=False, push_with=way, push_s=12)
    send(servers, "x", 3)
    fleet = servers.fleet
    watches = len(fleet._tasks)

    def made():
        wait_until(lambda: "y" in fleet._versions)
        fakes[0].faults["/generate"] = [500]
        fakes[0].faults[PARTS[way][1]] = [500]
        assert ask(servers)[0].versions == ("x",) * 3
        assert not fleet._members[0].is_used
        yield from parcels(4)

    send(servers, "y", 4, made=made())
    wait_until(lambda: len(fleet._tasks) == watches)
    assert numbers_are(servers, servers=2, left_out=1, taken_back=1, failed_status=2)
    assert fakes[0].taken == of(4)


def test_a_server_whose_name_is_not_known_for_a_moment_is_mended(fakes, serve, monkeypatch):
    servers = serve(fakes, push=False, push_with="nccl")
    send(servers, "x", 3)
    find, missing = transfer._own_address, [fakes[0].url]

    def unsure(url):
        if url in missing:
            missing.remove(url)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return find(url)

    monkeypatch.setattr(transfer, "_own_address", unsure)
    send(servers, "y", 4)
    assert fakes[1].taken == of(4)
    wait_until(lambda: numbers_are(servers, taken_back=1))
    assert fakes[0].taken == of(4)
    assert SEEN["failed_connection"] == SEEN["left_out"] == 1


def test_what_is_sampled_with_a_part_of_the_weights_is_refused(fakes, serve):
    """A server that goes on after a push that failed half way says so in its answers."""
    servers = serve(fakes, push=False, push_with="tensor")
    send(servers, "x", 3)
    fakes[0].weights = "x-partial"
    assert ask(servers)[0].versions == ("x",) * 3
    assert numbers_are(servers, failed_stale=1)


def test_a_server_that_many_processes_cannot_mend_waits_for_the_next_weights(fakes, serve, way):
    servers = serve(fakes, push=False, push_with=way, push_s=12)
    send(servers, "x", 3, again=False)
    fakes[0].faults[PARTS[way][1]] = [500]
    send(servers, "y", 4, again=False)
    member = servers.fleet._members[0]
    wait_until(lambda: member.is_waiting)
    assert numbers_are(servers, servers=1, taken_back=0)
    fakes[0].faults[PARTS[way][1]] = [None, 500]  # and misses these too
    send(servers, "z", 5, again=False)
    wait_until(lambda: member.is_waiting)
    assert numbers_are(servers, servers=1, taken_back=0, failed_status=2)
    send(servers, "w", 6, again=False)
    assert numbers_are(servers, servers=2, taken_back=1)
    assert fakes[0].taken == fakes[1].taken == of(6)


def test_a_server_that_missed_nothing_comes_back_with_the_weights_it_has(fakes, serve, way):
    servers = serve(fakes, push=False, push_with=way)
    send(servers, "x", 3, again=False)
    fakes[0].faults["/generate"] = [500]
    assert ask(servers)[0].ids == (10, 11, 1)
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1))
    assert fakes[0].versions == ["x-partial"] * 3 + ["x"]  # nothing was sent again


def test_weights_that_the_learner_has_overwritten_are_not_sent(fakes, serve, way):
    servers = serve(fakes, push=False, push_with=way, push_s=12)
    send(servers, "x", 3)

    def gone():
        raise RuntimeError("Array has been deleted with shape=float32[2].")

    fakes[0].faults[PARTS[way][1]] = [500]
    servers.push(Weights(gone, "y", ord("y"), [-0.25] * 10), parcels(4))
    wait_until(lambda: "Array has been deleted" in servers.fleet._last_problem)
    assert numbers_are(servers, servers=1, taken_back=0)
    send(servers, "z", 5)
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1))
    assert fakes[0].taken == fakes[1].taken == of(5)


def test_a_signal_in_the_middle_leaves_servers_at_work(fakes, serve, way, monkeypatch):
    servers = serve(fakes, push=False, push_with=way)
    send(servers, "x", 3)
    fakes[0].faults[PARTS[way][1]] = [None, "hang"]
    noticed = threading.Event()
    number = signal.SIGTERM
    monkeypatch.setattr(preemption, "noticed", lambda: number if noticed.is_set() else None)

    def made():
        for count, parcel in enumerate(parcels(4)):
            if count == 3:
                wait_until(lambda: fakes[0].hanging)
                noticed.set()
            yield parcel

    with pytest.raises(Preempted):
        send(servers, "y", 4, made=made())
    fakes[0].hung.set()
    wait_until(lambda: not any(fake.paused for fake in fakes))


def test_an_update_that_a_killed_run_left_open_is_closed_first(fakes, serve):
    for fake in fakes:
        fake.is_updating = fake.paused = True
    servers = serve(fakes, push=False, push_with="tensor")
    send(servers, "x", 3)
    assert [fake.taken for fake in fakes] == [of(3)] * 2


def test_when_no_server_takes_them_the_run_stops_with_a_line(fakes, serve):
    servers = serve(fakes, push=False, push_with="tensor", wait_s=0.5)
    send(servers, "x", 3)
    for fake in fakes:
        fake.down = True
    with pytest.raises(ServersLostError, match="no SGLang server came back"):
        send(servers, "y", 4)


REFUSED = {
    "pipeline ranks": ({"sizes": {"tp_size": 2, "pp_size": 2}}, "which only .*push=disk reaches"),
    "data ranks": ({"sizes": {"dp_size": 2}}, "which only .*push=disk reaches"),
    "no endpoint": ({"paths": []}, "has no .*/begin_weight_update"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_server_that_the_way_does_not_reach_is_refused_at_the_start(fakes, serve, way, name):
    change, words = REFUSED[name]
    for key, value in change.items():
        setattr(fakes[1], key, value)
    with pytest.raises(UserError, match=words):
        serve(fakes, push=False, push_with=way)


def test_a_server_of_several_ranks_gets_a_copy_for_each(fakes, serve):
    fakes[0].sizes = {"tp_size": 3}
    servers = serve(fakes, push=False, push_with="tensor")
    send(servers, "x", 3)
    assert [fake.copies for fake in fakes] == [3, 1]


def test_refused_weights_stop_the_run_with_what_to_do(fakes, serve, way):
    servers = serve(fakes, push=False, push_with=way, push_s=12)
    fakes[1].faults[PARTS[way][1]] = [400]
    with pytest.raises(UserError, match=r"does not take the learner's weights .* the same model"):
        send(servers, "x", 3)


def test_fewer_servers_than_processes_need_the_disk(fakes, serve, way, monkeypatch):
    monkeypatch.setattr("minirl.run.distributed.count", lambda: 3)
    with pytest.raises(UserError, match=r"push: .* needs a server for each of the 3 processes"):
        serve(fakes, push=False, push_with=way)


@pytest.mark.parametrize("name", ["nccl", "tensor"])
def test_without_torch_a_line_says_what_to_install(monkeypatch, name):
    from minirl.config import check_installed

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_installed(SglangConfig())
    with pytest.raises(UserError, match=r"push: .* pip install 'minirl-sql\[torch\]', or use disk"):
        check_installed(SglangConfig(push=name))
