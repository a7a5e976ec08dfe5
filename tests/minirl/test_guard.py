"""Updates that would harm the weights are skipped, counted, and end the run when there are many."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from minirl.config import GuardConfig
from minirl.exchange import UserError
from minirl.train.optimizer import guarded, norm_limit
from tests.plain_model import arrays, assert_same

from . import toy_run
from .mesh_update import batches, start

CONFIG = GuardConfig(max_spike=4.0, window=3, max_skipped=2)
LEAST = 0.5


def after(norms, config=CONFIG):
    """Return the state after updates with gradients of these norms."""
    rule = guarded(optax.sgd(1.0), config, least=LEAST)
    state = rule.init(jnp.zeros(1))
    for norm in norms:
        _, state = rule.update(jnp.array([norm]), state, value=jnp.array(0.1))
    return state


@pytest.mark.parametrize(
    ("norms", "limit", "skipped"),
    [
        ([], math.inf, 0),
        ([1.0, 2.0], math.inf, 0),
        ([1.0, 9.0, 2.0], 8.0, 0),
        # The oldest is forgotten.
        ([9.0, 9.0, 1.0, 2.0, 3.0], 8.0, 0),
        # Below the norm that gradients are scaled down to, none is a spike.
        ([0.0, 0.0, 0.1], 2.0, 0),
        # What is skipped does not count for the median; skips in a row are counted.
        ([1.0, 9.0, 2.0, 8.5, math.nan], 8.0, 2),
        ([1.0, math.nan, 1.0], math.inf, 0),
    ],
)
def test_the_limit_is_a_multiple_of_the_median_and_skips_in_a_row_are_counted(
    norms, limit, skipped
):
    state = after(norms)
    assert norm_limit(state, CONFIG, least=LEAST) == limit
    assert int(state.skipped) == skipped
    endless = CONFIG.model_copy(update={"max_spike": None})
    assert norm_limit(state, endless, least=LEAST) == math.inf


def test_what_is_skipped_leaves_weights_and_optimizer_as_they_were(toy):
    learner, state = start(toy, None, guard=GuardConfig(window=1, max_spike=1e-3))
    # Of the first gradient nothing is known that it could be compared with.
    state, first, _ = learner.update(state, batches(), rate=1e-2)
    assert first["skipped"] == 0
    before = jax.tree.map(np.asarray, state)
    (batch,) = batches()
    spoilt = batch._replace(advantage_BC=np.where(batch.is_action_BC, math.nan, 0.0))
    for number, part in enumerate((spoilt, batch), start=1):
        state, found, _ = learner.update(state, [part], rate=1e-2)
        assert found["skipped"] == 1
        assert int(state.opt_state.skipped) == number
        assert_same(state.params, before.params)
        assert_same(state.opt_state.inner.inner_state, before.opt_state.inner.inner_state)
    learner, _ = start(toy, None, guard=GuardConfig(window=1, max_spike=None))
    state, found, _ = learner.update(state, [batch], rate=1e-2)
    assert found["skipped"] == 0
    assert any(
        (array != arrays(before.params)[name]).any() for name, array in arrays(state.params).items()
    )


def test_a_run_passes_over_a_bad_step_and_stops_after_several(toy, tmp_path):
    trainers = []

    def judge(episode):
        score = toy_run.score(episode)
        is_bad = trainers[0].steps_done + 1 in (2, 4, 5)
        return toy_run.scored(math.nan, False) if is_bad else score

    trainers.append(
        toy_run.make_trainer(
            toy, tmp_path, judge=judge, validate=lambda *_: 0.0, guard=GuardConfig(max_skipped=2)
        )
    )
    with pytest.raises(UserError, match="step 5: 2 updates") as stop:
        trainers[0].run(lambda *_: None)
    assert str(tmp_path / "skipped.npz") in str(stop.value)
    records = toy_run.metrics_of(tmp_path)
    assert [record["update/skipped"] for record in records] == [0, 1, 0, 1]
    assert records[1]["update/loss"] is None
    with np.load(tmp_path / "skipped.npz") as saved:
        sizes = {saved[key].shape for key in ("group", "row", "ids", "logprobs", "advantage")}
        assert len(sizes) == 1
        assert np.isnan(saved["advantage"][saved["is_action"]]).all()
        assert set(saved["row"]) == set(range(32))
    # Nothing of the bad steps is in the weights.
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainers[0].params))
