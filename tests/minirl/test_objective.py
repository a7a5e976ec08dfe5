"""The objective on the papers' figures, presets against plain formulas, credit of characters."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.config import BatchingConfig
from minirl.config.algorithms import AlgorithmConfig
from minirl.exchange import CreditSpan
from minirl.train import losses
from minirl.train.advantages import (
    SpanCredit,
    character_ranges,
    group_normalised,
    groups_to_train,
    span_credit,
    token_advantages,
    whiten,
)
from minirl.train.batching import Batch, MicroBatches
from minirl.types import Reply, TokenRow, Trajectory, Turn
from tests.vectors import read

from .plain_objectives import CASES, LONGEST, G, N, Row
from .toy import train_bpe

OBJECTIVE, CREDIT = map(read, ("objective", "credit"))


@pytest.mark.parametrize("case", OBJECTIVE["advantages"], ids=lambda case: case["id"])
def test_group_normalised(case):
    advantages = group_normalised(np.array([case["rewards"]]))
    # The epsilon beside the standard deviation takes a millionth away.
    np.testing.assert_allclose(advantages, [case["advantages"]], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("case", OBJECTIVE["kept"], ids=lambda case: case["id"])
def test_groups_to_train(case):
    groups = OBJECTIVE["groups"]
    rewards, correct = (
        np.array([group[name] for group in groups.values()]) for name in ("rewards", "correct")
    )
    numbers = groups_to_train(rewards, correct, **case["rules"])
    assert [list(groups)[number] for number in numbers] == case["kept"]
    assert (
        AlgorithmConfig(kind="dapo").correctness_filter,
        AlgorithmConfig(kind="dapo").max_rounds > 1,
    ) == ("mixed", True)


def loss_of(logp_BT, old_logp_BT, advantage_BT, is_action_BT, weight_BT, algorithm):
    """Return loss and statistics where the sampler's log-probabilities are the old ones."""
    nothing: Any = None
    batch = Batch(
        *[nothing] * 4, is_action_BC=is_action_BT, sampler_logp_BC=old_logp_BT,
        advantage_BC=advantage_BT, weight_BC=weight_BT, old_logp_BC=old_logp_BT,
    )  # fmt: skip
    return losses.policy_loss(algorithm, logp_BT, logp_BT, batch, logp_BT)


@pytest.mark.parametrize("case", OBJECTIVE["clipped"], ids=lambda case: case["id"])
def test_clipped_objective(case):
    logp_BT, old_logp_BT = jnp.log(jnp.array([[case["new"]], [case["old"]]]))
    is_action_BT, weight_BT = jnp.ones((1, 4), bool), jnp.array([[0.1, 0.2, 0.3, 0.4]])
    algorithm = AlgorithmConfig(
        clip_low=case["clip"], clip_high=case.get("clip_high", case["clip"]),
        ratio_level=case["level"], correction="none",
    )  # fmt: skip

    def loss(logp_BT):
        advantage_BT = jnp.full((1, 4), case["advantage"])
        return loss_of(logp_BT, old_logp_BT, advantage_BT, is_action_BT, weight_BT, algorithm)

    (found, stats), gradient_BT = jax.value_and_grad(loss, has_aux=True)(logp_BT)
    np.testing.assert_allclose(-found, np.dot(weight_BT[0], case["terms"]), rtol=1e-6)
    if "clipped" in case:  # where no gradient flows; of these the share is weighed as the loss is
        assert (gradient_BT[0] == 0).tolist() == case["clipped"]
        clipped = np.dot(weight_BT[0], case["clipped"])
        np.testing.assert_allclose(stats["clip_fraction"], clipped, rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_nothing_is_left_of_equal_credit(count):
    mask = np.arange(4) < count
    (found,) = whiten([np.full(4, 2.5)], [mask])
    assert found.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_of_an_absurd_ratio_leaves_the_gradient_of_the_others(level):
    """exp(100) is infinite in fp32, and the update would be skipped."""
    logp = jnp.array([[-1.0, -1.0], [-0.1, -0.1]])
    old = jnp.array([[-1.0, -1.0], [-100.1, -100.1]])
    ones, algorithm = jnp.ones((2, 2)), AlgorithmConfig(ratio_level=level, correction="none")

    def loss(logp):
        arguments = (logp, old, jnp.array([[1.0, 1.0], [-1.0, -1.0]]), ones > 0, ones / 4)
        return loss_of(*arguments, algorithm)[0]

    value, gradient = jax.value_and_grad(loss)(logp)
    assert np.isfinite(value)
    # Of the first row the ratio is 1, and so its gradient is minus weight times advantage.
    np.testing.assert_allclose(gradient, [[-0.25, -0.25], [0.0, 0.0]], atol=1e-6)
    rho = losses.probability_ratio(logp, old, ones > 0, level=level)
    weights = losses.correction_weight(rho, kind="masked", low=0.5, high=2.0)
    np.testing.assert_allclose(weights, [[1.0, 1.0], [0.0, 0.0]])
    assert np.isfinite(losses.kl_divergence(old, logp, estimator="k3")).all()


# Presets against their formulas written out plainly, and gradients against slopes.


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

    def plain_rows(self, *, is_only_update):
        rows = []
        for b, row in enumerate(self.rows):
            old = self.new[b] if is_only_update else row.old_logprobs
            numbers = (self.new[b], old, row.logprobs, self.reference[b], self.spans[b].value)
            each = (values[row.is_action].astype(np.float64) for values in numbers)
            reward, length = float(self.rewards.flat[b]), len(row.ids) - row.prompt_length
            covered = self.spans[b].is_covered[row.is_action]
            rows.append(Row(*each, covered, reward, length))
        return rows

    def laid_out(self, values, algorithm):
        """Lay numbers of the ids out as a micro-batch does."""
        rows = [replace(r, logprobs=v) for r, v in zip(self.rows, values, strict=True)]
        return batch_of(rows, algorithm).sampler_logp_BC


def batch_of(rows, algorithm):
    sizes = BatchingConfig(prompt_multiple=4, answer_multiple=4)
    settings: Any = {"aggregation": algorithm.aggregation, "sizes": sizes, "pad_id": 0}
    divisor = algorithm.aggregation_divisor or LONGEST
    groups = [rows[n * G : n * G + G] for n in range(N)]
    (batch,) = MicroBatches(groups, **settings, divisor=divisor)
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
    return batch_of(rows, algorithm)


@pytest.mark.parametrize("is_only_update", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_plain_formula(name, is_only_update):
    """In the only update of a step the ratio is 1, of tokens and of sequences."""
    algorithm, plain = CASES[name]
    scene = Scene(7)
    rows = scene.plain_rows(is_only_update=is_only_update)
    with jax.enable_x64(True):
        batch = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x,
            batch_with_advantages(scene, algorithm, on_clauses="expo" in name),
        )
        if is_only_update:
            batch = batch._replace(old_logp_BC=None)
        reference, logp = (
            scene.laid_out(values, algorithm).astype(jnp.float64)
            for values in (scene.reference, scene.new)
        )
        loss = jax.jit(lambda x: losses.policy_loss(algorithm, x, reference, batch, x)[0])
        found, gradient_BC = jax.value_and_grad(loss)(logp)
        # Weights and advantages have been float32 before.
        assert float(found) == pytest.approx(plain(rows, rows), rel=2e-6, abs=2e-6)
        gradient_BC, is_action_BC = np.asarray(gradient_BC), np.asarray(batch.is_action_BC)
    assert (gradient_BC[~is_action_BC] == 0).all()
    # Along directions that move all tokens the loss grows as the gradient says.
    slopes, expected, step = [], [], 1e-6
    for seed in range(8):
        rng = np.random.default_rng(seed)
        ways = [rng.normal(size=len(row.ids)).astype(np.float32) for row in scene.rows]

        def moved(by, ways=ways):
            pairs = zip(rows, scene.rows, ways, strict=True)
            return [replace(row, new=row.new + by * way[own.is_action]) for row, own, way in pairs]

        slopes.append((plain(moved(step), rows) - plain(moved(-step), rows)) / (2 * step))
        expected.append(np.sum(gradient_BC * scene.laid_out(ways, algorithm)))
    assert np.ptp(slopes) > 0.01
    np.testing.assert_allclose(slopes, expected, rtol=1e-5, atol=1e-7)


# Credit of characters reaches the tokens that were sampled, wherever their borders are.


TEXTS = ["SELECT name FROM singer WHERE city = 'Zürich' AND name LIKE '%東京%'"] * 3


def decoder(pieces):
    """Return what decodes ids that are the places of pieces of text."""
    return lambda ids: "".join(pieces[i] for i in ids)


def reply(ids, text, *, finish="stop"):
    return Reply(tuple(ids), (0.0,) * len(ids), text, finish, (0,) * len(ids))


@pytest.mark.parametrize("case", CREDIT["spans"], ids=lambda case: case["id"])
def test_tokens_lie_where_their_first_character_does(case):
    decode = decoder(case["pieces"])
    # Before each turn there are as many other tokens as turns so far.
    turns = tuple(
        Turn((90,) * number, reply(ids, decode(ids).removesuffix("<end>")))
        for number, ids in enumerate(case["turns"], start=1)
    )
    spans = [CreditSpan(*span) for span in case["spans"]]
    credit, covered = span_credit(Trajectory(turns, None, "done"), spans, decode)
    parts = enumerate(case["credit"], start=1)
    expected = [value for number, values in parts for value in (*[0] * number, *values)]
    assert credit.tolist() == expected
    assert covered.tolist() == [value != 0 for value in expected]


@pytest.mark.parametrize(
    "span", [CreditSpan(1, 0, 1, 1.0), CreditSpan(0, 0, 3, 1.0), CreditSpan(0, 2, 1, 1.0)]
)
def test_a_span_outside_of_the_replies_is_a_mistake_of_ours(span):
    turn = Turn((9,), reply((0,), "ab"))
    with pytest.raises(ValueError, match="not within"):
        span_credit(Trajectory((turn,), None, "done"), [span], decoder(["ab"]))


def test_characters_split_over_tokens_belong_to_all_of_them():
    """Of ids 0 to 255, which are bytes; 256 and 257 are pairs, 258 says nothing."""
    table = (*(bytes([i]) for i in range(256)), b"\xe2\x82", "é'".encode(), b"")
    euro, smile = "€".encode(), "😀".encode()
    ids = [*b"a", *euro, *smile, *b"b", 256, 0xAC, 257, 258]

    def decode(ids):
        return b"".join(table[i] for i in ids).decode(errors="replace")

    assert decode(ids) == "a€😀b€é'"
    assert character_ranges(ids, decode) == [
        (0, 1), *[(1, 2)] * 3, *[(2, 3)] * 4, (3, 4), (4, 5), (4, 5), (5, 7), (7, 7)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, vocab_size=320)


@given(st.lists(st.integers(0, 319)))
def test_ranges_of_a_byte_level_bpe_cover_any_ids(bpe, ids):
    """The decoder joins a quote and the word after it, across tokens."""
    decode = partial(bpe.decode, skip_special_tokens=False)
    ids = [i % bpe.get_vocab_size() for i in ids]
    text, ranges = decode(ids), character_ranges(ids, decode)
    assert len(ranges) == len(ids)
    ends = [0, *(end for _, end in ranges)]
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    for (start, end), before in zip(ranges, ends, strict=False):
        # It begins where the others end, or with the character that they left unfinished.
        assert max(before - 1, 0) <= start <= before
        assert start <= end
    assert {c for start, end in ranges for c in range(start, end)} == set(range(len(text)))
