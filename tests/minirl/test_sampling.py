"""Drawing a token: shares, temperature, top-p, log-probabilities."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from minirl.sample.decode import sample

DRAWS = 20_000
# Five tokens of shares 1/2, 1/4, 1/8, 1/16, 1/16; an odd number, so that a block is padded.
SHARES = np.array([8, 4, 2, 1, 1]) / 16


compiled = jax.jit(sample, static_argnames="any_top_p")


def draw(shares, *, temperature=1.0, top_p=1.0):
    with np.errstate(divide="ignore"):
        logits_SV = np.broadcast_to(np.log(np.float32(shares)), (DRAWS, len(shares)))
    found = compiled(
        logits_SV,
        jax.random.split(jax.random.key(0), DRAWS),
        np.full(DRAWS, temperature, np.float32),
        np.full(DRAWS, top_p, np.float32),
        any_top_p=top_p < 1,
    )
    return tuple(np.asarray(one) for one in found)


def chi_square(ids, shares):
    counts = np.bincount(ids, minlength=len(shares))
    expected = shares * len(ids)
    return float(np.sum((counts - expected) ** 2 / np.maximum(expected, 1e-9)))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_in_their_shares(temperature):
    shares = SHARES ** (1 / temperature)
    shares /= shares.sum()
    ids, logprobs = draw(SHARES, temperature=temperature)
    # 99.9 % of the chi-square distribution with 4 degrees of freedom.
    assert chi_square(ids, shares) < 18.47
    np.testing.assert_allclose(logprobs, np.log(shares)[ids], atol=1e-6)


def test_temperature_zero_takes_the_likeliest_and_reports_temperature_one():
    ids, logprobs = draw(SHARES[::-1], temperature=0.0)
    assert set(ids.tolist()) == {4}
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def test_top_p_cuts_the_tail_and_leaves_log_probabilities_alone():
    # 1/2 + 1/4 reaches 0.7; the two kept tokens then have 2/3 and 1/3.
    nucleus = np.array([2 / 3, 1 / 3, 0, 0, 0])
    ids, logprobs = draw(SHARES, top_p=0.7)
    assert chi_square(ids, nucleus) < 10.83
    np.testing.assert_allclose(logprobs, np.log(SHARES)[ids], atol=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    ids, _ = draw(SHARES, top_p=top_p)
    assert sorted(set(ids.tolist())) == list(range(kept))


def test_tokens_without_probability_are_never_drawn():
    ids, _ = draw([0, 0.5, 0, 0.5, 0])
    assert set(ids.tolist()) == {1, 3}
