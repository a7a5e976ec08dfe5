"""The sampler against the learner's forward pass, and its schedule."""

from __future__ import annotations

import numpy as np
import pytest

from minirl.types import Decoding, Request

GREEDY = Decoding(temperature=0.0)


def prompt(length: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(4, 64, length).tolist())


def learner_logprobs(toy, model, ids, start, *, temperature=1.0):
    table = toy.next_logprobs(model, ids, temperature=temperature)
    return [table[t - 1, ids[t]] for t in range(start, len(ids))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_equal_the_learners(toy, temperature):
    model = toy.model()
    sampler = toy.sampler(model)
    decoding = Decoding(temperature=temperature)
    # Two episodes of one prompt, and prompts of other lengths beside them.
    prompts = [prompt(40), prompt(40), prompt(7, seed=1), prompt(1, seed=2), prompt(20, seed=3)]
    replies = toy.run(sampler, [Request(e, ids, 20, decoding) for e, ids in enumerate(prompts)])
    for episode, reply in replies.items():
        ids = prompts[episode] + reply.ids
        expected = learner_logprobs(toy, model, ids, len(prompts[episode]), temperature=temperature)
        np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)
        assert reply.finish == ("stop" if reply.ids[-1] == toy.STOP else "length")


def test_greedy_takes_the_likeliest_token_of_a_full_forward_pass(toy):
    model = toy.model()
    ids = list(prompt(11))
    reply = toy.run(toy.sampler(model), [Request(0, tuple(ids), 12, GREEDY)])[0]
    for token in reply.ids:
        assert token == toy.next_logprobs(model, ids)[-1].argmax()
        ids.append(token)
    assert len(reply.ids) == 12 or reply.ids[-1] == toy.STOP
