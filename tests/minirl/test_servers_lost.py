"""A run that has no server left saves itself, says so, and goes on later as if nothing had been."""

import threading

import pytest

from . import toy_run
from .fake_sglang import Fake
from .test_hosts import LIMIT_S, ends, processes

pytestmark = pytest.mark.timeout(3 * LIMIT_S)
STEPS = 5
# What a server answers in a step: half of the episodes, a reply each, and the probe.
ANSWERS = 16 + 1


class Mortal(Fake):
    """Is gone for good after so many requests; None for never."""

    dies_after, asked = None, 0
    lock = threading.Lock()

    def answer(self, handler, body):
        if handler.path == "/generate":
            with self.lock:  # all of a step come at once
                self.asked += 1
                self.down |= self.dies_after is not None and self.asked > self.dies_after
        super().answer(handler, body)


@pytest.fixture
def fakes():
    made = [Mortal(), Mortal()]
    yield made
    for fake in made:
        fake.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def live(folder, fakes, cache, *, wait_s=60, lag=0):
    urls = ",".join(fake.url for fake in fakes)
    return ends(processes(folder, urls, wait_s, lag, cache=cache, script="served_run.py"))


def told(folder):
    """Return the metrics, but for what depends on the clock or counts what befell servers."""
    return [
        {key: value for key, value in line.items() if not key.startswith("sglang/")}
        for line in toy_run.metrics_of(folder)
    ]


def test_a_run_without_servers_is_saved_and_goes_on(fakes, cache, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    for status, _, errors in live(whole, fakes, cache):
        assert status == 0, errors
    assert [line["step"] for line in told(whole)] == list(range(1, STEPS + 1))

    # The server of the second process, in the third rollout.
    mortal = fakes[1]
    mortal.asked, mortal.dies_after = 0, 2 * ANSWERS + ANSWERS // 2
    saved = "all 2 steps are saved: run the same command again to resume"
    for status, _, errors in live(run, fakes, cache, wait_s=1):
        assert status == 2, errors
        line = next(line for line in errors.splitlines() if line.startswith("error: "))
        assert "no SGLang server came back within rollout.sglang.wait_s = 1 s" in line
        assert line.endswith(saved)
        assert "Traceback" not in errors
    assert told(run) == told(whole)[:2]

    mortal.down, mortal.dies_after, mortal.weights = False, None, "default"
    for status, _, errors in live(run, fakes, cache):
        assert status == 0, errors
    assert told(run) == told(whole)


def test_two_processes_play_ahead_of_their_learner(fakes, cache, tmp_path):
    for status, _, errors in live(tmp_path / "run", fakes, cache, lag=1):
        assert status == 0, errors
    lines = toy_run.metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["rollout/age_max"] for line in lines] == [0, 1, 1, 1, 1]
    assert {line["groups/trained"] for line in lines} == {4}
    # Each process has its own half of the episodes from its own server, once.
    answered = [
        sum(body["sampling_params"]["max_new_tokens"] > 0 for body in fake.bodies) for fake in fakes
    ]
    assert answered == [16 * STEPS] * 2
