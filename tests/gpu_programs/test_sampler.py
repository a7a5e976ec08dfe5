"""Facts about the native sampler's programs, as XLA's CUDA compiler makes them for an H100."""

from __future__ import annotations

import re

import pytest

from minirl.plan.compile import parse_topology

from . import programs
from .programs import CASES, HYBRID


@pytest.fixture(params=[*CASES, HYBRID], ids="-".join)
def case(request):
    return request.param


def test_a_token_takes_few_kernels(case):
    """A layer of linear attention takes more of them than one of attention."""
    loop = programs.sampling_loop(programs.sampler(*case, "decode"))
    assert programs.kernels(loop) <= (740 if case == HYBRID else 510)


def test_devices_do_not_wait_for_each_other_while_they_sample(case):
    """No collective anywhere in the loop over tokens, its condition included."""
    loop = programs.sampling_loop(programs.sampler(*case, "decode"))
    assert [one.text for one in loop if programs.is_collective(one)] == []


def test_the_cache_is_updated_in_place(case):
    """But for states with which slots begin, those of their prompts: on a mesh they are copied."""
    memory = programs.sampler(*case, "decode").memory
    kept = memory.output_size_in_bytes
    assert memory.alias_size_in_bytes > 0.99 * kept
    assert memory.temp_size_in_bytes < (0.15 if case == HYBRID else 0.1) * kept


@pytest.mark.parametrize("name", ["fill", "decode"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_it_fits_and_nothing_calls_the_host(case, name):
    program = programs.sampler(*case, name)
    memory = program.memory
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert total < 0.95 * parse_topology(case[1]).chip.memory_bytes
    assert "callback" not in "".join(re.findall(r'custom_call_target="([^"]+)"', program.text))
