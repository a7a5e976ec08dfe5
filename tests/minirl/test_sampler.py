"""The native sampler against the learner's forward pass, and its schedule."""

import gc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minirl.config import LoraConfig, SamplerConfig
from minirl.exchange import UserError
from minirl.model.kernels import MASKED, attend_to_keys
from minirl.model.lora import add_adapters, trained
from minirl.model.sharding import device_bytes, make_mesh, param_path, with_shardings
from minirl.sample import attention, cache, gpu_attention
from minirl.sample.cache import cache_room, cache_shapes, device_memory, plan_cache
from minirl.sample.decode import compilations, lowered_programs, sample
from minirl.sample.slots import SlotEpisode, Slots
from minirl.sample.weights import (
    COPY_SHARE,
    copy_shapes,
    in_compute_type,
    local_mesh,
    local_model,
    local_params,
)
from minirl.types import Request

from . import toy

PLAIN, GREEDY = 1.0, 0.0  # temperatures
# Programs that draw are compiled layer by layer; most of what is tested here is as true of one.
shallow = partial(toy.model, layers=1)


def prompt(length, *, seed=0):
    return tuple(np.random.default_rng(seed).integers(4, 60, length).tolist())


def expected_logprobs(model, ids, *, start, temperature=1.0):
    table = toy.next_logprobs(model, ids, temperature=temperature)
    return [table[t - 1, ids[t]] for t in range(start, len(ids))]


def check(model, request, reply):
    """Compare a reply's log-probabilities with those of a forward pass."""
    ids, temperature = request.ids + reply.ids, request.temperature or 1.0
    expected = expected_logprobs(model, ids, start=len(request.ids), temperature=temperature)
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


def assert_same_replies(found, expected):
    for episode, reply in found.items():
        assert reply.ids == expected[episode].ids
        np.testing.assert_allclose(reply.logprobs, expected[episode].logprobs, atol=1e-5)


@pytest.mark.parametrize(("hybrid", "slots", "group_size"), [(False, 4, 4), (True, 6, 2)])
def test_replies_of_several_turns_have_the_learners_log_probabilities(hybrid, slots, group_size):
    """Of prompts shared and not, of one token, and longer than a chunk, drawn in several ways; a
    reply that ends early is gone on from while its neighbours decode, and slots and prompt rows are
    taken again, of which there are fewer than prompts where groups of four are not full.
    """
    model, finishes = toy.model(hybrid=hybrid), set()
    sampler = toy.sampler(model, slots=slots, group_size=group_size, max_prompt_tokens=80)
    prompts = [prompt(75), prompt(75), prompt(1, seed=2), prompt(2, seed=3), prompt(40, seed=4)]
    ways = [(PLAIN,), (PLAIN,), (0.7,), (PLAIN, 0.6), (GREEDY,)]

    def look(request, reply):
        check(model, request, reply)
        finishes.add(reply.finish)
        if request.temperature == GREEDY:
            table = toy.next_logprobs(model, request.ids + reply.ids)
            assert reply.ids == tuple(table[len(request.ids) - 1 : -1].argmax(axis=1))
        # It ends with its stop token, which its text leaves out, or at its limit.
        is_stopped = reply.finish == "stop"
        stops = [i in toy.STOP_IDS for i in reply.ids]
        assert stops == [False] * (len(stops) - 1) + [is_stopped]
        assert is_stopped or len(reply.ids) == request.max_tokens
        assert reply.text == toy.Tokenizer().decode(reply.ids[:-1] if is_stopped else reply.ids)

    # Observations are of other lengths than a piece, and one of a single token.
    asked = [Request(e, ids, 5 + e, *ways[e]) for e, ids in enumerate(prompts)]
    ids = later_turns(sampler, asked, lengths=(1, 9), look=look)
    assert finishes == {"stop", "length"}
    assert ids[0][75:80] != ids[1][75:80]


# A slot of 32 positions has room for the last token of the prompt and all but the last of the
# response, and no further one. A longer prompt is computed in pieces, of which each looks back at
# those before it.
@pytest.mark.parametrize(("length", "response"), [(33, 32), (33, 33), (90, 4)])
def test_the_last_token_of_the_longest_episode_sees_all_before(monkeypatch, length, response):
    monkeypatch.setitem(cache._PIECES, "cpu", (32,))
    model, request = shallow(), Request(0, prompt(length), response, PLAIN)
    sizes = {"max_prompt_tokens": length, "max_response_tokens": response}
    sampler = toy.sampler(model, stop_ids=toy.NEVER, **sizes)
    check(model, request, toy.run(sampler, [request])[0])


def test_every_token_of_every_episode_is_a_new_draw():
    sampler = toy.sampler(shallow(), slots=4, group_size=4, stop_ids=toy.NEVER)
    # Without weights all 64 tokens are equally likely.
    sampler.set_weights(jax.tree.map(jnp.zeros_like, nnx.state(shallow())), version=1)
    replies = toy.run(sampler, [Request(e, prompt(5), 40, PLAIN) for e in range(16)])
    counts = np.bincount([i for reply in replies.values() for i in reply.ids], minlength=64)
    # 640 draws: 10 of each; 99.9 % of the chi-square distribution with 63 degrees of freedom.
    assert np.sum((counts - 10) ** 2 / 10) < 103.4
    np.testing.assert_allclose(replies[0].logprobs, -np.log(64), atol=1e-5)


def test_a_free_slot_is_taken_at_once_and_a_group_computes_its_prompt_once():
    sampler = toy.sampler(shallow(), slots=4, group_size=4, stop_ids=toy.NEVER)
    # While one slot draws 24 tokens, three others draw 8 x 3 each.
    lengths = [24] + [8] * 9
    replies = toy.run(sampler, [Request(e, prompt(9), n, PLAIN) for e, n in enumerate(lengths)])
    assert [len(replies[e].ids) for e in range(10)] == lengths
    assert sampler.work["steps"] == 24
    # Eight episodes of each prompt on four slots: the prompt stays for the second four. Its last
    # token is fed by the loop that draws.
    before = sampler.work["filled"]
    toy.run(sampler, [Request(e, prompt(10, seed=50 + e // 8), 3, PLAIN) for e in range(16)])
    assert sampler.work["filled"] - before == 9 + 9


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_prompts_share_is_computed_once(hybrid):
    """As questions about one database do: they begin with its schema. Of a hybrid nothing is."""
    model, schema = toy.model(layers=1, hybrid=hybrid), prompt(40)
    # The first is all of the schema, and the third begins otherwise.
    prompts = [schema, (*schema, *prompt(6, seed=1)), prompt(30, seed=2), (*schema, 5, 6)]
    requests = [Request(e, ids, 12, PLAIN) for e, ids in enumerate(prompts)]
    # The sizes of the test of a hybrid, whose programs serve.
    sampler = toy.sampler(model, slots=6, group_size=2, max_prompt_tokens=80)
    replies = toy.run(sampler, requests)
    # Of each the last token is fed by the loop that draws, and 39 or 40 are there already.
    assert sampler.work["filled"] == 39 + 45 + 29 + 41 - (0 if hybrid else 39 + 40)
    for request in requests:
        check(model, request, replies[request.episode])
    # Later requests are answered as they would be alone.
    before = sampler.work["filled"]
    toy.run(sampler, requests[1:2])
    assert sampler.work["filled"] == before + 45


class Counted(int):
    """An id that counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == int(other)


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


def test_an_episode_goes_on_with_weights_that_change():
    old, new = shallow(), shallow(seed=5)
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
        *expected_logprobs(old, ids, start=12)[:8],
        *expected_logprobs(new, ids, start=20),
    ]
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)
    sampler.release(0)
    # A prompt of the old weights is forgotten.
    check(new, request, toy.run(sampler, [request])[0])


def test_memory_given_back_comes_again():
    model = shallow()
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


def test_a_cache_without_room_for_an_episode_is_refused():
    with pytest.raises(UserError, match=r"sampler.cache_gb: 2e-05 GB hold no episode of 48 \+ 48"):
        toy.sampler(toy.model(), cache_gb=2e-5)


def later_turns(sampler, requests, *, turns=3, lengths=(4,), look=lambda *_: None):
    """Answer every reply with an observation of its own, for so many turns; return all ids."""
    ids, turn = {}, dict.fromkeys((r.episode for r in requests), 1)
    last = {r.episode: r for r in requests}
    for request in requests:
        sampler.submit(request)
    while turn:
        for e, reply in sampler.advance(max_steps=8):
            look(last[e], reply)
            ids[e] = last[e].ids + reply.ids
            if turn[e] == turns:
                del turn[e]
                sampler.release(e)
                continue
            turn[e] += 1
            observation = prompt(lengths[e % len(lengths)], seed=100 + e)
            last[e] = replace(last[e], ids=ids[e] + observation)
            sampler.submit(last[e])
    return ids


def test_episodes_that_had_to_wait_say_the_same():
    requests = [Request(e, prompt(20, seed=e // 2), 10, PLAIN) for e in range(8)]
    sizes: dict[str, Any] = {"slots": 8, "group_size": 2, "stop_ids": toy.NEVER}
    roomy = toy.sampler(shallow(), **sizes)
    # A token takes 128 bytes: room for two prompts of 64 tokens and two slots.
    tight = toy.sampler(shallow(), **sizes, cache_gb=33e-6)
    found = later_turns(tight, requests)
    assert found == later_turns(roomy, requests)
    # Two episodes at a time in place of eight.
    assert tight.work["steps"] >= 4 * roomy.work["steps"]
    # Of a prompt all but the last token, once a group; of a later turn as many tokens as are new:
    # the reply's last, and the observation without its own last.
    assert tight.work["filled"] == roomy.work["filled"] == 4 * 19 + 8 * 2 * 4
    assert later_turns(toy.sampler(shallow(), seed=1, **sizes), requests) != found


def test_a_reply_that_has_ended_is_not_computed_beside_others():
    # Three episodes a prompt; those that go on are of all prompts, and not the first ones.
    requests = [
        Request(e, prompt(9 + e // 3, seed=e // 3), 3 + 4 * (e % 3), float(e % 2))
        for e in range(12)
    ]

    def replies(rows):
        sampler = toy.sampler(shallow(), slots=12, group_size=3, stop_ids=toy.NEVER, rows=rows)
        return toy.run(sampler, requests, max_steps=4), sampler.work["decoded"]

    expected, decoded = replies(())
    found, fewer = replies((2, 4, 8))
    assert_same_replies(found, expected)
    # Twelve rows for 11 tokens; then four steps of 12, of 8 and three of 4.
    assert (decoded, fewer) == (12 * 11, 4 * 12 + 4 * 8 + 3 * 4)


def test_few_programs_serve_many_lengths():
    sizes = {"slots": 8, "max_prompt_tokens": 512, "max_response_tokens": 256}
    sampler = toy.sampler(shallow(), stop_ids=(1, 59), group_size=4, rows=(4,), **sizes)
    rng, before = np.random.default_rng(0), compilations()
    for start in range(0, 36, 12):
        requests = [
            Request(
                e, prompt(int(rng.integers(1, 480)), seed=e // 4), int(rng.integers(1, 40)), PLAIN
            )
            for e in range(start, start + 12)
        ]
        later_turns(sampler, requests, turns=2)
    # Pieces of prompts in four lengths, of later turns in one; the loop over four slots or eight.
    assert compilations() - before <= 5 + 2


# What is spoilt (one number of it), by what, and how tokens are drawn.
@pytest.mark.parametrize(
    ("name", "value", "how"),
    [
        ("final_norm", np.inf, [GREEDY]),
        ("embed", np.nan, [PLAIN]),
        ("unembed", np.nan, [GREEDY]),
        ("unembed", -np.inf, [PLAIN, 0.5]),
        ("q", np.inf, [PLAIN]),
    ],
)
def test_no_token_is_drawn_from_what_are_no_numbers(name, value, how):
    sampler, model = toy.sampler(shallow()), toy.spread(shallow(), None)
    weight = getattr(model.layers if name == "q" else model, name)
    # Token 7, which the prompt has; of others the first number.
    place = (7, 0) if name in ("embed", "unembed") else (0,) * weight.ndim
    weight[...] = weight[...].at[place].set(value)
    sampler.set_weights(trained(model), version=1)
    with pytest.raises(UserError, match="no numbers to draw from"):
        toy.run(sampler, [Request(0, (7, 8, 9), 6, *how)])


# Drawing a token: shares, temperature, top-p, log-probabilities.


DRAWS = 20_000
# Five tokens of shares 1/2, 1/4, 1/8, 1/16, 1/16; an odd number, so that a block is padded.
SHARES = np.array([8, 4, 2, 1, 1]) / 16


compiled = jax.jit(sample, static_argnames="any_top_p")


def draw(shares, *, temperature=1.0, top_p=1.0):
    with np.errstate(divide="ignore"):
        logits_SV = np.broadcast_to(np.log(np.float32(shares)), (DRAWS, len(shares)))
    keys = jax.random.split(jax.random.key(0), DRAWS)
    ways = (np.full(DRAWS, one, np.float32) for one in (temperature, top_p))
    found = compiled(logits_SV, keys, *ways, any_top_p=top_p < 1)
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
    assert {*draw([0, 0.5, 0, 0.5, 0], temperature=temperature)[0].tolist()} == {1, 3}


def test_top_p_cuts_the_tail_and_leaves_log_probabilities_alone():
    # 1/2 + 1/4 reaches 0.7; the two kept tokens then have 2/3 and 1/3.
    ids, logprobs = draw(SHARES, top_p=0.7)
    assert chi_square(ids, np.array([2 / 3, 1 / 3, 0, 0, 0])) < 10.83
    np.testing.assert_allclose(logprobs, np.log(SHARES)[ids], atol=1e-6)
    # It keeps the smallest set that reaches it.
    for top_p, kept in ((0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3)):
        assert sorted({*draw(SHARES, top_p=top_p)[0].tolist()}) == list(range(kept))


# On a mesh: the same replies; shares of the cache; copies of the weights.


SIZES = SamplerConfig(slots=16, max_prompt_tokens=96, max_response_tokens=96, cache_gb=1.0)
# Bytes of a token: 2 layers, keys and values, 2 heads of 8, in fp32.
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def plan(config, gb, *, mesh=None, room=1e9):
    settings = SIZES.model_copy(update={"cache_gb": gb})
    return plan_cache(config, settings, group_size=4, dtype=np.float32, mesh=mesh, room=room)


# Groups that share a prompt and single episodes, sampled and greedy. The order of the cache is that
# of CPUs and GPUs, or that of TPUs; the last two meshes do not divide the two key/value heads, and
# none the seven slots.
@pytest.mark.parametrize(
    ("shape", "platform", "hybrid"),
    [
        ({"data": 4, "tensor": 2}, "cpu", False),
        ({"data": 2, "tensor": 4}, "tpu", False),
        ({"data": 2, "tensor": 4}, "cpu", True),
    ],
)
def test_a_mesh_samples_the_same(shape, platform, hybrid, monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 60, 9 + 5 * n).tolist()) for n in range(5)]
    requests = [Request(e, prompts[e // 4], 12, float(e % 4 < 3)) for e in range(18)]
    requests = requests[:10] if hybrid else requests
    # The last episodes leave slots empty, not the same number in every part.
    sizes: Any = {"slots": 7, "group_size": 4}
    model = toy.model(layers=1, hybrid=hybrid)
    alone = toy.run(toy.sampler(model, **sizes), requests)
    sizes["rows"] = (2,) if hybrid else (1, 2)
    monkeypatch.setattr("minirl.sample.cache.platform_of", lambda _: platform)
    monkeypatch.setattr("minirl.sample.weights.local_mesh", lambda *_, **__: make_mesh(shape))
    model = toy.spread(model, make_mesh({"fsdp": 4, "tensor": 2}))
    assert_same_replies(toy.run(toy.sampler(model, **sizes), requests), alone)


@pytest.mark.parametrize("shape", [None, {"fsdp": 4, "tensor": 2}], ids=str)
def test_states_are_planned_and_kept_as_shares(shape):
    mesh = shape and make_mesh(shape)
    # In fp32: a memory of 4 heads of 8 x 6 numbers, and three tokens of 2 x 2 x 8 + 4 x 6.
    state_bytes = 3 * 4 * (4 * 8 * 6 + 3 * 56)
    planned = plan(toy.HYBRID, 100_000e-9, mesh=mesh)
    rows, parts = planned.prompts + planned.slots, 1 if mesh is None else 2
    # One layer of four has keys and values.
    found = rows * state_bytes / parts + planned.tokens * TOKEN_BYTES / 2 / parts
    shapes = cache_shapes(planned, toy.HYBRID, dtype=np.float32, mesh=mesh)
    assert device_bytes(shapes) == found <= 100_000
    more = 1 + (planned.prompts == planned.slots)
    more_bytes = more * (state_bytes + 96 * TOKEN_BYTES / 2) / parts
    assert found + more_bytes > 100_000 or planned.slots == 4


def test_the_cache_is_cut_to_its_bytes_or_fills_what_weights_leave():
    shape = plan(toy.CONFIG, 200_000e-9)
    # Four slots and two prompts; a fifth slot would have two prompts more.
    assert (shape.slots, shape.tokens) == (4, 6 * 96)
    assert shape.tokens * TOKEN_BYTES <= 200_000 < (5 + 4) * 96 * TOKEN_BYTES
    assert plan(toy.CONFIG, None, room=200_000) == shape
    # Nine tenths, on accelerators: 512 slots where weights and optimizer take half of an H100.
    assert cache_room(80e9, held_bytes=40e9, platform="gpu") == pytest.approx(36e9)
    assert cache_room(24e9, held_bytes=4e9, platform="cpu") == pytest.approx(6e9)


def test_memory_is_that_of_the_process_s_own_devices(monkeypatch):
    """Those of other processes do not tell."""
    own = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 80e9})
    mesh: Any = SimpleNamespace(local_devices=[own])
    assert device_memory(mesh) == 80e9
    monkeypatch.setattr(jax, "local_devices", lambda: [own])
    assert device_memory(None) == 80e9


@pytest.mark.parametrize("shape", [{"data": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_programs_write_in_place_and_no_device_asks_another_for_a_token(shape):
    """Those of a hybrid, which has the layers of all models."""
    mesh = make_mesh(shape)
    graph, weights = nnx.split(toy.model(hybrid=True))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    model = nnx.merge(graph, with_shardings(like, mesh))
    model.mesh = mesh
    sizes = plan_cache(toy.HYBRID, SIZES, group_size=2, dtype=np.float32, mesh=mesh, room=1e9)
    calls = lowered_programs(model, sizes)
    fill, decode = (calls[name].compile() for name in ("fill", "decode"))
    arrays = cache_shapes(sizes, toy.HYBRID, dtype=np.float32, mesh=mesh)
    for program, rows in ((fill, arrays.prompts), (decode, arrays.slots)):
        memory: Any = program.memory_analysis()
        written = device_bytes(rows)
        assert written <= memory.alias_size_in_bytes < 1.01 * written
    text = str(decode.as_text())
    assert "while" in text
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    assert any(name in text for name in names) == ("tensor" in shape)


def test_a_layer_is_traced_once_whatever_the_depth():
    def products(layers: int) -> int:
        sizes = plan_cache(toy.CONFIG, SIZES, group_size=2, dtype=np.float32, mesh=None, room=1e9)
        decode = lowered_programs(toy.model(layers=layers), sizes)["decode"]
        return decode.as_text().count("dot_general")

    assert products(2) == products(3) > 0


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_copy_is_split_over_as_few_devices_as_have_the_memory(tensor):
    params = nnx.state(toy.model())
    mesh = make_mesh({"data": 8 // tensor, "tensor": tensor})
    fits = device_bytes(copy_shapes(params, mesh, np.float32)) / COPY_SHARE
    # Where no number of devices is enough, all of them share it.
    for memory_bytes, shape in ((fits, (8 // tensor, 1, tensor)), (fits / 100, (1, 1, 8))):
        mesh = local_mesh(params, jax.devices(), dtype=np.float32, memory_bytes=memory_bytes)
        assert mesh.devices.shape == shape
    alone = local_mesh(params, jax.devices()[:1], dtype=np.float32, memory_bytes=1.0)
    assert alone.devices.shape == (1, 1, 1)


def test_a_process_with_one_device_of_several_compiles_each_program_once(caplog):
    """Its cache lies as the weights do, also before a program has written to it."""
    # Of a size that no other test has compiled.
    sampler = toy.sampler(toy.spread(shallow(), make_mesh({}, jax.devices()[:1])), slots=3)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        for n in range(3):
            toy.run(sampler, [Request(n, (2, 3, 4 + n, 5), 3, PLAIN)])
    for name in ("fill", "decode"):
        assert caplog.text.count(f"Compiling jit({name})") == 1


def test_copies_have_matrices_in_the_type_of_the_computation():
    """That of the sampler, and that of a reference, which shares no memory."""
    model = toy.spread(toy.model(), make_mesh({"fsdp": 4, "tensor": 2}))
    add_adapters(model, LoraConfig(rank=2), seed=0)
    own, params = local_model(model)[2], nnx.state(model)
    assert own is not None
    copy, described = (make(params, own, jnp.bfloat16) for make in (local_params, copy_shapes))
    copies = (copy, in_compute_type(params, jnp.bfloat16), described, params)
    for array, twin, info, leaf in zip(*map(jax.tree.leaves, copies), strict=True):
        assert (array.shape, array.dtype) == (info.shape, info.dtype)
        assert array.sharding.is_equivalent_to(info.sharding, array.ndim)
        assert array.is_fully_replicated
        np.testing.assert_array_equal(array, expected := np.array(leaf.astype(array.dtype)))
        leaf.delete()
        assert twin.dtype == array.dtype
        np.testing.assert_array_equal(twin, expected)
    kinds = {param_path(path): leaf.dtype.name for path, leaf in jax.tree.leaves_with_path(copy)}
    assert {kinds[f"layers.{name}"] for name in ("q", "q_a", "down_b")} == {"bfloat16"}
    assert kinds["final_norm"] == "float32"


def test_samplers_share_what_is_not_trained_and_copy_nothing_else_before_there_are_weights():
    model = toy.spread(toy.model(), make_mesh({"fsdp": 8}))
    add_adapters(model, LoraConfig(rank=2), seed=0)
    (_, first, _), (_, second, _) = local_model(model), local_model(model)
    gc.collect()
    shape = model.layers.q_a[...].shape
    assert not any(a.is_fully_replicated for a in jax.live_arrays() if a.shape == shape)
    for one, other in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        assert one is other
        assert one.is_fully_replicated


# The kernel of one new token a row, run by Pallas' interpreter.


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("queries", "dtype", "tolerance"),
    [(1, jnp.bfloat16, 1e-2), (7, jnp.float32, 1e-5), (20, jnp.bfloat16, 1e-2)],
)
def test_it_attends_to_as_many_keys_as_it_is_told(queries, dtype, tolerance):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=size), dtype)
        for size in ((6, 2, queries, 32), (6, 96, 2, 32), (6, 96, 2, 32))
    )
    # The first is of an idle slot; the last more than there are.
    count = jnp.asarray([0, 1, 5, 32, 64, 300])
    # What lies beyond is never read.
    is_there = jnp.arange(96)[None] < count[:, None]
    unread = v.at[jnp.arange(6)[:, None], jnp.where(is_there, 96, jnp.arange(96)[None])]
    keys = (array.reshape(6, 96, -1) for array in (k, unread.set(7e3, mode="drop")))
    found = gpu_attention.attend_to_first(q, *keys, count)
    scores = jnp.einsum("xkme,xlke->xkml", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(is_there[:, None, None], scores / 32**0.5, MASKED)
    expected = attend_to_keys(scores, v.swapaxes(1, 2))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[1:], other[1:], rtol=tolerance, atol=tolerance)
    assert np.isfinite(found[0]).all()
    assert (found[1][0] < MASKED / 2).all()


@pytest.mark.usefixtures("interpreted")
def test_a_sampler_with_it_draws_the_same(monkeypatch):
    requests = [
        Request(e, tuple(range(4, 4 + length)), tokens, PLAIN)
        for e, (length, tokens) in enumerate([(1, 9), (20, 30), (20, 5), (33, 40), (33, 17)])
    ]

    def replies(room):
        """Sample with this room in each slot: where it is another, programs are traced anew."""
        sampler = toy.sampler(shallow(), group_size=2, slots=5, max_response_tokens=room)
        return toy.run(sampler, requests)

    expected = replies(48)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    own = gpu_attention.attend_to_first
    with patch.object(gpu_attention, "attend_to_first", wraps=own) as kernel:
        assert_same_replies(replies(96), expected)
    kernel.assert_called()
