"""The update's gradient, against an objective and an attention written out plainly."""

import copy
import functools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from minirl.config import BatchingConfig, OptimizerConfig
from minirl.model import logprobs
from minirl.model.decoder import Decoder
from minirl.model.lora import described
from minirl.model.sharding import MATRICES, device_bytes, param_path
from minirl.run import distributed
from minirl.sample.decode import sample
from minirl.train import batching, update
from minirl.train.batching import MicroBatches
from minirl.train.optimizer import learning_rate, make_optimizer
from minirl.train.update import Learner
from tests.plain_model import assert_near, logits
from tests.vectors import read

from . import toy
from .toy import gradient_of, make_groups

TEMPERATURE = 0.8
# Prompt lengths, and lengths of the turns of each row: sampled, observed, sampled, ...
GROUPS = (
    (6, ((4,), (9,), (3, 4, 5))),
    (1, ((5, 3, 2), (1,), (6,))),
    (11, ((2, 2, 3, 1, 4), (7, 1, 1), (13,))),
)
# Over the borders of linear attention's chunks of 64 tokens, and far within them.
LONG_GROUPS = (
    (70, ((66,), (3,), (20, 5, 40))),
    (130, ((64,), (1,), (70,))),
    (1, ((5, 3, 2), (2,), (6,))),
)
SIZES = BatchingConfig(micro_batch_tokens=1000, prompt_multiple=12, answer_multiple=20)


def weighted(logp_BC, reference_logp_BC, batch, _):
    """Weigh each token otherwise; `test_objective.py` has the objectives.

    What stands for the reference's log-probabilities are the sampler's, which rows have: a learner
    without a reference hands on these.
    """
    gap_BC = batch.weight_BC * batch.advantage_BC * (logp_BC - reference_logp_BC)
    return gap_BC.sum(), {"weight": batch.weight_BC.sum()}


def plain_loss(params, graph, rows):
    """Write the loss out, row by row: the mean over rows of means over tokens."""
    longest = max(len(row.ids) for row in rows)
    ids_BT = np.stack([np.pad(row.ids, (0, longest - len(row.ids))) for row in rows])
    logits_BTV, total = logits(nnx.merge(graph, params), ids_BT), 0.0
    logp_BTV = jax.nn.log_softmax(logits_BTV / TEMPERATURE)
    for b, row in enumerate(rows):
        actions = np.flatnonzero(row.is_action)
        gap = logp_BTV[b, actions - 1, row.ids[actions]] - row.logprobs[actions]
        total += jnp.mean(row.advantage[actions] * gap)
    return total / len(rows)


@functools.cache
def learner_of(*, hybrid=False, remat="dots"):
    """Return a learner whose step is the gradient itself, times the rate."""
    model = toy.model(hybrid=hybrid)
    model.remat = remat
    return Learner(model, weighted, optax.sgd(1.0), temperature=TEMPERATURE)


def norm(tree):
    """Return the norm of all numbers of a tree, by NumPy, which compiles nothing."""
    return math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(tree)))


def batches_of(groups, sizes=SIZES):
    return MicroBatches(groups, aggregation="sequence_mean", sizes=sizes, pad_id=0)


# Of full attention alone, and of linear attention too; later tests have one, with all layers.
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(
    ("hybrid", "remat", "lengths"), [(False, "dots", GROUPS), (True, "none", LONG_GROUPS)]
)
def test_shared_prompts_equal_rows_of_their_own(hybrid, remat, lengths):
    graph, params = nnx.split(toy.model(hybrid=hybrid))
    groups = make_groups(lengths)
    plain = partial(plain_loss, graph=graph, rows=[row for group in groups for row in group])
    expected = jax.jit(jax.value_and_grad(plain))(params)
    found, gradient = gradient_of(
        learner_of(hybrid=hybrid, remat=remat), params, batches_of(groups)
    )
    assert found["loss"] == pytest.approx(float(expected[0]), rel=1e-5)
    assert_near(gradient, expected[1], rtol=5e-5)


def test_a_signal_in_the_middle_of_an_update_is_noticed_there():
    """Not after all micro-batches were ordered: all but the last two are done when it is asked."""
    batches = [*batches_of(make_groups(GROUPS))] * 4
    learner, waited, counts = copy.copy(learner_of()), [], []
    learner._lanes = lambda params: 1
    ready = jax.block_until_ready

    def check():
        counts.append(sum(len(x) for x in waited if isinstance(x, list)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "block_until_ready", lambda x: (waited.append(x), ready(x))[1])
        patch.setattr(distributed, "check", check)
        gradient_of(learner, nnx.state(toy.model()), batches)
    assert counts == [max(0, n - 1) for n in range(4)]


@pytest.mark.usefixtures("loops")
def test_micro_batches_add_up_to_the_gradient_of_one_batch(monkeypatch):
    params, reference = (nnx.state(toy.model(hybrid=True, seed=seed)) for seed in (0, 5))
    groups, learner = make_groups(LONG_GROUPS), learner_of(hybrid=True, remat="none")
    (batch,) = batches_of(groups)
    (known,) = learner.logprobs(reference, [batch])
    stats, whole = gradient_of(learner, params, [batch._replace(sampler_logp_BC=known)])
    # Each row is computed alone, among as many cells: one program serves all.
    monkeypatch.setattr(batching, "_LIST_LENGTHS", 1)
    small = BatchingConfig(micro_batch_tokens=216, prompt_multiple=240, answer_multiple=120)
    alone = [*batches_of(groups, small)]
    assert len(alone) == 3 * len(groups)
    # Nothing of a layer is kept.
    found, parts = gradient_of(
        learner_of(hybrid=True, remat="full"), params, alone, reference=reference
    )
    assert_near(parts, whole, rtol=5e-5)
    assert (found["skipped"], found["learning_rate"]) == (0, toy.RATE)
    assert found["grad_norm"] == pytest.approx(norm(whole), rel=1e-4)
    assert found == pytest.approx(stats, rel=1e-4)


def test_programs_of_the_shapes_of_latest_use_are_kept(monkeypatch):
    """On a CPU each takes up to thousands of memory maps, of which a process has few."""
    monkeypatch.setattr(update, "_KEPT_SHAPES", 2)
    by_shape, counts = update._ByShape(jnp.sum), []
    for length in (1, 1, 2, 1, 3, 1, 2):
        batch: Any = jnp.ones(length)
        assert by_shape(batch)(batch) == length
        counts.append(by_shape._cache_size())
    assert counts == [1, 1, 2, 2, 3, 3, 4]
    assert isinstance(learner_of()._accumulate, update._ByShape)
    assert isinstance(learner_of()._logp, update._ByShape)


# What a model in bfloat16 sums in fp32: logits in learner and sampler, the embedding's gradient.
# Numbers in bfloat16 have eight bits: from 16 to 32 they are .125 apart, from 256 to 512 two apart.


# Of a hidden state of ones the logits are 16.0625, 16 and 16.125; the first would round to 16.
TABLE_VD = [[16.0, 0.0625], [16.0, 0.0], [16.0, 0.125]]
LOGPROBS = np.array([0.0625, 0.0, 0.125]) - math.log(sum(map(math.exp, (0.0625, 0.0, 0.125))))
# Numbers in fp32 are 2e-6 apart from 16 to 32.
ROUNDED = 1e-5


@pytest.fixture(params=[1000, 1])
def at_once(request, monkeypatch):
    """Compute the logits of all tokens at once, or one by one."""
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * 3 * request.param)


def judge(hidden_BCD, table_VD, target_BC):
    is_trained_BC = jnp.ones(target_BC.shape, bool)
    project = functools.partial(logprobs.project, temperature=1.0)
    return jax.jit(project)(hidden_BCD, table_VD, target_BC, is_trained_BC)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32])
def test_logits_of_the_learner(param_dtype):
    hidden_BCD = jnp.ones((1, 3, 2), jnp.bfloat16)
    table_VD = jnp.array(TABLE_VD, param_dtype)
    found, entropy = judge(hidden_BCD, table_VD, jnp.arange(3)[None])
    np.testing.assert_allclose(found[0], LOGPROBS, rtol=ROUNDED)
    np.testing.assert_allclose(entropy[0], -np.sum(np.exp(LOGPROBS) * LOGPROBS), rtol=ROUNDED)


def model_of(**changes):
    """Describe a decoder that computes in bfloat16 on weights in fp32."""
    return described(toy.CONFIG.model_copy(update=changes), dtype=jnp.bfloat16)


def test_logits_of_the_sampler():
    model = model_of(vocab_size=3, hidden_size=2)
    model.unembed = nnx.Param(jnp.array(TABLE_VD))
    logits_SV = jax.jit(lambda: model.logits(jnp.ones((4, 2), jnp.bfloat16)))()
    np.testing.assert_array_equal(logits_SV, [[16.0625, 16.0, 16.125]] * 4)
    ids_S, logprobs_S = sample(
        logits_SV, jax.random.split(jax.random.key(0), 4), jnp.ones(4), jnp.ones(4),
        any_top_p=False,
    )  # fmt: skip
    np.testing.assert_allclose(logprobs_S, LOGPROBS[ids_S], rtol=ROUNDED)


@pytest.mark.usefixtures("at_once")
def test_the_gradient_of_the_output_table():
    """Of two words with equal logits each has half: 257 ones and 1 / 64 give 128.5 and 1 / 128."""
    hidden_BCD = jnp.ones((1, 258, 1), jnp.bfloat16).at[0, 7].set(1 / 64)
    target_BC = jnp.zeros((1, 258), jnp.int32)
    gradient_VD = jax.grad(lambda table_VD: judge(hidden_BCD, table_VD, target_BC)[0].sum())(
        jnp.zeros((2, 1))
    )
    np.testing.assert_array_equal(gradient_VD[:, 0], [128.5 + 1 / 128, -128.5 - 1 / 128])


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_the_embedding(monkeypatch, tied):
    """A token that stands 513 times; tied, the output adds 3 to every word."""
    graph, shapes = nnx.split(model_of(tie_word_embeddings=tied, rms_norm_eps=1.0))
    # Layers are left out, and the last norm hands a gradient on as it is.
    monkeypatch.setattr(Decoder, "_run_layers", lambda _, body, x_BTD, caches: (x_BTD, caches))
    model = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
    model.final_norm[...] += 1.0
    tokens_BT = jnp.full((2, 257), 5).at[1, 256].set(6)

    @nnx.jit
    @nnx.grad
    def gradient(model):
        hidden_BTD, _ = model(tokens_BT, jnp.zeros_like(tokens_BT), None)
        ones_BTD = jnp.ones((1, 3, toy.CONFIG.hidden_size), jnp.bfloat16)
        return hidden_BTD.astype(jnp.float32).sum() + model.logits(ones_BTD).sum()

    found_VD = gradient(model)["embed"][...]
    expected_V = np.array([513.0, 1.0, 0.0]) + (3.0 if tied else 0.0)
    np.testing.assert_array_equal(found_VD[5:8], np.outer(expected_V, np.ones(16)))


# How far each optimizer moves a weight: learning rates, clipping, decay, Muon's rotations.


RAMP = read("schedule")["ramp_cosine"]


def moves_of(config, gradients, *, start=0.0):
    """Return how far an optimizer moves a single weight down at each of these gradients."""
    optimizer, weight, moves = make_optimizer(config), jnp.array(start), []
    state = optimizer.init(weight)
    for gradient in gradients:
        updates: Any = optimizer.update(jnp.array(gradient), state, weight)
        moves.append(-float(config.learning_rate * updates[0]))
        state = updates[1]
    return moves


# A quarter of the rate, then even steps up to all of it; down to a tenth over 5 steps.
RISE = [0.25, 0.4375, 0.625, 0.8125, 1.0, 1.0]
FALL = [0.1 + 0.45 * (1 + math.cos(math.pi * t / 5)) for t in range(5)]


@pytest.mark.parametrize(
    ("settings", "steps", "shares"),
    [
        ({"warmup_steps": 4}, 6, dict(enumerate(RISE))),
        ({"warmup_steps": 4, "schedule": "cosine"}, 9, dict(enumerate([*RISE[:4], *FALL]))),
        # PaVeRL-SQL's, which stays low beyond the end.
        (
            {"schedule": "ramp_cosine", "final_fraction": RAMP["final_fraction"]},
            RAMP["steps"],
            RAMP["shares"] | {2000: 0.01},
        ),
    ],
)
def test_shares_of_the_learning_rate(settings, steps, shares):
    rate = learning_rate(OptimizerConfig(learning_rate=1e-5, **settings), steps=steps)
    found = jax.jit(rate)(jnp.array([*map(int, shares)])) / 1e-5
    np.testing.assert_allclose(found, [*shares.values()], rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped_to_the_norm_and_weights_decay_apart_from_them():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.0, max_grad_norm=2.0)
    clipped = moves_of(config, [1.0, 100.0, -50.0])
    np.testing.assert_allclose(clipped, moves_of(config, [1.0, 2.0, -2.0]), rtol=1e-5)
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.1)
    # The rate, and a tenth of the weight 2 times the rate.
    np.testing.assert_allclose(moves_of(config, [3.0], start=2.0), [0.5 + 0.1], rtol=1e-4)


def test_muon_turns_the_gradients_of_matrices_into_rotations():
    config = OptimizerConfig(kind="muon", weight_decay=0.0, max_grad_norm=1e9)
    params = nnx.split(toy.model())[1]
    rng = np.random.default_rng(0)
    gradient = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    optimizer = make_optimizer(config)
    updates, _ = jax.jit(optimizer.update)(gradient, jax.jit(optimizer.init)(params), params)
    # The steps are .2 x rate, here 1, in root mean square.
    for path, update_leaf in jax.tree.leaves_with_path(updates):
        name = param_path(path).rpartition(".")[2]
        moved = np.asarray(update_leaf)
        if name in MATRICES:
            scale = 0.2 * max(moved.shape[1:]) ** 0.5
            values = np.linalg.svd(moved / scale)[1]
            # A random gradient has values near 0 and near 2.
            assert 0.3 < values.min() <= values.max() < 1.3, name
        else:  # Adam's first step has one size, whatever the gradient.
            np.testing.assert_allclose(np.abs(moved), np.abs(moved).max(), rtol=1e-3)


def test_muons_first_moments_take_half_in_bfloat16():
    """Of all weights; those that are no matrices have a second one. AdamW's: `test_plan.py`."""
    params = {"layers": {"q": jnp.zeros((2, 16, 8))}, "embed": jnp.zeros((16, 8))}
    whole, less = (
        device_bytes(jax.eval_shape(make_optimizer(config).init, params))
        for config in (
            OptimizerConfig(kind="muon"),
            OptimizerConfig(kind="muon", moments="bfloat16"),
        )
    )
    assert whole == pytest.approx(4 * (256 + 2 * 128), abs=64)
    assert whole - less == 2 * (256 + 128)
