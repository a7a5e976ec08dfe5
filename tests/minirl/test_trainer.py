"""Whole runs on a toy task: they learn, can be repeated, and survive being killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.config import Grpo
from minirl.trainer import Trainer, examples_of_step

HERE = Path(__file__).parent
SCRIPT = HERE / "toy_run.py"
spec = importlib.util.spec_from_file_location("toy_run", SCRIPT)
assert spec is not None
assert spec.loader is not None
toy_run = importlib.util.module_from_spec(spec)
sys.modules["toy_run"] = toy_run
spec.loader.exec_module(toy_run)


def without_times(folder):
    """Return the lines of `metrics.jsonl`, written anew without what depends on the clock."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        json.dumps({key: value for key, value in record.items() if not key.startswith("time/")})
        for record in records
    ]


def metrics_of(folder):
    return [json.loads(line) for line in without_times(folder)]


def assert_same_weights(params, other):
    for leaf, twin in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, twin)


def copy(params):
    return jax.tree.map(jnp.copy, params)


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    """The run that nothing befell, and the weights at each of its evaluations."""
    folder = tmp_path_factory.mktemp("finished")
    weights, seen = {}, []

    def validate(params, version):
        weights[version] = copy(params)
        return toy_run.ACCURACY[version]

    trainer = toy_run.make_trainer(toy, folder, validate=validate)
    trainer.run(lambda *call: seen.append(call))
    return SimpleNamespace(folder=folder, trainer=trainer, weights=weights, seen=seen)


def test_the_reward_rises(finished):
    rewards = [record["reward/total"] for record in metrics_of(finished.folder)]
    assert len(rewards) == toy_run.STEPS
    assert rewards[0] < 0.7
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.3
    assert [(done, steps) for done, steps, _ in finished.seen] == [
        (step, toy_run.STEPS) for step in range(1, toy_run.STEPS + 1)
    ]


def test_the_learner_agrees_with_the_sampler(finished):
    for record in metrics_of(finished.folder):
        # One update a batch: weights are those that sampled, so no ratio is away from 1.
        assert record["update/logp_gap_max"] < 1e-4
        assert record["update/clip_fraction"] == 0
        assert record["groups/trained"] == 4


def test_what_is_measured_when(finished):
    records = metrics_of(finished.folder)
    assert {
        record["step"]: record["validation/accuracy"]
        for record in records
        if "validation/accuracy" in record
    } == toy_run.ACCURACY
    kl = {record["step"]: record["update/kl"] for record in records if "update/kl" in record}
    assert set(kl) == {8}
    assert kl[8] > 0.01
    assert all(1 <= record["rollout/turns"] <= 2 for record in records)
    assert max(record["rollout/reply_tokens"] for record in records) <= 6


def test_trajectories_are_there_to_read(finished):
    lines = (finished.folder / "trajectories.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert Counter(record["step"] for record in records) == {1: 8, 3: 8, 6: 8}
    assert set(records[0]) == {"step", "reward", "parts", "correct", "replies"}


def test_the_best_checkpoint_is_that_of_the_best_validation(toy, finished):
    trainer = toy_run.make_trainer(toy, finished.folder)
    assert trainer.step == toy_run.STEPS
    assert_same_weights(trainer.params, finished.weights[8])
    assert trainer.use_best() == 4
    assert_same_weights(trainer.params, finished.weights[4])
    trainer.run(lambda *_: pytest.fail("a finished run has no steps left"))
    # Right after a run, as a job does it.
    assert finished.trainer.use_best() == 4
    assert_same_weights(finished.trainer.params, finished.weights[4])


def test_one_seed_gives_one_run(toy, finished, tmp_path):
    toy_run.make_trainer(toy, tmp_path / "same", steps=2).run(lambda *_: None)
    assert without_times(tmp_path / "same") == without_times(finished.folder)[:2]
    # Without an update, which the first rewards do not depend on.
    toy_run.make_trainer(
        toy, tmp_path / "other", seed=1, steps=1, algorithm=Grpo(equal_groups="drop"),
        judge=constant, validate=nothing,
    ).run(lambda *_: None)  # fmt: skip
    first, other = (
        (folder / "trajectories.jsonl").read_text()
        for folder in (finished.folder, tmp_path / "other")
    )
    assert (
        json.loads(first.splitlines()[0])["replies"] != json.loads(other.splitlines()[0])["replies"]
    )


def constant(episode):
    return toy_run.Score(0.5, False)


def never_correct(episode):
    return toy_run.Score(toy_run.score(episode).total, False)


def nothing(params, version):
    return 0.0


@pytest.mark.parametrize(
    ("algorithm", "judge"),
    [
        # Rewards differ, but by shaping alone.
        (Grpo(correctness_filter="mixed"), never_correct),
        (Grpo(equal_groups="drop"), constant),
    ],
)
def test_without_a_group_to_train_on_weights_stay(toy, tmp_path, algorithm, judge):
    trainer = toy_run.make_trainer(
        toy, tmp_path, steps=1, algorithm=algorithm, judge=judge, validate=nothing
    )
    before = copy(trainer.params)
    trainer.run(lambda *_: None)
    (record,) = metrics_of(tmp_path)
    assert record["groups/trained"] == 0
    assert not [name for name in record if name.startswith("update/")]
    assert record["groups/equal_share"] == (1.0 if judge is constant else 0.0)
    assert_same_weights(trainer.params, before)


def test_a_step_of_which_no_prompt_fits_is_passed_over(toy, tmp_path):
    lines = []
    trainer = toy_run.make_trainer(
        toy, tmp_path, steps=1, examples=("A" * 30, "B" * 30), validate=nothing
    )
    trainer.run(lambda done, steps, line: lines.append(line))
    (record,) = metrics_of(tmp_path)
    assert record["groups/trained"] == 0
    assert len(lines) == 1


def test_every_example_comes_once_before_any_comes_again():
    steps = [examples_of_step(7, step, per_step=3, seed=5) for step in range(14)]
    flat = [number for step in steps for number in step]
    epochs = [flat[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert steps[9] == examples_of_step(7, 9, per_step=3, seed=5)
    assert flat != [n for s in range(14) for n in examples_of_step(7, s, per_step=3, seed=6)]
    # More a step than there are: it takes from several epochs.
    assert Counter(examples_of_step(2, 0, per_step=6, seed=0)) == {0: 3, 1: 3}


# Where each life of the run ends; checkpoints are due every second step.
KILLS = (
    ("rollout", 2),
    ("checkpoint", 4),
    ("metrics", 5),
    ("update", 6),
    ("progress", 8),
)


def live(folder, cache, *kill):
    """Start the run in a process of its own, and return how it ended."""
    environment = os.environ | {
        "PYTHONPATH": str(HERE.parents[1]),
        # One life compiles for all.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, kill)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_run_killed_at_five_moments_ends_as_if_it_never_had_been(toy, finished, tmp_path):
    folder, cache = tmp_path / "run", tmp_path / "cache"
    for moment, step in KILLS:
        code, errors = live(folder, cache, moment, step)
        assert code == -signal.SIGKILL, (moment, code, errors)
        if moment == "checkpoint":
            names = [path.name for path in (folder / "checkpoints").iterdir()]
            assert "4" not in names
            assert any(name.startswith("4.") for name in names)
        if moment == "metrics":
            assert (folder / "metrics.jsonl").read_text().endswith('{"step": ')
    code, errors = live(folder, cache)
    assert code == 0, errors
    assert without_times(folder) == without_times(finished.folder)
    name = "trajectories.jsonl"
    assert (folder / name).read_bytes() == (finished.folder / name).read_bytes()
    trainer = toy_run.make_trainer(toy, folder)
    assert trainer.step == toy_run.STEPS
    assert_same_weights(trainer.params, finished.weights[toy_run.STEPS])
    assert trainer.use_best() == 4
    assert_same_weights(trainer.params, finished.weights[4])


def test_a_number_of_some_episodes_is_averaged_over_these():
    reply = SimpleNamespace(ids=[1, 2], finish="stop")
    episodes = [{"all": 1.0, "some": 1.0}, {"all": 0.0}, {"all": 0.0, "some": 0.0}, {"all": 1.0}]
    groups = [
        [SimpleNamespace(turns=[SimpleNamespace(reply=reply)], episode=episode)]
        for episode in episodes
    ]
    scores = [[toy_run.Score(1.0, correct)] for correct in (True, False, False, False)]
    trainer = SimpleNamespace(_task=SimpleNamespace(describe=lambda episode: (episode, {})))
    means = Trainer._summarise(trainer, groups, scores)  # ty: ignore[invalid-argument-type]
    assert (means["all"], means["some"], means["rollout/accuracy"]) == (0.5, 0.5, 0.25)
    assert Trainer._summarise(trainer, [], []) == {"groups/equal_share": 0.0}  # ty: ignore[invalid-argument-type]
