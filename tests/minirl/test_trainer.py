"""Whole runs on a toy task: they learn, can be repeated, and say what they did."""

import json
import math
import signal
import sqlite3
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minirl.config import BatchingConfig, OptimizerConfig
from minirl.config.algorithms import AlgorithmConfig
from minirl.exchange import CreditSpan, LostError, UserError
from minirl.run import distributed, preemption
from minirl.run.checkpoint import read_params
from minirl.run.preemption import Preempted
from minirl.sample import decode
from minirl.train.optimizer import learning_rate
from minirl.train.rollouts import examples_of_step
from minirl.types import Request
from tests.plain_model import assert_close, assert_same

from . import toy
from .toy import copied, ignore, metrics_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The run that nothing befell, and the weights at each of its evaluations."""
    found = SimpleNamespace(folder=tmp_path_factory.mktemp("finished"), weights={}, seen=[])

    def validate(params, version):
        found.weights[version] = copied(params)
        return toy.ACCURACY[version]

    found.trainer = toy.trainer(found.folder, validate=validate)
    sampler = found.trainer._sampler
    with patch.object(sampler, "submit", wraps=sampler.submit) as submit:
        found.trainer.run(lambda *call: found.seen.append(call))
    found.episodes = {call.args[0].episode for call in submit.call_args_list}
    return found


def test_the_reward_rises_and_what_is_due_is_measured(finished):
    records = metrics_of(finished.folder)
    rewards = [record["reward/total"] for record in records]
    assert len(rewards) == toy.STEPS
    assert rewards[0] < 0.7
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.3
    for record in records:
        # One update a batch: weights are those that sampled, so no ratio is away from 1.
        assert record["mismatch/gap_max"] < 1e-4
        assert record["update/clip_fraction"] == 0
        assert record["groups/trained"] == 4
        assert 1 <= record["rollout/turns"] <= 2
        assert record["rollout/reply_tokens"] <= 6
        assert record.get("validation/accuracy") == toy.ACCURACY.get(record["step"])
    assert finished.trainer.curve == [*toy.ACCURACY.items()]
    kl = {record["step"]: record["update/kl"] for record in records if "update/kl" in record}
    assert list(kl) == [8]
    assert kl[8] > 0.01
    steps = range(1, toy.STEPS + 1)
    assert [call[:2] for call in finished.seen] == [(step, toy.STEPS) for step in steps]
    lines = (finished.folder / toy.SAMPLED).read_text().splitlines()
    sampled = Counter(json.loads(line)["step"] for line in lines)
    assert sampled == dict.fromkeys((1, 3, 6), 4 * 8)  # `sample_every` is 3
    # An episode's number and the seed decide its random stream: no two draw alike.
    assert finished.episodes == {*range(toy.STEPS * 4 * 8)}


def test_a_step_draws_from_nuclei_and_learns_from_whole_replies(tmp_path, monkeypatch):
    """Its programs are the gradient, zeros, a sum, the optimizer, and those of the sampler."""
    nuclei = toy.SAMPLER.model_copy(update={"top_p": 0.8})
    monkeypatch.setattr(toy, "SAMPLER", nuclei)
    monkeypatch.setattr(toy, "LEARNERS", {})
    changes = {"steps": 1, "kl_every": None}
    pairs = sampled_in(tmp_path, algorithm=AlgorithmConfig(mask_cut_off=True), **changes)
    ends = {(one.turns[-1].reply.finish, bool(row.is_action.any())) for one, row in pairs}
    assert ends == {("stop", True), ("length", False)}
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert 0 < line["rollout/cut_share"] < 1
    assert 0 < line["time/update_programs"] <= 4
    assert 0 < line["time/sampler_compilations"] <= 12 - 5
    # Log-probabilities are those of the whole distribution.
    assert line["mismatch/gap_max"] < 1e-4


def test_an_average_is_measured_and_kept_and_the_weights_are_trained(finished, tmp_path):
    """What is sampled and learned is as without it."""
    decay, measured = 0.75, {}

    def validate(params, version):
        measured[version] = copied(params)
        return toy.ACCURACY[version]

    trainer = toy.trainer(tmp_path, validate=validate, average=decay)
    expected = [copied(trainer.params)]
    follow = trainer._learner.average

    def spy(state, **options):
        mix = lambda old, new: decay * old + (1 - decay) * new  # noqa: E731
        expected.append(jax.tree.map(mix, expected[-1], state.params))
        return follow(state, **options)

    trainer._learner.average = spy
    trainer.run(ignore)
    assert metrics_of(tmp_path) == metrics_of(finished.folder)
    for version, params in measured.items():
        assert_close(params, expected[version], atol=1e-6)
    kept = tmp_path / "checkpoints"
    assert_same(read_params(kept / "8", trainer.params, item="raw"), finished.weights[8])
    # Of the best, from which no run goes on, there is the average alone.
    assert sorted(path.parent.name for path in kept.glob("*/raw")) == ["6", "8"]
    # Right after a run, as a job does it: of the best weights there is room for one copy.
    before = trainer._state
    assert trainer.use_best() == 4
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert not jax.tree.leaves(trainer._state.opt_state)
    assert_same(trainer.params, measured[4])


def test_a_step_whose_prompts_are_all_too_long_changes_no_weights(tmp_path):
    trainer = toy.trainer(tmp_path, steps=1, examples=("A" * 30, "B" * 30))
    before = copied(trainer.params)
    trainer.run(ignore)
    (record,) = metrics_of(tmp_path)
    assert record["groups/trained"] == 0
    assert not [name for name in record if name.startswith(("update/", "groups/live"))]
    assert_same(trainer.params, before)


def test_without_groups_to_train_on_weights_stay_and_the_rate_follows_the_step(tmp_path):
    """In the last of four steps alone replies are correct, and no longer do rewards differ by
    shaping alone: Adam's first update is the rate of that step.
    """
    falling = OptimizerConfig(learning_rate=0.1, schedule="cosine", weight_decay=0.0)
    mixed = AlgorithmConfig(correctness_filter="mixed", max_rounds=3)

    def judge(episode):
        score = toy.score(episode)
        return score if trainer.steps_done == 3 else replace(score, correct=False)

    trainer = toy.trainer(tmp_path, judge=judge, steps=4, optimizer=falling, algorithm=mixed)
    start = copied(trainer.params)

    def look(step, *_):
        if step == 3:
            assert_same(trainer.params, start)

    trainer.run(look)
    moved = jax.tree.map(lambda new, old: jnp.abs(new - old).max(), trainer.params, start)
    # A tenth of the peak, 0.1, and of the other nine tenths (1 + cos(3 pi / 4)) / 2.
    expected = 0.1 * (0.1 + 0.9 * (1 - 0.5**0.5) / 2)
    assert max(jax.tree.leaves(moved)) == pytest.approx(expected, rel=1e-3)
    *before, last = metrics_of(tmp_path)
    assert last["update/learning_rate"] == pytest.approx(expected, rel=1e-6)
    for record in before:
        assert not [name for name in record if name.startswith("update/")]
        assert (record["groups/trained"], record["groups/live_share"]) == (0, 0)
        assert record["groups/rounds"] == 3


def test_a_locked_database_costs_its_group_and_a_share_of_them_the_run(tmp_path):
    """One of four groups fails in the first two steps, all but one in the third."""

    def judge(episode):
        locked = (("AB",), ("AB",), ("AB", "CDE", "F", "GH"))[trainer.steps_done]
        if episode.example in locked:
            raise sqlite3.OperationalError("database is locked")
        return toy.score(episode)

    changes = {"examples": ("AB", "CDE", "F", "GH"), "checkpoint_every": 9}
    trainer = toy.trainer(tmp_path, judge=judge, **changes)
    with pytest.raises(LostError, match=r"2 of 4 groups .*locked.*all 2 steps are saved"):
        trainer.run(ignore)
    lines = metrics_of(tmp_path)
    assert [(line["groups/failed"], line["groups/trained"]) for line in lines] == [(1, 3), (1, 3)]
    assert [path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")] == ["2"]


def test_failed_groups_are_counted_over_all_processes(tmp_path, monkeypatch):
    """Of four groups this process has one, which fails; so has another one, at last."""
    judge = Mock(side_effect=sqlite3.OperationalError("database is locked"))
    trainer = toy.trainer(tmp_path, judge=judge, steps=2)
    trainer._rollouts.share = range(1)

    def progress(*_):
        monkeypatch.setattr(distributed, "gather", lambda make: [make()] * 2)

    with pytest.raises(LostError, match=r"2 of 4 groups have failed.*all 1 steps are saved"):
        trainer.run(progress)
    assert [line["groups/failed"] for line in metrics_of(tmp_path)] == [1]


@pytest.mark.parametrize(("place", "times"), [("reward", 32), ("reference", 2)])
def test_a_signal_is_noticed_among_rewards_and_micro_batches(tmp_path, place, times):
    """A step scores 32 trajectories, and asks the reference about them in two micro-batches."""
    calls = []

    def told(function):
        def call(*arguments):
            calls.append(toy.be_told())
            return function(*arguments)

        return call

    algorithm = AlgorithmConfig(kl_coef=0.1, kl_in="credit", kl_estimator="k1")
    changes: dict[str, Any] = {"judge": told(toy.score)} if place == "reward" else {}
    trainer = toy.trainer(tmp_path, algorithm=algorithm, **changes)
    if place == "reference":
        compiled = trainer._learner._logp
        trainer._learner._logp = lambda batch: told(compiled(batch))
    with preemption.watched(), pytest.raises(Preempted, match="all 0 steps are saved"):
        trainer.run(ignore)
    assert 0 < len(calls) < times


def test_every_example_comes_once_before_any_comes_again_and_strata_are_spread():
    strata = tuple("aaabbcc")
    steps = [examples_of_step(strata, step, per_step=3, seed=5) for step in range(14)]
    flat = [number for step in steps for number in step]
    epochs = [flat[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert steps[9] == examples_of_step(strata, 9, per_step=3, seed=5)
    # More a step than there are: it takes from several epochs.
    assert Counter(examples_of_step(("a", "b"), 0, per_step=6, seed=0)) == {0: 3, 1: 3}
    # 40 of a large stratum and 3 of each of 20 small ones.
    strata = ("large",) * 40 + tuple(n // 3 for n in range(60))
    for seed in range(5):
        steps = [examples_of_step(strata, step, per_step=10, seed=seed) for step in range(10)]
        assert sorted(number for step in steps for number in step) == list(range(100))
        # The last step takes what is left.
        for step in steps[:-1]:
            counts = Counter(strata[number] for number in step)
            assert 3 <= counts.pop("large") <= 4
            assert set(counts.values()) == {1}


def test_mini_batches_are_updates_one_after_the_other(tmp_path):
    """Four updates by hand, with the learner's log-probabilities before the first in all."""
    algorithm = AlgorithmConfig(correction_high=1.01, kl_coef=0.1)
    falling = toy.TRAIN.optimizer.model_copy(update={"schedule": "cosine"})
    steps: list[Any] = []
    trainer = toy.trainer(
        tmp_path, steps=2, mini_batches=4, algorithm=algorithm, optimizer=falling,
        sample_every=1, write=lambda _step, _groups, rows: steps.append(rows),
    )  # fmt: skip
    reference = nnx.state(toy.model(layers=1))
    state, clipped = trainer._learner.init(copied(trainer.params)), []
    trainer.run(ignore)
    learner, rate = trainer._learner, learning_rate(falling, steps=2)
    for step, rows in enumerate(steps):
        parts = [batch for group in rows for batch in trainer._micro_batches([group])]
        start = learner.logprobs(state.params, parts)
        parts = [b._replace(old_logp_BC=s) for b, s in zip(parts, start, strict=True)]
        for batch in parts:
            state, stats, _ = learner.update(
                state, [batch], reference=reference, rate=float(rate(step))
            )
            clipped.append(stats["clip_fraction"] / stats["weight"])
    for ours, theirs in zip(*map(jax.tree.leaves, (trainer.params, state.params)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    # The first update of a step is on policy, the others are not.
    assert clipped[0] == clipped[4] == 0
    assert min(sum(clipped[1:4]), sum(clipped[5:])) > 0.1
    records = metrics_of(tmp_path)
    # Of over 200 tokens one at a bound may be on either side.
    assert [record["update/clip_fraction"] for record in records] == pytest.approx(
        [np.mean(clipped[:4]), np.mean(clipped[4:])], abs=0.01
    )
    # The gap to the sampler is that at the step's start, whatever the updates are.
    assert max(record["mismatch/gap_max"] for record in records) < 1e-4
    assert records[1]["update/kl"] > 0.01


def sampled_in(folder, **changes):
    """Run a trainer; return the trajectories of its sampled steps, each with its row."""
    pairs = []

    def write(_, groups, rows):
        for group, known in zip(groups, rows, strict=True):
            pairs.extend(zip(group, known, strict=True))

    toy.trainer(folder, write=write, **changes).run(ignore)
    return pairs


def credited(episode):
    """Credit each letter of each reply: 1 for a capital, -1 for another."""
    spans = tuple(
        CreditSpan(turn, place, place + 1, 1.0 if "A" <= letter < "a" else -1.0)
        for turn, reply in enumerate(episode.replies)
        for place, letter in enumerate(reply)
    )
    return toy.scored(toy.score(episode).total, toy.score(episode).correct, spans)


def test_credit_of_letters_reaches_single_trajectories(tmp_path):
    pairs = sampled_in(
        tmp_path, steps=1, group_size=1, prompts_per_step=24, judge=credited,
        algorithm=AlgorithmConfig(kind="expo"), batching=BatchingConfig(
            micro_batch_tokens=1024, prompt_multiple=8, answer_multiple=24
        ),
    )  # fmt: skip
    for trajectory, row in pairs:
        end = 0
        for turn in trajectory.turns:
            start = end + len(turn.observation_ids)
            end = start + len(turn.reply.ids)
            # The stop token has no letter.
            advantage = row.advantage[start:end][: len(turn.reply.text)]
            expected = [1.0 if "A" <= letter < "a" else -1.0 for letter in turn.reply.text]
            assert advantage == pytest.approx(expected, abs=1e-6)
    (record,) = metrics_of(tmp_path)
    # Measured at every step, since the credit needs it: 0 before the first update.
    assert record["update/kl"] == pytest.approx(0, abs=1e-5)
    # A mean over tokens, though the loss is a sum over them.
    assert 0 < record["update/entropy"] < np.log(64)


def test_a_run_passes_over_steps_without_a_finite_gradient_and_ends_after_five(tmp_path):
    states: list[Any] = []

    def judge(episode):
        is_bad = trainer.steps_done + 1 in (2, 4, 5, 6, 7, 8)
        return toy.scored(math.nan, False) if is_bad else toy.score(episode)

    def look(step, *_):
        state = jax.tree.map(np.asarray, (trainer.params, trainer._state.opt_state[-1]))
        states.append(state)

    trainer = toy.trainer(tmp_path, judge=judge)
    with pytest.raises(UserError, match="step 8: the gradients of 5 updates in a row"):
        trainer.run(look)
    records = metrics_of(tmp_path)
    assert [record["update/skipped"] for record in records] == [0, 1, 0, 1, 1, 1, 1]
    assert records[1]["update/loss"] is None
    for before, after, is_same in ((0, 1, True), (1, 2, False), (2, 6, True)):
        if is_same:  # weights, and what the rule remembers
            assert_same(states[before], states[after])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.params))


def test_a_run_whose_tracker_fails_is_saved_and_goes_on_knowing_what_was(tmp_path, monkeypatch):
    """One group of four is paid unequally; the tracker fails after six steps of eleven."""
    lines, numbers, models, spread = {}, count(), [], toy.spread

    def judge(episode):
        # In any order: rewards are asked in threads.
        return toy.scored(float(episode.example == "A" and next(numbers) % 2), correct=False)

    def log(step, _):
        if step == 6:
            raise LostError("no network")

    def look(step, _, status):
        lines[step] = status

    def kept(*given):
        models.append(spread(*given))
        return models[-1]

    monkeypatch.setattr(toy, "spread", kept)
    make = partial(
        toy.trainer, tmp_path, steps=11, eval_every=11, examples=("A", "B", "C", "D"),
        kl_every=None, judge=judge, log=log,
    )  # fmt: skip
    with pytest.raises(LostError, match="no network; all 6 steps are saved"):
        make().run(look)
    make().run(look)
    assert list(lines) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert {line["groups/live_share"] for line in metrics_of(tmp_path)} == {0.25}
    for step, status in lines.items():
        assert ("only 25 % " in status) == ("pass_rate" in status) == (step >= 10)
    # Where a run goes on and none wants a KL, nothing is left of the start weights.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(models[1])))
    assert not any("update/kl" in line for line in metrics_of(tmp_path))


# A run that ends at any moment, by an error, a signal or a kill, goes on as if it never had.


class DiedError(Exception):
    """Stands for a kill: the trainer it went through is not used again."""


def die():
    raise DiedError


def abandon():
    raise Preempted(signal.SIGTERM)


# What ends a run, in which step, before which call (of a mini-batch), and the checkpoints there are
# then: the newest two and the best; they are due every second step.
LIVES = (
    (die, 2, "advance", 1, []),
    # The step is whole but for its validation.
    (toy.be_told, 2, "_apply", 1, ["2"]),
    # It is validated, and that is made anew.
    (abandon, 3, "numbers", 1, ["2", "3"]),
    (die, 6, "update", 2, ["2", "3", "4"]),
    (toy.be_told, 6, "advance", 1, ["2", "4", "5"]),
    (toy.be_told, 6, "save", 1, ["2", "5", "6"]),
)


def programs(trainer):
    """Sample a token, and count all programs of the update and of the sampler that there are."""
    trainer._sampler.set_weights(trainer.params, version=0)
    trainer._sampler.submit(Request(0, (2, 3, 4, 5), 1))
    trainer._sampler.advance(max_steps=1)
    trainer._sampler.release(0)
    return trainer._learner.programs, decode.compilations()


def test_a_run_of_everything_that_ends_six_times(tmp_path):
    """Two stages, dynamic sampling, mini-batches, a correction, skipped updates. Programs serve
    what comes back from a checkpoint too. Of a kill while one is written tells
    `test_checkpoint.py`.
    """
    whole = toy.take_course(tmp_path / "whole", "all")
    toy.run_course(whole, "all")
    lines = metrics_of(tmp_path / "whole")
    assert {line["update/skipped"] for line in lines} > {0.0}
    # Dynamic sampling fills the batch or gives up.
    rounds = [line["groups/rounds"] for line in lines]
    assert max(rounds) > 1
    assert whole._facts.rollouts == sum(rounds)
    assert all(n == 3 or line["groups/trained"] == 4 for n, line in zip(rounds, lines, strict=True))
    folder, compiled = tmp_path / "run", programs(whole)
    for end, step, moment, nth, saved in LIVES:
        trainer = toy.take_course(folder, "all")
        toy.arm(trainer, moment, step, end, nth=nth)
        with preemption.watched(), pytest.raises(DiedError if end is die else Preempted):
            toy.run_course(trainer, "all")
        assert sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*")) == saved
    trainer = toy.take_course(folder, "all")
    assert trainer.steps_done == whole.steps_done == 6
    toy.run_course(trainer, "all", lambda *_: pytest.fail("there is nothing left"))
    assert metrics_of(folder) == metrics_of(tmp_path / "whole")
    sampled = (folder / toy.SAMPLED).read_bytes()
    assert sampled == (tmp_path / "whole" / toy.SAMPLED).read_bytes()
    assert_same(trainer._state, whole._state)
    assert trainer._facts == whole._facts
    assert programs(trainer) == compiled
    assert trainer.use_best() == whole.use_best() == 2
    assert_same(trainer.params, whole.params)
    assert programs(trainer) == compiled


def test_a_second_ctrl_c_does_not_wait():
    # A shell lets what it starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with preemption.watched():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Preempted):
            preemption.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    preemption.check()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
