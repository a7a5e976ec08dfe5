"""The update's gradient, against an objective and an attention written out plainly."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from minirl.config import BatchingConfig, Grpo, Gspo
from minirl.train import batching, update
from minirl.train.batching import MicroBatches
from minirl.train.losses import policy_loss
from minirl.train.update import Learner, batch_loss
from minirl.types import TokenRow
from tests.plain_model import plain_attention, plain_recurrence

VOCAB = 64
TEMPERATURE = 0.8
RATE = 1024.0
G = 3
ALGORITHMS = {"grpo": Grpo(kl_coef=0.3), "gspo": Gspo(kl_coef=0.3)}
# Log-ratios around the bounds log(.8) = -.22 and log(1.2) = .18, none near one.
LOG_RATIOS = (-0.5, -0.1, 0.0, 0.1, 0.4)
# Prompt lengths, and lengths of the turns of each row: sampled, observed, sampled, ...
GROUPS = (
    (6, ((4,), (9,), (3, 4, 5))),
    (1, ((5, 3, 2), (1,), (6,))),
    (11, ((2, 2, 3, 1, 4), (7, 1, 1), (13,))),
)
# Ids after the prompt that all rows of a group begin with.
COMMON = (0, 1, 2)
SIZES = BatchingConfig(micro_batch_tokens=200, prompt_multiple=12, answer_multiple=20)


def plain_logprobs(model, ids_BT):
    """Return log-probabilities of ids 1, 2, ... of rows that hold prompt and answer."""
    positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1])[None], ids_BT.shape)
    hidden_BTD, _ = model(ids_BT, positions_BT, plain_attention, recur=plain_recurrence)
    logp_BTV = jax.nn.log_softmax(model.logits(hidden_BTD[:, :-1]) / TEMPERATURE)
    return jnp.take_along_axis(logp_BTV, ids_BT[:, 1:, None], axis=-1)[..., 0]


def plain_loss(algorithm, logp, reference_logp, rows):
    """Write the objective out, row by row: the mean over rows of means over tokens."""
    total = 0.0
    for b, row in enumerate(rows):
        actions = np.flatnonzero(row.is_action)
        new, old = logp[b, actions - 1], jnp.asarray(row.old_logprobs[actions])
        ratio = jnp.exp(new - old)
        if algorithm.ratio_level == "sequence":
            ratio = jnp.exp(jnp.mean(new - old)) * jnp.ones_like(new)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        objective = jnp.minimum(ratio * row.advantage, clipped * row.advantage)
        gap = reference_logp[b, actions - 1] - new
        objective -= algorithm.kl_coef * (jnp.exp(gap) - gap - 1)
        total -= jnp.mean(objective)
    return total / len(rows)


def row_ids(rng, prompt, turns):
    """Return ids and mask of a row whose turns have these lengths."""
    ids, is_action = list(prompt), [False] * len(prompt)
    for number, length in enumerate(turns):
        ids += rng.integers(4, 60, length).tolist()
        is_action += [number % 2 == 0] * length
    return ids, is_action


class Scene:
    """A policy, a reference, and the compiled functions of this file."""

    def __init__(self, make_model):
        self.model = make_model()
        self.graph, self.params = nnx.split(self.model)
        self.reference = nnx.split(make_model(seed=5))[1]
        self.plain_logprobs = jax.jit(
            lambda params, ids_BT: plain_logprobs(nnx.merge(self.graph, params), ids_BT)
        )
        self.plain_pull_back = jax.jit(self._plain_pull_back)
        self.gradients = {
            name: jax.jit(jax.value_and_grad(self._loss(name), has_aux=True)) for name in ALGORITHMS
        }

    def _plain_pull_back(self, params, ids_BT, slope_BT):
        def total(params):
            return jnp.sum(plain_logprobs(nnx.merge(self.graph, params), ids_BT) * slope_BT)

        return jax.grad(total)(params)

    def _loss(self, name):
        settings: dict[str, Any] = {"function": loss_of(name), "temperature": TEMPERATURE}

        def loss(params, batch):
            reference = nnx.merge(self.graph, self.reference)
            logp_BC, *_ = update.token_logprobs(reference, batch, temperature=TEMPERATURE)
            return batch_loss(params, nnx.State({}), batch, logp_BC, graph=self.graph, **settings)

        return loss

    def loss_and_gradient(self, name, batch):
        (loss, stats), gradient = self.gradients[name](self.params, batch)
        stats.pop("logprobs")
        return float(loss), {key: float(value) for key, value in stats.items()}, gradient


def loss_of(name):
    return partial(policy_loss, ALGORITHMS[name])


def learner_of(scene):
    return Learner(scene.model, loss_of("grpo"), optax.sgd(1.0), temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def scene(toy):
    return Scene(toy.model)


def stack(rows):
    ids_BT = np.zeros((len(rows), max(len(row.ids) for row in rows)), np.int32)
    for b, row in enumerate(rows):
        ids_BT[b, : len(row.ids)] = row.ids
    return ids_BT


@pytest.fixture(scope="module")
def groups(scene):
    return make_groups(scene)


def make_groups(scene):
    """Make groups of single- and multi-turn rows, sampled by an old policy at known log-ratios."""
    rng = np.random.default_rng(3)
    groups = []
    for prompt_length, turns_of_rows in GROUPS:
        prompt = rng.integers(4, 60, prompt_length).tolist()
        common = rng.integers(4, 60, COMMON[len(groups)]).tolist()
        group = []
        for turns in turns_of_rows:
            ids, is_action = row_ids(rng, prompt, turns)
            ids[prompt_length : prompt_length + len(common)] = common
            # Of both signs, but not so that the loss all but cancels: rounding would drown it.
            advantage = float(rng.choice([-0.8, 0.7, 1.6]))
            empty = np.zeros(len(ids), np.float32)
            numbers = (np.array(is_action), empty, advantage, prompt_length)
            row = TokenRow(np.array(ids), *numbers, old_logprobs=empty)
            group.append(row)
        groups.append(group)
    rows = [row for group in groups for row in group]
    logp_BT = np.asarray(scene.plain_logprobs(scene.params, stack(rows)))
    for b, row in enumerate(rows):
        actions = np.flatnonzero(row.is_action)
        # One ratio a row for GSPO's mean, spread a little for GRPO's tokens.
        log_ratios = LOG_RATIOS[b % 5] + 0.03 * rng.choice([-1, 1], len(actions))
        row.logprobs[actions] = logp_BT[b, actions - 1] - log_ratios
    return groups


def batches_of(groups, *, sizes=SIZES, aggregation="sequence_mean", pad_id=0):
    return MicroBatches(groups, aggregation=aggregation, sizes=sizes, pad_id=pad_id)


def assert_close(tree, other, *, rtol=5e-5):
    """Compare trees, with a tolerance relative to each leaf's largest number."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        twin = dict(jax.tree.leaves_with_path(other))[path]
        scale = np.abs(np.asarray(twin)).max()
        np.testing.assert_allclose(
            leaf, twin, rtol=0, atol=rtol * scale + 1e-9, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_shared_prompts_equal_rows_of_their_own(scene, groups, name):
    rows = [row for group in groups for row in group]
    algorithm = ALGORITHMS[name]
    ids_BT = stack(rows)
    logp_BT = scene.plain_logprobs(scene.params, ids_BT)
    reference_logp_BT = scene.plain_logprobs(scene.reference, ids_BT)
    expected, slope_BT = jax.value_and_grad(
        lambda logp_BT: plain_loss(algorithm, logp_BT, reference_logp_BT, rows)
    )(logp_BT)
    (batch,) = batches_of(groups)
    loss, _, gradient = scene.loss_and_gradient(name, batch)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert_close(gradient, scene.plain_pull_back(scene.params, ids_BT, slope_BT))


def test_what_is_computed_again_does_not_change_the_gradient(scene, groups):
    (batch,) = batches_of(groups)
    settings: dict[str, Any] = {"function": loss_of("grpo"), "temperature": TEMPERATURE}

    def gradient(kind):
        def loss(params):
            model = nnx.merge(scene.graph, params)
            model.remat = kind
            arguments = (nnx.state(model), nnx.State({}), batch, batch.sampler_logp_BC)
            return batch_loss(*arguments, graph=nnx.graphdef(model), **settings)[0]

        return jax.jit(jax.grad(loss))(scene.params)

    expected = gradient("none")
    for remat in ("dots", "full"):
        apart = jax.tree.map(jnp.subtract, gradient(remat), expected)
        assert optax.tree.norm(apart) < 1e-5 * optax.tree.norm(expected)


def test_parts_of_a_group_add_up(scene, groups, monkeypatch):
    (whole,) = batches_of(groups)
    _, _, expected = scene.loss_and_gradient("grpo", whole)
    # Each row is computed alone, in a list of one length: one program serves all.
    monkeypatch.setattr(batching, "_LIST_LENGTHS", 1)
    sizes = SIZES.model_copy(update={"micro_batch_tokens": 24})
    parts = list(batches := batches_of(groups, sizes=sizes))
    assert len(parts) == 3 * len(groups)
    found = [scene.loss_and_gradient("grpo", part)[2] for part in parts]
    assert_close(jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *found), expected)
    back = batches.read_back(part.sampler_logp_BC for part in parts)
    for group, rows in zip(groups, back, strict=True):
        for row, values in zip(group, rows, strict=True):
            np.testing.assert_array_equal(values, row.logprobs)


def test_a_signal_in_the_middle_of_an_update_is_noticed_there(scene, groups):
    """Not after all micro-batches were ordered: all but the last two are done when it is asked."""
    batches = [*batches_of(groups, aggregation="token_mean")] * 4
    learner, waited = learner_of(scene), []
    learner._lanes = lambda params: 1
    state = learner.init(jax.tree.map(jnp.copy, scene.params))
    ready = jax.block_until_ready
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "block_until_ready", lambda x: (waited.append(x), ready(x))[1])
        counts = []
        learner.update(
            state, batches, rate=1e-2,
            check=lambda: counts.append(sum(len(x) for x in waited if isinstance(x, list))),
        )  # fmt: skip
    assert counts == [max(0, n - 1) for n in range(4)]


def test_micro_batches_add_up_to_the_gradient_of_one_batch(scene, groups):
    (batch,) = batches_of(groups, aggregation="token_mean")
    _, stats, whole = scene.loss_and_gradient("grpo", batch)
    smaller = SIZES.model_copy(update={"micro_batch_tokens": 80})
    batches = [*batches_of(groups, sizes=smaller, aggregation="token_mean")]
    assert len(batches) == 2
    # A learner whose step is the gradient itself, times a rate that drowns rounding.
    learner = learner_of(scene)
    state = learner.init(jax.tree.map(jnp.copy, scene.params))
    state, stats_of_parts, _ = learner.update(state, batches, reference=scene.reference, rate=RATE)
    parts = jax.tree.map(
        lambda old, new: (np.asarray(old) - np.asarray(new)) / RATE, scene.params, state.params
    )
    assert_close(parts, whole)
    assert (stats_of_parts.pop("skipped"), stats_of_parts.pop("learning_rate")) == (0, RATE)
    assert stats_of_parts.pop("grad_norm") == pytest.approx(float(optax.tree.norm(whole)), rel=1e-4)
    assert stats_of_parts == pytest.approx(stats, rel=1e-4)


def test_programs_of_the_shapes_of_latest_use_are_kept(scene, groups, monkeypatch):
    """On a CPU each takes up to thousands of memory maps, of which a process has few."""
    monkeypatch.setattr(update, "_KEPT_SHAPES", 2)
    of_shape = [
        list(batches_of(groups, sizes=SIZES.model_copy(update={"answer_multiple": multiple})))
        for multiple in (20, 24, 28)
    ]
    learner = learner_of(scene)
    learner._lanes = lambda params: 1

    def programs_and_loss(batches):
        state = learner.init(jax.tree.map(jnp.copy, scene.params))
        loss = learner.update(state, batches, rate=1e-2)[1]["loss"]
        return learner.programs, loss

    first, loss = programs_and_loss(of_shape[0])
    found = [programs_and_loss(of_shape[number]) for number in (0, 1, 0, 2, 0, 1)]
    assert [programs - first for programs, _ in found] == [0, 1, 1, 2, 2, 3]
    assert [one for _, one in found] == pytest.approx([loss] * 6)
    assert len(learner._accumulate._kept) == 2
