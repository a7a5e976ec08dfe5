"""A router before the servers: it chooses, and what it cannot do goes to each server itself."""

import time
from types import SimpleNamespace

import pytest

from minirl.config import SamplerConfig, SglangConfig
from minirl.errors import ServersLostError, UserError
from minirl.sglang.servers import Servers

from .fake_sglang import STOP, VOCAB, FakeRouter
from .test_fleet import DEADLINES, REPLY_FAULTS, ask, numbers, send, wait_until

TOKENS = (10, 11, STOP)


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def router(fakes):
    made = FakeRouter([fake.url for fake in fakes])
    yield made
    made.close()


@pytest.fixture
def serve(router, tmp_path, monkeypatch):
    """Return `serve(**settings)`: servers behind the router, with the weights `a`."""
    monkeypatch.setattr(
        "minirl.sglang.servers.read_config", lambda _: SimpleNamespace(vocab_size=VOCAB)
    )
    (tmp_path / "config.json").write_text('{"model_type": "toy", "architectures": ["Toy"]}')
    opened = []

    def start(**settings):
        config = SglangConfig(**{**DEADLINES, "router": router.url, **settings})
        limits = SamplerConfig(max_prompt_tokens=40, max_response_tokens=24)
        found = Servers(config, tmp_path, limits, dtype="float32", seed=0, folder=tmp_path)
        opened.append(found.__enter__())
        send(found, "a")
        return found

    yield start
    for servers in opened:
        servers.__exit__()


class Seen(dict):
    """What happened since the test began."""

    def are(self, servers, /, **wanted):
        for key, value in numbers(servers).items():
            keeps = key in ("servers", "router", "probe_gap")
            self[key] = value if keeps else self.get(key, 0) + value
        return all(self[key] == value for key, value in wanted.items())


def replies(servers, episodes):
    return [found.ids for found in ask(servers, episodes)]


def clear(fakes, router):
    router.passed.clear()
    for fake in fakes:
        fake.bodies.clear()
        fake.order.clear()


def test_the_router_is_asked_for_replies_and_each_server_for_all_else(fakes, router, serve):
    servers = serve()
    clear(fakes, router)
    assert replies(servers, range(6)) == [TOKENS] * 6
    assert len(router.passed) == 6
    assert [len(fake.bodies) for fake in fakes] == [3, 3]
    clear(fakes, router)
    send(servers, "b")
    assert [fake.weights for fake in fakes] == ["b", "b"]
    assert router.passed == []
    assert numbers(servers)["router"] == 1


# A status is tried again by a router itself; to a server that hangs belongs a health that does.
BEHIND = [name for name in REPLY_FAULTS if name != "hangs"]


@pytest.mark.parametrize("name", BEHIND)
def test_a_bad_answer_behind_a_router_is_asked_for_once_more(fakes, router, serve, name):
    fault, kind = REPLY_FAULTS[name]
    servers, seen = serve(), Seen()
    for fake in fakes:
        fake.faults["/generate"] = [fault]
    assert replies(servers, [1]) == [TOKENS]
    wait_until(lambda: seen.are(servers, servers=2, router=1))
    assert seen["requests"] == 1
    assert 1 <= seen["retries"] <= 3
    # A router says 500 where a server hangs up.
    assert seen[f"failed_{kind}"] + (kind == "connection") * seen["failed_status"] >= 1
    clear(fakes, router)
    assert replies(servers, range(4)) == [TOKENS] * 4
    assert len(router.passed) == 4


def test_a_server_with_old_weights_is_found_and_brought_up_to_date(fakes, router, serve):
    servers, seen = serve(), Seen()
    fakes[0].weights = "default"  # it was started anew
    assert replies(servers, range(8)) == [TOKENS] * 8
    wait_until(lambda: seen.are(servers, servers=2, router=1))
    assert fakes[0].weights == "a"
    assert seen["requests"] == 8
    assert seen["left_out"] == seen["taken_back"] == 1
    assert seen["failed_stale"] >= 1


def test_a_server_that_hangs_behind_a_router_gives_all_requests_up(fakes, router, serve):
    servers, seen = serve(timeout_s=90, health_s=3), Seen()
    fakes[0].faults["/generate"] = ["hang", "hang"]
    fakes[0].faults["/health"] = ["hang"] * 3
    start = time.monotonic()
    assert replies(servers, range(4)) == [TOKENS] * 4
    assert time.monotonic() - start < 45
    wait_until(lambda: set(fakes[0].hanging) - {None} <= set(fakes[0].aborted))
    fakes[0].hung.set()
    wait_until(lambda: seen.are(servers, servers=2, router=1))
    assert seen["requests"] == 4
    assert seen["left_out"] == seen["taken_back"] == 1


def test_without_its_router_a_run_goes_on(fakes, router, serve):
    servers, seen = serve(), Seen()
    router.down = True
    assert replies(servers, range(8)) == [TOKENS] * 8
    wait_until(lambda: seen.are(servers, router=0, servers=2))
    send(servers, "b")
    assert [fake.weights for fake in fakes] == ["b", "b"]
    assert replies(servers, range(8, 16)) == [TOKENS] * 8
    # Each of the first ones tried the router at most once.
    assert seen.are(servers, left_out=0)
    assert seen["retries"] <= 8
    router.down = False
    wait_until(lambda: seen.are(servers, router=1))
    clear(fakes, router)
    assert replies(servers, range(16, 20)) == [TOKENS] * 4
    assert len(router.passed) == 4


def test_servers_that_come_and_go_behind_a_router_are_noticed_with_the_next_weights(
    fakes, router, serve
):
    router.behind = [fakes[0].url]
    servers, seen = serve(), Seen()
    assert fakes[1].order == []
    router.behind = [fake.url for fake in fakes]
    # It answers with other weights than it should: those answers do not count.
    assert replies(servers, range(6)) == [TOKENS] * 6
    # Besides them it may have been probed.
    assert 5 in {body["input_ids"][0] for body in fakes[1].bodies}
    send(servers, "b")
    wait_until(lambda: seen.are(servers, servers=2, router=1))
    assert [fake.weights for fake in fakes] == ["b", "b"]
    router.behind = [fakes[1].url]
    fakes[0].down = True
    send(servers, "c")
    assert replies(servers, range(6, 12)) == [TOKENS] * 6
    wait_until(lambda: seen.are(servers, servers=1, router=1))
    assert fakes[1].weights == "c"


def test_each_process_brings_weights_to_its_share(fakes, serve, monkeypatch):
    monkeypatch.setattr("minirl.sglang.servers.distributed.count", lambda: 2)
    monkeypatch.setattr("minirl.sglang.servers.distributed.gather", lambda make: [make()])
    servers = serve()
    mine, other = sorted(fakes, key=lambda fake: fake.url)
    assert (mine.weights, other.weights) == ("a", "default")
    other.weights = "a"  # from another process
    assert replies(servers, range(6)) == [TOKENS] * 6
    assert "/update_weights_from_disk" not in other.order


WRONG = {
    "nobody there": ({"down": True}, "does not answer .* after start_s = 0.5 s"),
    "no servers": ({"behind": []}, "has no workers after start_s = 0.5 s"),
    "no router": ({"faults": {"/workers": [404] * 99}}, "is no router of SGLang .*404"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_router_is_refused_at_the_start(router, serve, name):
    change, words = WRONG[name]
    for key, value in change.items():
        setattr(router, key, value)
    with pytest.raises(UserError, match=f"rollout.sglang.router: {router.url} {words}"):
        serve(start_s=0.5)


def test_a_router_that_has_no_worker_left_stops_the_run(fakes, router, serve):
    servers = serve(wait_s=0.5)
    router.behind = []
    with pytest.raises(ServersLostError, match=r"no SGLang server came back .* no worker that is"):
        send(servers, "b")
    # Nobody waits for ever, and the loop is there for others.
    assert numbers(servers)["servers"] == 0
