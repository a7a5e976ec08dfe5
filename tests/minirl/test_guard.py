"""Updates that would harm the weights are skipped, counted, and end the run when there are many."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
from minirl.train.guard import Guard, GuardFacts

from minirl.config import GuardConfig
from minirl.errors import UserError

from . import toy_run
from .test_mesh import batches, make_groups, numbers_of, start


def make_guard(tmp_path, **settings):
    config = GuardConfig(**{"max_spike": 4.0, "window": 3, "max_skipped": 2, **settings})
    return Guard(config, max_grad_norm=0.5, folder=tmp_path, key="train.guard")


def stats(norm, *, skipped=0.0):
    return {"loss": 0.1, "grad_norm": norm, "skipped": skipped}


@pytest.mark.parametrize(
    ("norms", "limit"),
    [
        ([], math.inf),
        ([1.0, 2.0], math.inf),
        ([1.0, 9.0, 2.0], 8.0),
        # The oldest is forgotten.
        ([9.0, 9.0, 1.0, 2.0, 3.0], 8.0),
        # Below the norm that gradients are scaled down to, none is a spike.
        ([0.0, 0.0, 0.1], 2.0),
    ],
)
def test_the_limit_is_a_multiple_of_the_median(tmp_path, norms, limit):
    guard = make_guard(tmp_path)
    for norm in norms:
        guard.note(stats(norm), [], step=1)
    assert guard.limit == limit
    again = make_guard(tmp_path)
    again.restart(GuardFacts.model_validate(json.loads(json.dumps(guard.facts))))
    assert (again.limit, again.facts) == (guard.limit, guard.facts)


def test_without_max_spike_no_gradient_is_too_large(tmp_path):
    guard = make_guard(tmp_path, max_spike=None)
    for _ in range(5):
        guard.note(stats(1.0), [], step=1)
    assert guard.limit == math.inf


def test_only_skips_in_a_row_end_a_run_and_leave_the_batch(tmp_path):
    guard, groups = make_guard(tmp_path), make_groups()
    for _ in range(3):
        guard.note(stats(math.nan, skipped=1.0), groups, step=1)
        guard.note(stats(1.0), groups, step=2)
    guard.note(stats(math.nan, skipped=1.0), groups, step=3)
    resumed = make_guard(tmp_path)
    resumed.restart(GuardFacts.model_validate(guard.facts))
    assert not (tmp_path / "skipped.npz").exists()
    with pytest.raises(UserError, match="step 4: 2 updates in a row were skipped") as info:
        resumed.note(stats(99.0, skipped=1.0), groups, step=4)
    assert "\n" not in str(info.value)
    assert "norm 99, the largest allowed 4." in str(info.value)
    assert str(tmp_path / "skipped.npz") in str(info.value)
    with np.load(tmp_path / "skipped.npz") as saved:
        row = groups[1][2]
        number = int(np.flatnonzero(saved["group"] == 1)[2])
        part = slice(saved["start"][number], saved["start"][number] + len(row.ids))
        np.testing.assert_array_equal(saved["ids"][part], row.ids)
        np.testing.assert_allclose(saved["logprobs"][part], row.logprobs)
        np.testing.assert_allclose(saved["advantage"][part], row.advantage, rtol=1e-6)


@pytest.mark.parametrize("mesh", [None, {"fsdp": 2}], ids=str)
def test_what_is_skipped_leaves_weights_and_optimizer_as_they_were(toy, mesh):
    learner, state = start(toy, mesh)
    state, first = learner.update(state, batches())
    assert first["skipped"] == 0
    before = jax.tree.map(np.asarray, state)
    (batch,) = batches()
    spoilt = batch._replace(advantage_BC=batch.advantage_BC.at[0, 0].set(math.nan))
    for parts, limit in (([spoilt], math.inf), ([batch], first["grad_norm"] / 1e3)):
        state, found = learner.update(state, parts, max_norm=limit)
        assert found["skipped"] == 1
        for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    state, found = learner.update(state, [batch], max_norm=math.inf)
    assert found["skipped"] == 0
    assert any(
        (array != numbers_of(before)[name]).any() for name, array in numbers_of(state).items()
    )


def test_a_run_passes_over_a_bad_step_and_stops_after_several(toy, tmp_path):
    trainers = []

    def judge(episode):
        score = toy_run.score(episode)
        is_bad = trainers[0].steps_done + 1 in (2, 4, 5)
        return toy_run.Score(math.nan, False) if is_bad else score

    trainers.append(
        toy_run.make_trainer(
            toy, tmp_path, judge=judge, validate=lambda *_: 0.0, guard=GuardConfig(max_skipped=2)
        )
    )
    with pytest.raises(UserError, match=r"step 5: 2 updates in a row were skipped; .* loss is nan"):
        trainers[0].run(lambda *_: None)
    records = toy_run.metrics_of(tmp_path)
    assert [record["update/skipped"] for record in records] == [0, 1, 0, 1]
    assert records[1]["update/loss"] is None
    with np.load(tmp_path / "skipped.npz") as saved:
        assert np.isnan(saved["advantage"]).any()
    # Nothing of the bad steps is in the weights.
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainers[0].params))
