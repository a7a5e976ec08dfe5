"""The kernel of one new token a row, run by Pallas' interpreter."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from minirl.model.kernels import MASKED, attend_to_keys
from minirl.sample import gpu_attention
from minirl.types import Decoding, Request


@pytest.mark.parametrize(
    ("queries", "dtype", "tolerance"),
    [(1, jnp.bfloat16, 1e-2), (7, jnp.float32, 1e-5), (20, jnp.bfloat16, 1e-2)],
)
def test_it_attends_to_as_many_keys_as_it_is_told(queries, dtype, tolerance):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=size), dtype)
        for size in ((6, queries, 32), (6, 32, 96), (6, 96, 32))
    )
    # The first is of an idle slot; the last more than there are.
    count = jnp.asarray([0, 1, 5, 32, 64, 300])
    # What lies beyond is never read.
    is_there = jnp.arange(96)[None] < count[:, None]
    unread = v.at[jnp.arange(6)[:, None], jnp.where(is_there, 96, jnp.arange(96)[None])]
    found = gpu_attention.attend_to_first(q, k, unread.set(7e3, mode="drop"), count, interpret=True)
    scores = jnp.einsum("yme,yel->yml", q, k, preferred_element_type=jnp.float32)
    scores /= 32**0.5
    expected = attend_to_keys(jnp.where(is_there[:, None], scores, MASKED), v)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[1:], other[1:], rtol=tolerance, atol=tolerance)
    assert np.isfinite(found[0]).all()
    assert (found[1][0] < MASKED / 2).all()


def test_a_sampler_with_it_draws_the_same(toy, monkeypatch):
    model = toy.model()
    requests = [
        Request(e, tuple(range(4, 4 + length)), tokens, Decoding())
        for e, (length, tokens) in enumerate([(1, 9), (20, 30), (20, 5), (33, 40), (33, 17)])
    ]

    def replies(room):
        """Sample with this room in each slot: where it is another, programs are traced anew."""
        sampler = toy.sampler(model, group_size=2, slots=5, max_response_tokens=room)
        return toy.run(sampler, requests)

    expected = replies(48)
    kernel = gpu_attention.attend_to_first
    called = []

    def interpreted(*arrays):
        called.append(True)
        return kernel(*arrays, interpret=True)

    monkeypatch.setattr(gpu_attention, "serves", lambda *_: True)
    monkeypatch.setattr(gpu_attention, "attend_to_first", interpreted)
    found = replies(96)
    assert called
    for episode, reply in expected.items():
        assert found[episode].ids == reply.ids
        np.testing.assert_allclose(found[episode].logprobs, reply.logprobs, atol=1e-5)
