"""Facts about the update's programs, as XLA's CUDA compiler makes them for an H100."""

from __future__ import annotations

import re

import pytest

from minirl.plan.fit import published_shape

from . import programs
from .programs import CASES, SHAPE, SMALL_HYBRID

GIB = 2**30


@pytest.fixture(params=CASES, ids="-".join, scope="module")
def case(request):
    return request.param


def gradient(case):
    return programs.update(*case, "gradient")


@pytest.mark.parametrize(
    "case", [*CASES, ("qwen2.5-coder-0.5b", "a800x1"), SMALL_HYBRID], ids="-".join
)
def test_attention_is_flash_attention_in_all_of_forward_and_backward(case):
    calls = re.findall(r'custom_call_target="__cudnn\$(\w+)"', gradient(case).text)
    # Prompts to themselves, answers to prompts, answers to themselves; forward twice by remat.
    assert (calls.count("fmhaSoftmax"), calls.count("fmhaSoftmaxBackward")) == (6, 3)


def test_there_is_no_array_of_scores(case):
    columns = SHAPE.prompt_columns, SHAPE.answer_columns
    positions = {SHAPE.tokens, SHAPE.cells, *columns, SHAPE.answers * columns[1]}
    for kind, dims in set(programs.arrays(gradient(case).text)):
        assert sum(size in positions for size in dims) < 2, (kind, dims)


def products(case):
    """Return the results of all matrix products: type and dimensions."""
    text = gradient(case).text
    lines = re.findall(r"= (\S+) dot\(", text)
    lines += re.findall(r'= (.+?) custom-call\(.*custom_call_target="__cublas', text)
    return [array for line in lines for array in programs.arrays(line)]


def test_logits_are_summed_in_fp32(case):
    words = published_shape(case[0]).vocab_size
    kinds = {kind for kind, dims in products(case) if words in dims}
    assert kinds == {"f32"}


def test_the_gradient_of_the_embedding_is_summed_in_fp32(case):
    words = published_shape(case[0]).vocab_size
    lines = re.findall(r"= (\S+) scatter\(", gradient(case).text)
    kinds = {kind for line in lines for kind, dims in programs.arrays(line) if words in dims}
    assert kinds <= {"f32"}


def test_the_unembedding_is_gathered_in_bf16():
    case = CASES[1]
    words = published_shape(case[0]).vocab_size
    gathered = [one for one in gradient(case).operations if one.opcode.startswith("all-gather")]
    kinds = {kind for one in gathered for kind, dims in programs.arrays(one.text) if words in dims}
    assert kinds == {"bf16"}


def test_temporaries_leave_room_for_weights_and_optimizer():
    assert gradient(CASES[1]).memory.temp_size_in_bytes <= 33 * GIB


@pytest.mark.parametrize("name", ["gradient", "apply"])
def test_arguments_are_donated(case, name):
    memory = programs.update(*case, name).memory
    returned = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert returned < programs.RETURNED_BYTES


@pytest.mark.parametrize("name", ["gradient", "apply"])
def test_nothing_calls_the_host(case, name):
    program = programs.update(*case, name)
    assert "callback" not in "".join(re.findall(r'custom_call_target="([^"]+)"', program.text))
    assert not {"infeed", "outfeed", "send", "recv"} & {one.opcode for one in program.operations}
