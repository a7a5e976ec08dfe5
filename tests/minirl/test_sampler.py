"""The native sampler against the learner's forward pass, and its schedule."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from minirl.exchange import UserError
from minirl.sample import cache
from minirl.sample.decode import compilations
from minirl.sample.slots import SlotEpisode, Slots
from minirl.types import Decoding, Request

PLAIN = Decoding()
GREEDY = Decoding(temperature=0.0)


def prompt(length, *, seed=0):
    return tuple(np.random.default_rng(seed).integers(4, 60, length).tolist())


def expected_logprobs(toy, model, ids, *, start, temperature=1.0):
    table = toy.next_logprobs(model, ids, temperature=temperature)
    return [table[t - 1, ids[t]] for t in range(start, len(ids))]


def test_log_probabilities_equal_the_learners_and_greedy_takes_the_likeliest(toy):
    model = toy.model()
    # Two episodes of one prompt, and others of other lengths and ways to draw beside them: more
    # prompts than full groups of four need.
    prompts = [prompt(40), prompt(40), prompt(7, seed=1), prompt(1, seed=2), prompt(20, seed=3)]
    prompts.append(prompt(11))
    ways = [PLAIN, PLAIN, Decoding(0.7), Decoding(top_p=0.6), Decoding(1.3), GREEDY]
    requests = [Request(e, ids, 20, ways[e]) for e, ids in enumerate(prompts)]
    replies = toy.run(toy.sampler(model, group_size=4), requests)
    for request in requests:
        reply = replies[request.episode]
        expected = expected_logprobs(
            toy,
            model,
            request.ids + reply.ids,
            start=len(request.ids),
            temperature=request.decoding.temperature or 1.0,
        )
        np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)
    assert replies[0].ids != replies[1].ids
    table = toy.next_logprobs(model, prompts[5] + replies[5].ids)
    assert replies[5].ids == tuple(table[10:-1].argmax(axis=1))


def test_a_reply_ends_with_its_stop_token_or_at_its_limit(toy):
    sampler = toy.sampler(toy.model())
    replies = toy.run(sampler, [Request(e, prompt(5), 10, PLAIN) for e in range(30)])
    finishes = set()
    for reply in replies.values():
        finishes.add(reply.finish)
        stops = [i in toy.STOP_IDS for i in reply.ids]
        assert not any(stops[:-1])
        assert stops[-1] == (reply.finish == "stop")
        assert reply.finish == "stop" or len(reply.ids) == 10
        shown = reply.ids[:-1] if reply.finish == "stop" else reply.ids
        assert reply.text == toy.Tokenizer().decode(shown)
        assert len(reply.logprobs) == len(reply.ids)
    assert finishes == {"stop", "length"}


@pytest.mark.parametrize("response", [32, 33])
def test_the_last_token_of_the_longest_episode_sees_itself(toy, response):
    """A slot of 32 positions has room for the last token of the prompt and all but the last of the
    response, and no further one.
    """
    model, ids = toy.model(), prompt(33)
    sizes = {"max_prompt_tokens": len(ids), "max_response_tokens": response}
    sampler = toy.sampler(model, stop_ids=toy.NEVER, **sizes)
    reply = toy.run(sampler, [Request(0, ids, response, PLAIN)])[0]
    expected = expected_logprobs(toy, model, ids + reply.ids, start=len(ids))
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


def test_a_reply_does_not_depend_on_slots_and_neighbours(toy):
    model = toy.model()
    request = Request(7, prompt(30), 20, PLAIN)
    others = [Request(e, prompt(12, seed=e), 15, PLAIN) for e in range(20, 29)]
    alone = toy.run(toy.sampler(model), [request])[7]
    among = toy.run(toy.sampler(model, slots=3), [*others, request])[7]
    assert among.ids == alone.ids
    np.testing.assert_allclose(among.logprobs, alone.logprobs, atol=1e-5)
    other_seed = toy.run(toy.sampler(model, seed=1), [request])[7]
    assert other_seed.ids != alone.ids


def test_every_token_of_every_episode_is_a_new_draw(toy):
    sampler = toy.sampler(toy.model(), slots=4, group_size=4, stop_ids=toy.NEVER)
    # Without weights all 64 tokens are equally likely.
    nothing = jax.tree.map(np.zeros_like, nnx.state(toy.model()))
    sampler.set_weights(jax.tree.map(jax.numpy.asarray, nothing), version=1)
    replies = toy.run(sampler, [Request(e, prompt(5), 40, PLAIN) for e in range(16)])
    counts = np.bincount([i for reply in replies.values() for i in reply.ids], minlength=64)
    # 640 draws: 10 of each; 99.9 % of the chi-square distribution with 63 degrees of freedom.
    assert np.sum((counts - 10) ** 2 / 10) < 103.4
    np.testing.assert_allclose(replies[0].logprobs, -np.log(64), atol=1e-5)


def test_a_free_slot_is_taken_at_once(toy):
    sampler = toy.sampler(toy.model(), slots=4, group_size=4, stop_ids=toy.NEVER)
    # While one slot draws 24 tokens, three others draw 8 x 3 each.
    lengths = [24] + [8] * 9
    toy.run(sampler, [Request(e, prompt(9), n, PLAIN) for e, n in enumerate(lengths)])
    assert sampler.work.sampled == 24 + 9 * 8
    assert sampler.work.steps == 24


def test_a_group_computes_its_prompt_once(toy):
    sampler = toy.sampler(toy.model(), slots=4, group_size=4, stop_ids=toy.NEVER)
    # Eight episodes of each prompt on four slots: the prompt stays for the second four. Its last
    # token is fed by the loop that draws.
    requests = [Request(e, prompt(10, seed=e // 8), 3, PLAIN) for e in range(16)]
    toy.run(sampler, requests)
    assert sampler.work.filled == 9 + 9


def test_what_prompts_share_is_computed_once(toy):
    """As questions about one database do: they begin with its schema."""
    model, schema = toy.model(), prompt(40)
    # The first is all of the schema, and the third begins otherwise.
    prompts = [schema, (*schema, *prompt(6, seed=1)), prompt(30, seed=2), (*schema, 5, 6)]
    requests = [Request(e, ids, 12, PLAIN) for e, ids in enumerate(prompts)]
    sampler = toy.sampler(model)
    replies = toy.run(sampler, requests)
    # Of each the last token is fed by the loop that draws, and 39 or 40 are there already.
    assert sampler.work.filled == 39 + (45 - 39) + 29 + (41 - 40)
    for request in requests:
        ids = request.ids + replies[request.episode].ids
        expected = expected_logprobs(toy, model, ids, start=len(request.ids))
        np.testing.assert_allclose(replies[request.episode].logprobs, expected, atol=1e-4)
    # Later requests are answered as they would be alone.
    toy.run(sampler, requests[1:2])
    assert sampler.work.filled == 39 + 6 + 29 + 1 + 45


class Counted(int):
    """An id that counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == int(other)

    def __lt__(self, other):
        Counted.compared += 1
        return int(self) < int(other)


def comparisons(prompts):
    """Count how often ids are compared until so many prompts of one schema are in the cache."""
    slots = Slots(cache.CacheShape(1, prompts, 1, 2 * prompts, 64, 32, (prompts,), (64,)))
    before = Counted.compared
    for number in range(prompts):
        ids = tuple(map(Counted, (*prompt(40), number % 50, number // 50, number)))
        assert slots.assign(SlotEpisode(number, ids))
    copied = 0
    while True:
        copied += slots.next_copy() is not None
        if slots.fill_prompts() is None:
            break
    assert copied == prompts - 1
    return Counted.compared - before


def test_finding_what_prompts_share_takes_time_in_proportion_to_their_number():
    assert comparisons(512) < 6 * comparisons(128)


def test_an_episode_goes_on_with_weights_that_change(toy):
    old, new = toy.model(), toy.model(seed=5)
    sampler = toy.sampler(old, stop_ids=toy.NEVER)
    request = Request(0, prompt(12), 20, PLAIN)
    sampler.submit(request)
    assert sampler.advance(max_steps=8) == []
    sampler.set_weights(nnx.state(new), version=1)
    replies = []
    while not replies:
        replies = sampler.advance(max_steps=8)
    ((_, reply),) = replies
    assert reply.versions == (0,) * 8 + (1,) * 12
    ids = request.ids + reply.ids
    expected = [
        *expected_logprobs(toy, old, ids, start=12)[:8],
        *expected_logprobs(toy, new, ids, start=20),
    ]
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)
    sampler.release(0)
    # A prompt of the old weights is forgotten.
    reply = toy.run(sampler, [request])[0]
    expected = expected_logprobs(toy, new, request.ids + reply.ids, start=12)
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


def test_memory_given_back_comes_again(toy):
    model = toy.model()
    sampler = toy.sampler(model)
    request = Request(0, prompt(12), 6, PLAIN)
    first = toy.run(sampler, [request])[0]
    sampler.free_memory()
    with pytest.raises(RuntimeError, match="call set_weights first"):
        toy.run(sampler, [request])
    with pytest.raises(RuntimeError, match="being sampled"):
        sampler.free_memory()
    sampler.release(0)
    sampler.set_weights(nnx.state(model), version=0)
    assert toy.run(sampler, [request])[0] == first
    # New weights need room: there is no cache beside them until it is needed.
    held = sum(array.nbytes for array in jax.live_arrays())
    sampler.set_weights(nnx.state(model), version=1)
    assert sum(array.nbytes for array in jax.live_arrays()) < held


def test_a_turn_extends_its_history_and_memory_in_use_is_kept(toy):
    sampler = toy.sampler(toy.model())
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        sampler.submit(Request(0, prompt(49), 5, PLAIN))
    sampler.submit(Request(0, prompt(5), 2, PLAIN))
    with pytest.raises(RuntimeError, match="being sampled"):
        sampler.free_memory()
    ((_, reply),) = sampler.advance(max_steps=8)
    with pytest.raises(ValueError, match="history"):
        sampler.submit(Request(0, (*prompt(5, seed=9), *reply.ids, 8), 2, PLAIN))


def later_turns(toy, sampler, requests, *, turns=3):
    """Answer every reply with an observation of its own, for so many turns; return all ids."""
    ids, turn = {}, dict.fromkeys((r.episode for r in requests), 1)
    by_number = {r.episode: r for r in requests}
    for request in requests:
        sampler.submit(request)
    while turn:
        for e, reply in sampler.advance(max_steps=8):
            ids[e] = (*(ids.get(e) or by_number[e].ids), *reply.ids)
            if turn[e] == turns:
                del turn[e]
                sampler.release(e)
                continue
            turn[e] += 1
            ids[e] += prompt(4, seed=100 + e)
            old = by_number[e]
            sampler.submit(Request(e, ids[e], old.max_tokens, old.decoding))
    return ids


def test_episodes_that_had_to_wait_say_the_same(toy):
    requests = [Request(e, prompt(20, seed=e // 2), 10, PLAIN) for e in range(8)]
    sizes = {"slots": 8, "group_size": 2, "stop_ids": toy.NEVER}
    roomy = toy.sampler(toy.model(), **sizes)
    # A token takes 256 bytes: room for two prompts of 64 tokens and two slots.
    tight = toy.sampler(toy.model(), **sizes, cache_gb=66e-6)
    expected = later_turns(toy, roomy, requests)
    assert later_turns(toy, tight, requests) == expected
    # Two episodes at a time in place of eight.
    assert tight.work.steps >= 4 * roomy.work.steps
    assert tight.work.filled == roomy.work.filled


def test_a_reply_that_has_ended_is_not_computed_beside_others(toy, monkeypatch):
    # Three episodes a prompt; those that go on are of all prompts, and not the first ones.
    requests = [
        Request(e, prompt(9 + e // 3, seed=e // 3), 3 + 4 * (e % 3), Decoding(float(e % 2)))
        for e in range(12)
    ]
    sizes = {"slots": 12, "group_size": 3, "stop_ids": toy.NEVER}

    def replies(rows):
        monkeypatch.setitem(cache.ROWS, "cpu", rows)
        sampler, found = toy.sampler(toy.model(), **sizes), {}
        for request in requests:
            sampler.submit(request)
        while len(found) < len(requests):
            found |= dict(sampler.advance(max_steps=4))
        return found, sampler.work.decoded

    expected, decoded = replies(())
    found, fewer = replies((2, 4, 8))
    assert {e: reply.ids for e, reply in found.items()} == {e: r.ids for e, r in expected.items()}
    for e, reply in found.items():
        np.testing.assert_allclose(reply.logprobs, expected[e].logprobs, atol=1e-5)
    # Twelve rows for 11 tokens; then four steps of 12, of 8 and three of 4.
    assert decoded == 12 * 11
    assert fewer == 4 * 12 + 4 * 8 + 3 * 4


def test_a_cache_too_small_for_an_episode_is_refused(toy):
    with pytest.raises(UserError, match=r"sampler.cache_gb: 2e-05 GB hold no episode of 48 \+ 48"):
        toy.sampler(toy.model(), cache_gb=2e-5)


def test_a_long_prompt_is_computed_in_pieces(toy):
    # Over 512 tokens: each piece looks back at those before it.
    model, ids = toy.model(), prompt(700)
    sampler = toy.sampler(model, max_prompt_tokens=800)
    reply = toy.run(sampler, [Request(0, ids, 4, PLAIN)])[0]
    expected = expected_logprobs(toy, model, ids + reply.ids, start=len(ids))
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


def test_few_programs_serve_many_lengths(toy):
    sampler = toy.sampler(
        toy.model(),
        stop_ids=(1, 59),
        slots=8,
        group_size=4,
        max_prompt_tokens=512,
        max_response_tokens=256,
    )
    rng, before = np.random.default_rng(0), compilations()
    for start in range(0, 36, 12):
        requests = [
            Request(
                start + e,
                prompt(int(rng.integers(1, 480)), seed=start + e // 4),
                int(rng.integers(1, 40)),
                PLAIN,
            )
            for e in range(12)
        ]
        later_turns(toy, sampler, requests, turns=2)
    # Pieces of prompts in four lengths, of later turns in one; the loop over four slots or eight.
    assert compilations() - before <= 5 + 2
