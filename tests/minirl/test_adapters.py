"""Adapters at servers: one name a version, replies of one version, nothing paused, none lost."""
# ruff: noqa: F811  (a fixture of another file)

import threading

import pytest

from minirl.config import LoraConfig
from minirl.exchange import UserError
from minirl.sglang.transfer import lora_options
from tests.waiting import wait_until

from .conftest import HYBRID
from .test_pool import (  # noqa: F401
    SEEN,
    Nurse,
    _forget,
    ask,
    folder_of,
    numbers,
    numbers_are,
    nurses,
    send,
    serve,
    start,
)

pytestmark = pytest.mark.usefixtures("soon")
LORA = LoraConfig(rank=2)


def test_adapters_alone_are_pushed_and_requests_name_them(fakes, serve):
    servers = serve(fakes, lora=LORA)
    for name in "abc":
        if name != "a":
            send(servers, name)
        (found,) = ask(servers)
        assert found.versions == (name,) * 3
    for fake in fakes:
        # The newest, and those before, with which replies may be under way.
        assert fake.adapters == {name: str(folder_of(servers, name)) for name in "bc"}
        assert (fake.weights, fake.folder) == ("default", "")
        assert not {"/pause_generation", "/flush_cache"} & {*fake.order}


def test_a_reply_ends_with_the_adapters_that_it_began_with(fakes, serve):
    servers, go = serve(fakes[:1], lora=LORA), threading.Event()
    fakes[0].held = lambda _: go.wait(60)
    under_way = start(servers, 1)
    wait_until(lambda: len(fakes[0].bodies) == 1)
    send(servers, "b")
    go.set()
    assert under_way.result(60).versions == ("a",) * 3
    assert ask(servers)[0].versions == ("b",) * 3
    assert numbers(servers)["retries"] == 0


def test_a_server_that_was_restarted_is_given_the_adapters_again(fakes, serve):
    servers = serve(fakes, lora=LORA)
    for fake in fakes:
        fake.adapters.clear()
    fakes[0].faults["/generate"] = ["drop"]
    fakes[1].faults["/generate"] = ["drop"]
    (found,) = ask(servers)
    assert found.versions == ("a",) * 3
    wait_until(lambda: numbers(servers)["servers"] == 2)
    send(servers, "b")
    assert [{*fake.adapters} for fake in fakes] == [{"a", "b"}] * 2


def test_a_server_that_lacks_the_adapters_is_left_out_by_its_first_refusal(fakes, serve):
    """It refuses at once: half of the requests would fail."""
    servers = serve(fakes, lora=LORA)
    fakes[0].adapters.clear()
    assert [found.versions for found in ask(servers, range(20))] == [("a",) * 3] * 20
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1))
    assert (SEEN["left_out"], SEEN["requests"]) == (1, 20)
    assert [{*fake.adapters} for fake in fakes] == [{"a"}] * 2


def test_adapters_whose_loading_was_not_answered_in_time_are_there_the_next_time(fakes, serve):
    servers, go = serve(fakes, lora=LORA, wait_s=2), threading.Event()
    fakes[0].faults["/load_lora_adapter"] = [lambda right: go.wait(60) and right]
    send(servers, "b")
    go.set()
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1, failed_deadline=1))
    assert [found.versions for found in ask(servers, range(4))] == [("b",) * 3] * 4


def test_a_server_whose_weights_below_the_adapters_change_is_started_anew(fakes, serve, nurses):
    servers = serve(fakes, launch=2, lora=LORA)
    fakes[0].weights = "others"

    def restart():
        Nurse.start(nurses[0])
        fakes[0].adapters.clear()

    nurses[0].start = restart
    assert [found.versions for found in ask(servers, range(4))] == [("a",) * 3] * 4
    wait_until(lambda: numbers_are(servers, servers=2, taken_back=1, restarted=1))
    assert fakes[0].adapters
    assert SEEN["failed_stale"] >= 1


def test_a_server_without_lora_is_refused_at_the_first_push(fakes, serve):
    for fake in fakes:
        fake.faults["/load_lora_adapter"] = [400]
    with pytest.raises(UserError, match="does not take the learner's weights"):
        serve(fakes, lora=LORA)


def test_launched_servers_have_room_for_the_adapters_and_for_no_others():
    options = lora_options(LoraConfig(rank=4, targets=("q", "down", "out")))
    assert options == [
        "--enable-lora", "--max-lora-rank", "4", "--max-loras-per-batch", "3",
        "--lora-target-modules", "q_proj", "down_proj",
    ]  # fmt: skip
    # No name of linear attention is on SGLang's list.
    assert lora_options(LoraConfig(rank=4, targets=("q",)), HYBRID.hybrid)[-1] == "all"
