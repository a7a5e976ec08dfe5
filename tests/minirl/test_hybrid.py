"""A hybrid of linear and full attention in the native sampler."""

from __future__ import annotations

import numpy as np
import pytest

from minirl.types import Decoding, Request

from .test_sampler import expected_logprobs, prompt

PLAIN = Decoding()


@pytest.fixture(scope="module")
def model(toy):
    return toy.model(hybrid=True)


def check(toy, model, request, reply):
    ids = request.ids + reply.ids
    expected = expected_logprobs(toy, model, ids, start=len(request.ids))
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


def test_replies_of_several_turns_have_the_learners_log_probabilities(toy, model):
    """Of prompts shared and not, of one token, and longer than a chunk; a reply that ends early is
    gone on from while its neighbours decode, and slots and prompt rows are taken again.
    """
    sampler = toy.sampler(model, slots=6, group_size=2, max_prompt_tokens=80)
    prompts = [prompt(75), prompt(75), prompt(1, seed=2), prompt(2, seed=3), prompt(40, seed=4)]
    requests = {e: Request(e, ids, 5 + e, PLAIN) for e, ids in enumerate(prompts)}
    for request in requests.values():
        sampler.submit(request)
    turns, finishes = dict.fromkeys(requests, 0), set()
    while requests:
        for episode, reply in sampler.advance(max_steps=32):
            request = requests.pop(episode)
            check(toy, model, request, reply)
            turns[episode] += 1
            finishes.add(reply.finish)
            if turns[episode] == 3:
                sampler.release(episode)
                continue
            # Of other lengths than a piece, and one of a single token.
            observation = prompt((1, 9)[episode % 2], seed=50 + episode)
            ids = request.ids + reply.ids + observation
            requests[episode] = Request(episode, ids, 4 + turns[episode], PLAIN)
            sampler.submit(requests[episode])
    assert finishes == {"stop", "length"}


def test_a_prompt_begins_with_another_ones_state_only_where_that_is_all_of_it(toy, model):
    """As it begins with keys (`test_what_prompts_share_is_computed_once`), but for the last one,
    which shares 40 of the second one's 45 tokens, and all 39 of the first one's.
    """
    schema = prompt(40)
    prompts = [schema, (*schema, *prompt(6, seed=1)), prompt(30, seed=2), (*schema, 5, 6)]
    requests = [Request(e, ids, 12, PLAIN) for e, ids in enumerate(prompts)]
    sampler = toy.sampler(model)
    replies = toy.run(sampler, requests)
    assert sampler.work.filled == 39 + (45 - 39) + 29 + (41 - 39)
    for request in requests:
        check(toy, model, request, replies[request.episode])
