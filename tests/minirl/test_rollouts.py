"""Asynchronous rollouts, against fake servers that hold requests as long as they are told."""

import json
import signal
import threading
from operator import itemgetter

import pytest

from minirl.config import SglangConfig
from minirl.config.algorithms import AlgorithmConfig
from minirl.exchange import LostError
from minirl.run import preemption
from minirl.run.preemption import Preempted
from minirl.sglang.sampler import Servers
from minirl.train.rollouts import Rollouts, examples_of_step
from tests.waiting import wait_until

from . import toy
from .toy import ignore, metrics_of

pytestmark = pytest.mark.usefixtures("soon")
STEPS, PROMPTS, GROUP, REQUESTS = 4, 4, 2, "sglang/requests"


@pytest.fixture
def fake(fakes):
    return fakes[0]


@pytest.fixture
def begin(fake, served, tmp_path):
    """Return `begin(**changes)`: a trainer whose rounds the fake server samples."""
    config = SglangConfig(urls=(fake.url,), timeout_s=60)
    with Servers(config, served, toy.SAMPLER, dtype="float32", seed=0, folder=tmp_path) as servers:

        def start(**changes):
            own = {"steps": STEPS, "eval_every": STEPS}
            return toy.trainer(
                tmp_path / "run", servers=servers, prompts_per_step=PROMPTS, group_size=GROUP,
                checkpoint_every=1, **own | changes,
            )  # fmt: skip

        yield start
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]


@pytest.mark.parametrize("lag", [2, 0])
def test_rounds_are_played_so_many_steps_ahead_and_each_once(fake, begin, tmp_path, lag):
    trainer, seen = begin(lag=lag), []

    def progress(step, *_):
        # Between two steps nobody pushes, and only what is ahead goes on.
        rounds = min(step + lag, STEPS)
        wait_until(lambda: len(fake.bodies) >= rounds * PROMPTS * GROUP)
        seen.append(step)

    trainer.run(progress)
    lines = metrics_of(tmp_path / "run")
    assert seen == [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["groups/trained"] for line in lines] == [PROMPTS] * STEPS
    turns = sum(PROMPTS * GROUP * line["rollout/turns"] for line in lines)
    assert turns == pytest.approx(len(fake.bodies)) == sum(map(itemgetter(REQUESTS), lines))
    ages = [line["rollout/age_max"] for line in lines if "rollout/age_max" in line]
    assert ages == ([min(n, lag) for n in range(STEPS)] if lag else [])
    # What older weights sampled is compared with the learner as it is now, and corrected.
    assert [line["update/clip_fraction"] for line in lines] == [0] * STEPS
    assert all(line["update/correction_mean"] != 1 for line in lines)


def test_replies_go_on_with_new_weights_and_tokens_know_it(fake, begin, tmp_path, monkeypatch):
    """The second round is asked for after the first, and its replies wait for new weights."""
    own, own_pause, begun = Rollouts._round, fake.on_pause_generation, []

    def play(rollouts, sampler, number, **options):
        wait_until(lambda: len(fake.bodies) >= number * PROMPTS * GROUP)
        return own(rollouts, sampler, number, **options)

    def pause(*state, **changes):  # for new weights, however soon the update ends
        wait_until(lambda: not begun or len(begun) > PROMPTS * GROUP)
        return own_pause(*state, **changes)

    def hold(body):
        begun.append(body)
        if len(begun) > PROMPTS * GROUP:
            wait_until(lambda: "-1-" in fake.weights)

    monkeypatch.setattr(Rollouts, "_round", play)
    fake.held, fake.on_pause_generation = hold, pause
    begin(lag=1, steps=2).run(ignore)
    one, two = metrics_of(tmp_path / "run")
    assert one["rollout/age_max"] == 0
    # First tokens are of version 0, the two others of version 1; so are later turns.
    assert two["rollout/age_max"] == 1
    assert 0 < two["rollout/age_mean"] <= 1 / 3 + 1e-6


def test_servers_measure_the_average_and_sample_with_the_weights(fake, begin, monkeypatch):
    """The round that is under way at the first validation ends before they get the average."""
    go, measured, sampled, play = threading.Event(), [], [], Rollouts._round

    def late(rollouts, sampler, number, **options):
        if number == 1:
            go.wait(60)
        return play(rollouts, sampler, number, **options)

    def validate(params, version):
        assert all(future.done() for future in trainer._rollouts._ahead.values())
        trainer._sampler.set_weights(params, version=version)
        measured.append(fake.weights)
        return 0.5

    def finish():
        under_way.append(sum(not future.done() for future in trainer._rollouts._ahead.values()))
        go.set()
        own()

    trainer, under_way = begin(lag=1, average=0.5, eval_every=1, validate=validate), []
    own, trainer._rollouts.finish = trainer._rollouts.finish, finish
    monkeypatch.setattr(Rollouts, "_round", late)
    fake.held = lambda _: sampled.append(fake.weights)
    trainer.run(ignore)
    assert under_way[0] == 1
    assert [name.split("-")[1] for name in measured] == [str(n) for n in range(1, STEPS + 1)]
    assert not {*measured} & {*sampled}
    # After a validation they are given the weights of its step again.
    assert {name.split("-")[1] for name in sampled} >= {str(n) for n in range(1, STEPS - 1)}


def test_rounds_ahead_take_the_seconds_in_which_they_are_played(begin, monkeypatch, tmp_path):
    """Two for each step, since no group passes; not the time until somebody wants them."""
    own = Rollouts._round

    def timed(rollouts, sampler, number, *, watch, **options):
        episodes = own(rollouts, sampler, number, watch=watch, **options)
        watch.seconds["rollout"] = 10.0 + number
        return episodes

    monkeypatch.setattr(Rollouts, "_round", timed)
    filtered = AlgorithmConfig(correctness_filter="mixed", max_rounds=2)
    begin(lag=1, steps=2, algorithm=filtered, judge=lambda _: toy.scored(0.0, False)).run(ignore)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["time/round_s"] for line in lines] == [10 + 11, 12 + 13]


def test_an_error_in_a_round_ahead_stops_the_run(begin, monkeypatch):
    seen = []

    def step(self, episode, reply):
        seen.append(reply)
        if len(seen) > PROMPTS * GROUP + 1:
            raise RuntimeError("the environment is broken")
        return episode.__class__(episode.example, (reply,)), None

    monkeypatch.setattr(toy.Capitals, "step", step)
    with pytest.raises(LostError, match=r"2 of 4 groups .*is broken.* saved"):
        begin(lag=1).run(ignore)


def test_a_run_that_is_stopped_goes_on_with_rounds_not_trained_on(fake, begin, tmp_path):
    def stop(step, *_):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with preemption.watched(), pytest.raises(Preempted, match="all 2 steps are saved"):
        begin(lag=1).run(stop)
    before = len(fake.bodies)
    begin(lag=1).run(ignore)
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    # The life that goes on begins with weights of its own.
    assert [line["rollout/age_max"] for line in lines] == [0, 1, 0, 1]
    # Those of the steps that are left, each prompt as often as its group is large.
    strata = (None,) * len(toy.EXAMPLES)
    asked = [body["input_ids"] for body in fake.bodies[before:]]
    for step in range(2, STEPS):
        for number in examples_of_step(strata, step, per_step=PROMPTS, seed=0):
            for _ in range(GROUP):
                asked.remove([2, *toy.Tokenizer().encode(toy.EXAMPLES[number]), 3])
    # What is left are second turns.
    assert not [ids for ids in asked if ids.count(2) == 1]


def test_a_signal_is_noticed_while_a_round_is_waited_for(fake, begin):
    go = threading.Event()
    fake.held = lambda _: go.wait(60)
    trainer = begin(lag=1)
    main = threading.main_thread().ident
    assert main is not None

    def soon():
        wait_until(lambda: len(fake.bodies) >= 1)
        signal.pthread_kill(main, signal.SIGTERM)

    threading.Thread(target=soon).start()
    with preemption.watched(), pytest.raises(Preempted, match="all 0 steps are saved"):
        trainer.run(ignore)
    go.set()
