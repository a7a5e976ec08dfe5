"""Facts about the update's and the native sampler's programs, as XLA's CUDA compiler makes them for
an H100 and libtpu for TPUs.
"""

import re

import pytest

from minirl.plan.compile import parse_topology
from minirl.plan.fit import published_shape

from . import programs
from .programs import CASES, HYBRID, SHAPE, SMALL_HYBRID

TPUS = [("qwen2.5-coder-0.5b", name) for name in ("v5e:2x2", "v5p:2x2x1")]
TPU_HYBRID = ("qwen3.5-9b", "v5p:2x2x1")
GIB = 2**30


def of(*cases):
    return pytest.mark.parametrize("case", cases, ids="-".join)


def gradient(case):
    return programs.compiled(*case, "gradient")


def kinds_of(case, lines):
    """Return the types of arrays that these lines name and that have a place for every word."""
    words = published_shape(case[0]).vocab_size
    return {kind for line in lines for kind, dims in programs.arrays(line) if words in dims}


@of(*CASES, ("qwen2.5-coder-0.5b", "a800x1"), SMALL_HYBRID)
def test_attention_is_flash_attention_in_all_of_forward_and_backward(case):
    calls = re.findall(r'custom_call_target="__cudnn\$(\w+)"', gradient(case).text)
    # Prompts to themselves, answers to prompts, answers to themselves; forward twice by remat.
    assert (calls.count("fmhaSoftmax"), calls.count("fmhaSoftmaxBackward")) == (6, 3)


@of(*TPUS)
def test_attention_is_splash_attention_in_all_of_forward_and_backward(case):
    # The same; backward once for queries and once for keys.
    assert gradient(case).text.count('custom_call_target="tpu_custom_call"') == 3 * (2 + 2)


@of(*CASES)
def test_there_is_no_array_of_scores(case):
    columns = SHAPE.prompt_columns, SHAPE.answer_columns
    positions = {SHAPE.tokens, SHAPE.cells, *columns, SHAPE.answers * columns[1]}
    for kind, dims in set(programs.arrays(gradient(case).text)):
        assert sum(size in positions for size in dims) < 2, (kind, dims)


@of(*CASES, *TPUS)
def test_logits_and_the_gradient_of_the_embedding_are_summed_in_fp32(case):
    """They have a place for every word, and are no part of the table, which has the hidden size."""
    text = gradient(case).text
    lines = re.findall(r"= (\S+) (?:convolution|dot)\(", text)
    lines += re.findall(r'= (.+?) custom-call\(.*custom_call_target="__cublas', text)
    # A TPU's may be inside of fusions.
    assert kinds_of(case, lines) in ([{"f32"}] if case in CASES else [{"f32"}, set()])
    if case in CASES:
        assert kinds_of(case, re.findall(r"= (\S+) scatter\(", text)) <= {"f32"}


def test_the_unembedding_is_gathered_in_bf16_and_temporaries_leave_room_for_the_rest():
    operations = gradient(CASES[1]).operations
    gathered = [one.text for one in operations if one.opcode.startswith("all-gather")]
    assert kinds_of(CASES[1], gathered) == {"bf16"}
    assert gradient(CASES[1]).memory.temp_size_in_bytes <= 33 * GIB


@pytest.mark.parametrize("name", ["gradient", "apply"])
@of(*CASES, *TPUS)
def test_arguments_are_donated_and_nothing_calls_the_host(case, name):
    program = programs.compiled(*case, name)
    returned = program.memory.output_size_in_bytes - program.memory.alias_size_in_bytes
    assert returned < programs.RETURNED_BYTES
    if case in CASES:
        targets = re.findall(r'custom_call_target="([^"]+)"', program.text)
        assert "callback" not in "".join(targets)
        opcodes = {one.opcode for one in program.operations}
        assert not {"infeed", "outfeed", "send", "recv"} & opcodes


@of(*CASES, HYBRID)
def test_a_token_takes_few_kernels(case):
    """A layer of linear attention takes more of them than one of attention."""
    loop = programs.sampling_loop(programs.compiled(*case, "decode"))
    assert programs.kernels(loop) <= (740 if case == HYBRID else 510)


@of(*CASES, HYBRID, *TPUS, TPU_HYBRID)
def test_devices_do_not_wait_for_each_other_while_they_sample(case):
    """No collective anywhere in the loop over tokens, its condition included."""
    loop = programs.sampling_loop(programs.compiled(*case, "decode"))
    assert [one.text for one in loop if programs.is_collective(one)] == []


# On a TPU the cache fills most of the memory: there is no room for it in another order. Of a hybrid
# the states with which slots begin, those of their prompts, are copied on a mesh, side by side.
@pytest.mark.parametrize(
    ("case", "name", "share"),
    [
        *((case, "decode", 0.1) for case in CASES),
        (HYBRID, "decode", 0.15),
        *((case, name, 0.1) for case in TPUS for name in ("fill", "decode")),
        (TPU_HYBRID, "decode", 0.2),
    ],
)
def test_the_cache_is_updated_in_place(case, name, share):
    memory = programs.compiled(*case, name).memory
    kept = memory.output_size_in_bytes
    assert memory.alias_size_in_bytes > 0.99 * kept
    assert memory.temp_size_in_bytes < share * kept


@pytest.mark.parametrize("name", ["fill", "decode"])
@of(*CASES)
def test_it_fits_and_nothing_calls_the_host(case, name):
    program = programs.compiled(*case, name)
    memory = program.memory
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert total < 0.95 * parse_topology(case[1]).chip.memory_bytes
    assert "callback" not in "".join(re.findall(r'custom_call_target="([^"]+)"', program.text))
