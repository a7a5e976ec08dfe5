"""Facts about the programs, as libtpu makes them for TPUs."""

from __future__ import annotations

import re

import pytest

from minirl.plan.fit import published_shape

from . import programs

MODEL = "qwen2.5-coder-0.5b"
HYBRID = ("qwen3.5-9b", "v5p:2x2x1")


@pytest.fixture(params=["v5e:2x2", "v5p:2x2x1"], scope="module")
def topology(request):
    return request.param


def test_attention_is_splash_attention_in_all_of_forward_and_backward(topology):
    text = programs.update(MODEL, topology, "gradient").text
    # Prompts to themselves, answers to prompts, answers to themselves; forward twice by remat,
    # backward once for queries and once for keys.
    assert text.count('custom_call_target="tpu_custom_call"') == 3 * (2 + 2)


def test_logits_are_summed_in_fp32(topology):
    """They have a place for every word, and are no part of the table, which has the hidden size."""
    config = published_shape(MODEL)
    text = programs.update(MODEL, topology, "gradient").text
    results = re.findall(r"= (\S+) (?:convolution|dot)\(", text)
    kinds = {
        kind
        for result in results
        for kind, dims in programs.arrays(result)
        if config.vocab_size in dims
    }
    assert kinds <= {"f32"}


@pytest.mark.parametrize("name", ["gradient", "apply"])
def test_arguments_are_donated(topology, name):
    memory = programs.update(MODEL, topology, name).memory
    returned = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert returned < programs.RETURNED_BYTES


@pytest.mark.parametrize(
    ("model", "topology"),
    [(MODEL, "v5e:2x2"), (MODEL, "v5p:2x2x1"), HYBRID],
)
def test_devices_do_not_wait_for_each_other_while_they_sample(model, topology):
    loop = programs.sampling_loop(programs.sampler(model, topology, "decode"))
    assert [one.text for one in loop if programs.is_collective(one)] == []


@pytest.mark.parametrize("name", ["fill", "decode"])
def test_the_cache_is_updated_in_place(topology, name):
    """It fills most of the memory: there is no room for it in another order."""
    memory = programs.sampler(MODEL, topology, name).memory
    assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes
    assert memory.temp_size_in_bytes < 0.1 * memory.output_size_in_bytes


def test_states_are_updated_in_place():
    """But for those with which slots begin: of their prompts, side by side."""
    memory = programs.sampler(*HYBRID, "decode").memory
    assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes
    assert memory.temp_size_in_bytes < 0.2 * memory.output_size_in_bytes
