"""Every preset against its formulas written out plainly, and its gradient against slopes."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minirl.config import AlgorithmConfig, BatchingConfig, Grpo, Gspo
from minirl.train import losses
from minirl.train.advantages import SpanCredit, token_advantages
from minirl.train.batching import MicroBatches
from minirl.types import TokenRow

from .plain_objectives import CASES, LONGEST, G, N, Row


class Scene:
    """A random batch, once as the package's rows and once as plain numbers."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rows, self.spans, self.reference, self.new = [], [], [], []
        for b in range(N * G):
            prompt = 2 + b // G
            own = int(rng.integers(3, LONGEST + 1))
            is_action = np.concatenate([np.zeros(prompt, bool), rng.random(own) < 0.8])
            is_action[prompt] = True
            old = np.where(is_action, -rng.random(prompt + own) * 2 - 0.6, 0).astype(np.float32)
            noise = lambda size, like=old: (like + rng.normal(0, size, len(like))).astype("f4")  # noqa: E731
            ids, sampler = np.arange(prompt + own), np.where(is_action, noise(0.2), 0)
            self.rows.append(TokenRow(ids, is_action, sampler, 0.0, prompt, old_logprobs=old))
            is_covered = rng.random(prompt + own) < 0.7
            self.spans.append(SpanCredit(rng.choice([-1.5, -0.5, 0.5], prompt + own), is_covered))
            self.reference.append(noise(0.4))
            self.new.append(noise(0.3))
        self.rewards = rng.choice([0.0, 0.5, 1.5, 2.75], (N, G)) + rng.normal(0, 0.1, (N, G))

    @property
    def groups(self):
        return [self.rows[n * G : n * G + G] for n in range(N)]

    @property
    def lengths(self):
        return np.array([len(row.ids) - row.prompt_length for row in self.rows]).reshape(N, G)

    def plain_rows(self, *, is_only_update):
        rows = []
        for b, row in enumerate(self.rows):
            old = self.new[b] if is_only_update else row.old_logprobs
            numbers = (self.new[b], old, row.logprobs, self.reference[b], self.spans[b].value)
            each = (values[row.is_action].astype(np.float64) for values in numbers)
            reward, length = float(self.rewards.flat[b]), int(self.lengths.flat[b])
            covered = self.spans[b].is_covered[row.is_action]
            rows.append(Row(*each, covered, reward, length))
        return rows

    def laid_out(self, values, algorithm):
        """Lay numbers of the ids out as a micro-batch does."""
        rows = [replace(r, logprobs=v) for r, v in zip(self.rows, values, strict=True)]
        groups = [rows[n * G : n * G + G] for n in range(N)]
        return batch_of(groups, algorithm).sampler_logp_BC


def batch_of(groups, algorithm):
    sizes = BatchingConfig(prompt_multiple=4, answer_multiple=4)
    divisor = algorithm.aggregation_divisor or LONGEST
    (batch,) = MicroBatches(
        groups, aggregation=algorithm.aggregation, sizes=sizes, pad_id=0, divisor=divisor
    )
    return batch


def batch_with_advantages(scene, algorithm: AlgorithmConfig, *, on_clauses: bool):
    """Do what a step of training does between scores and the loss."""
    kl = None
    if algorithm.kl_coef > 0 and algorithm.kl_in != "loss":
        kl = [
            losses.kl_divergence(row.logprobs, ref, estimator=algorithm.kl_estimator)
            for row, ref in zip(scene.rows, scene.reference, strict=True)
        ]
    spans = scene.spans if on_clauses else None
    found = token_advantages(scene.rows, scene.rewards, algorithm, spans=spans, kl=kl)
    rows = [replace(row, advantage=a) for row, a in zip(scene.rows, found, strict=True)]
    return batch_of([rows[n * G : n * G + G] for n in range(N)], algorithm)


def loss_function(scene, name, *, is_only_update):
    """Return the package's loss as a function of the log-probabilities, and where it is asked."""
    algorithm, _ = CASES[name]
    on_clauses = "expo" in name
    batch = jax.tree.map(
        lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x,
        batch_with_advantages(scene, algorithm, on_clauses=on_clauses),
    )
    if is_only_update:
        batch = batch._replace(old_logp_BC=None)
    reference = scene.laid_out(scene.reference, algorithm).astype(jnp.float64)
    logp = scene.laid_out(scene.new, algorithm).astype(jnp.float64)
    return jax.jit(lambda x: losses.policy_loss(algorithm, x, reference, batch, x)[0]), logp, batch


@pytest.mark.parametrize("is_only_update", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_plain_formula(name, is_only_update):
    """In the only update of a step the ratio is 1, of tokens and of sequences."""
    _, plain = CASES[name]
    scene = Scene(7)
    rows = scene.plain_rows(is_only_update=is_only_update)
    with jax.enable_x64(True):
        loss, logp, batch = loss_function(scene, name, is_only_update=is_only_update)
        found, gradient_BC = jax.value_and_grad(loss)(logp)
        # Weights and advantages have been float32 before.
        assert float(found) == pytest.approx(plain(rows, rows), rel=2e-6, abs=2e-6)
        gradient_BC, is_action_BC = np.asarray(gradient_BC), np.asarray(batch.is_action_BC)
    assert (gradient_BC[~is_action_BC] == 0).all()
    slopes, step = [], 1e-6
    for b in in_batch_order(scene):
        for t in range(len(rows[b].new)):

            def moved(by, b=b, t=t):
                new = rows[b].new.copy()
                new[t] += by
                return plain([*rows[:b], replace(rows[b], new=new), *rows[b + 1 :]], rows)

            slopes.append((moved(step) - moved(-step)) / (2 * step))
    assert np.ptp(slopes) > 0.01
    np.testing.assert_allclose(gradient_BC[is_action_BC], slopes, rtol=1e-5, atol=1e-7)


def in_batch_order(scene):
    """Return the rows' numbers in the order of a micro-batch."""
    numbers = [np.full(len(row.ids), b, np.float32) for b, row in enumerate(scene.rows)]
    return scene.laid_out(numbers, Grpo())[:, 0].astype(int).tolist()


@pytest.mark.parametrize("tokens", ["auto", 60, 30])
def test_numbers_of_targets_are_read_back_to_their_rows(tokens):
    scene = Scene(5)
    sizes = BatchingConfig(micro_batch_tokens=tokens, prompt_multiple=4, answer_multiple=4)
    batches = MicroBatches(scene.groups, aggregation="token_mean", sizes=sizes, pad_id=0)
    found = batches.read_back(batch.sampler_logp_BC for batch in batches)
    for row, values in zip(scene.rows, [v for group in found for v in group], strict=True):
        np.testing.assert_array_equal(values, row.logprobs)


def test_the_only_update_of_a_step_clips_no_rounding():
    """GSPO's own bounds are narrower than what kernels of bfloat16 differ by."""
    scene = Scene(11)
    rng = np.random.default_rng(0)
    rounded = [row.logprobs + rng.normal(0, 0.008, len(row.ids)) for row in scene.rows]
    scene.new = [values.astype("f4") for values in rounded]
    for kind in (Grpo, Gspo):
        algorithm = kind(clip_low=3e-4, clip_high=4e-4)
        batch = batch_with_advantages(scene, algorithm, on_clauses=False)
        logp = jnp.asarray(scene.laid_out(scene.new, algorithm))
        of_sampler = batch._replace(old_logp_BC=batch.sampler_logp_BC)
        shares = []
        for one in (of_sampler, batch._replace(old_logp_BC=None)):
            _, stats = losses.policy_loss(algorithm, logp, logp, one, logp)
            shares.append(float(stats["clip_fraction"] / stats["weight"]))
            correction = float(stats["correction_mean"] / stats["weight"])
        assert shares[0] > 0.3
        assert shares[1] == 0
        assert 0 < abs(correction - 1) < 0.008
