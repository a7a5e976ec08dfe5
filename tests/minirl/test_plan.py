"""A plan's counts against what is compiled, and the devices it knows."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from minirl.config import Grpo, ModelSource, OptimizerConfig
from minirl.errors import UserError
from minirl.model.config import ModelConfig
from minirl.model.logprobs import LOGITS_BYTES
from minirl.model.sharding import choose_mesh, device_bytes, make_mesh, row_parts
from minirl.plan.compile import compile_program, parse_topology
from minirl.plan.fit import abstract_batch
from minirl.plan.memory import (
    abstract_model,
    abstract_opt_state,
    activation_bytes,
    count_parameters,
    cudnn_workspace,
    published_shape,
)
from minirl.plan.operations import Tokens, forward_flops, update_flops
from minirl.train.optimizer import make_optimizer
from minirl.train.update import Learner, TrainState, policy_objective

SHAPE = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
)
FP32 = ModelSource(dtype="float32")


def learner_of(shape, mesh, *, source=FP32, optimizer=None):
    graph, params, _ = abstract_model(shape, source, mesh)
    rule = make_optimizer(optimizer or OptimizerConfig(), steps=4)
    learner = Learner(graph, policy_objective(Grpo(), temperature=1.0), rule, mesh=mesh)
    return learner, TrainState(params, abstract_opt_state(rule, params, mesh))


def compiled(name, lowered):
    return compile_program(name, lowered, options={})


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_compiled_arguments(moments):
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    learner, state = learner_of(SHAPE, mesh, optimizer=OptimizerConfig(moments=moments))
    batch = abstract_batch(Tokens(4, 8, 8, 8), mesh)
    programs = {name: compiled(name, low) for name, low in learner.lower(state, batch)}
    weights, optimizer = map(device_bytes, state)
    # The weights, the optimizer's state, and the gradient, which is split as the weights are.
    assert programs["apply"].arguments == pytest.approx(2 * weights + optimizer, abs=8)
    assert programs["accumulate"].arguments == pytest.approx(2 * weights, abs=64)
    assert programs["gradient"].outputs == pytest.approx(weights, abs=256)  # and the statistics
    # All but the norms and biases is split over all devices.
    assert weights < 1.1 * 4 * count_parameters(state.params) / 8
    per_number = {"float32": 8, "bfloat16": 4}[moments]
    # Besides, a few counts and the norms of the last gradients.
    assert optimizer == pytest.approx(per_number * weights / 4, abs=256)


TOKENS = Tokens(prompts=2, prompt=96, answers=4, answer=64)


def counted_flops(shape, remat):
    """Return what XLA counts of the gradient of `TOKENS`."""
    learner, state = learner_of(shape, None, source=ModelSource(dtype="float32", remat=remat))
    _, lowered = next(learner.lower(state, abstract_batch(TOKENS, None)))
    return lowered.compile().cost_analysis()["flops"]


def test_flops_are_those_of_the_unrolled_program():
    expected = update_flops(SHAPE, TOKENS, remat="none", causal=False)
    # Of a prompt only keys and values are used, so an unrolled last layer computes nothing else.
    last = replace(SHAPE, num_hidden_layers=1)
    keys_and_values = 2 * SHAPE.hidden_size * 2 * SHAPE.num_key_value_heads * SHAPE.head_dim
    unused = forward_flops(last, replace(TOKENS, answers=0), causal=False)
    unused -= keys_and_values * TOKENS.prompts * TOKENS.prompt
    assert counted_flops(SHAPE, "none") == pytest.approx(expected - 3 * unused, rel=0.05)


def test_flops_with_recomputation_are_those_of_a_loop_s_body():
    # XLA counts a loop's body once, so the program of three layers counts as one layer.
    one = replace(SHAPE, num_hidden_layers=1)
    expected = update_flops(one, TOKENS, remat="full", causal=False)
    found = counted_flops(replace(SHAPE, num_hidden_layers=3), "full")
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_program_does_not_grow_with_depth(remat):
    def lines(depth):
        source = ModelSource(dtype="float32", remat=remat)
        learner, state = learner_of(replace(SHAPE, num_hidden_layers=depth), None, source=source)
        batch = abstract_batch(Tokens(1, 8, 2, 8), None)
        _, lowered = next(learner.lower(state, batch))
        return len(lowered.as_text().splitlines())

    assert lines(12) == lines(48)


def gradient_program(shape, mesh, *, dtype="float32", remat="full", prompt=256, answers=4):
    source = ModelSource(dtype=dtype, remat=remat)
    learner, state = learner_of(shape, mesh, source=source)
    groups = row_parts(mesh)
    batch = abstract_batch(Tokens(groups, prompt, groups * answers, 256), mesh)
    return compiled(*next(learner.lower(state, batch)))


def test_a_gradient_is_held_once():
    """Prompts and answers pass a layer together: no second tree is added to the first."""
    deep = [replace(SHAPE, num_hidden_layers=depth, intermediate_size=2048) for depth in (2, 10)]
    short, long = (gradient_program(one, None, prompt=32, answers=1) for one in deep)
    a_layer = (long.outputs - short.outputs) / 8
    inputs = 4 * (32 + 256) * SHAPE.hidden_size  # what remat=full keeps of a layer
    assert a_layer > 3e6 > 10 * inputs
    assert (long.temporaries - short.temporaries) / 8 < inputs + a_layer / 10


@pytest.mark.parametrize(
    ("remat", "dtype", "mesh", "words"),
    [
        ("full", "float32", None, 4096),
        ("full", "bfloat16", {"fsdp": 4, "tensor": 2}, 64),
        ("dots", "float32", None, 64),
        ("none", "float32", {"fsdp": 4, "tensor": 2}, 64),
    ],
)
def test_activations_are_estimated_within_a_factor_of_two(remat, dtype, mesh, words):
    shape = replace(SHAPE, num_hidden_layers=6, vocab_size=words)
    place = make_mesh(mesh) if mesh else None
    found = gradient_program(shape, place, dtype=dtype, remat=remat).temporaries
    tensor = 2 if mesh else 1
    estimate = activation_bytes(
        shape, Tokens(1, 256, 4, 256), remat=remat, itemsize=jnp.dtype(dtype).itemsize,
        tensor=tensor, logits=4 * 4 * 256 * words / tensor,
    )  # fmt: skip
    assert found / 2 < estimate < 2 * found


def test_activations_of_7b_on_eight_gpus():
    """XLA for an H100 plans 20.3 and 33.4 GiB, for a TPU in its place 30.8 and 57.5."""
    for answers, least, most in ((4, 20.3, 30.8), (8, 33.4, 57.5)):
        tokens = Tokens(1, 6144, answers, 8192)
        found = activation_bytes(
            published_shape("qwen2.5-coder-7b"), tokens, remat="full", itemsize=2, tensor=1,
            logits=LOGITS_BYTES,
        )  # fmt: skip
        assert least < found / 2**30 < most


def test_kernels_skip_half_of_the_square():
    tokens = Tokens(prompts=1, prompt=100, answers=0, answer=0)
    full = forward_flops(SHAPE, tokens, causal=False)
    width = SHAPE.num_attention_heads * SHAPE.head_dim
    square = 4 * SHAPE.num_hidden_layers * width * 100**2
    assert full - forward_flops(SHAPE, tokens, causal=True) == square / 2


def test_the_workspace_of_cudnn_is_what_it_plans():
    """What cuDNN's own plans for sm_90 ask for, in MiB, for the three calls of a 7B update."""
    shape = published_shape("qwen2.5-coder-7b")
    planned = {Tokens(1, 6144, 0, 0): 169, Tokens(1, 6144, 8, 8192): 1799}
    for tokens, size in planned.items():
        assert cudnn_workspace(shape, tokens, tensor=1) / 2**20 == pytest.approx(size, abs=1)
    halved = cudnn_workspace(shape, Tokens(1, 6144, 8, 8192), tensor=2)
    assert halved / 2**20 == pytest.approx(1799 / 2, abs=1)


def test_more_devices_than_prompts_share_layers():
    assert choose_mesh(16, prompts=64, heads=28) == {"fsdp": 16, "tensor": 1}
    assert choose_mesh(256, prompts=64, heads=28) == {"fsdp": 64, "tensor": 4}
    # 8 does not divide 12 heads: nothing that shares enough does.
    assert choose_mesh(64, prompts=8, heads=12) == {"fsdp": 8, "tensor": 8}
    assert choose_mesh(64, prompts=16, heads=12) == {"fsdp": 16, "tensor": 4}
    assert choose_mesh(1, prompts=1, heads=4) == {"fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("name", "size", "memory"),
    [("v5e:4x4", 16, 15.75), ("v5p:4x4x4", 64, 95.74), ("h200x8", 8, 139.8)],
)
def test_topologies(name, size, memory):
    topology = parse_topology(name)
    assert topology.size == size
    assert topology.chip.memory_bytes / 2**30 == pytest.approx(memory, abs=0.1)


@pytest.mark.parametrize(
    "name", ["v9:4x4", "h100", "h100:8", "v5ex8", "v5e:0x4", "h100x0", "h100x12", "", "v5e:4"]
)
def test_unknown_topologies_are_refused(name):
    with pytest.raises(UserError, match="--topology"):
        parse_topology(name)


def test_a_process_has_a_part_of_the_devices():
    parts = {
        "h100x16": "h100x8",
        "h100x1": "h100x1",
        "v5p:4x4x4": "v5p:2x2x1",
        "v5e:1x1": "v5e:1x1",
    }
    for name, part in parts.items():
        assert parse_topology(name).host.name == part


@pytest.mark.parametrize(
    ("name", "billions"),
    [("0.5B", 0.494), ("1.5B", 1.544), ("7B", 7.616), ("14B", 14.770), ("32B", 32.764)],
)
def test_published_shapes_have_the_published_parameters(name, billions):
    # As the models' cards give them: 0.49, 1.54, 7.61, 14.7 and 32.5 to 32.8 billion.
    shape = published_shape(f"Qwen/Qwen2.5-Coder-{name}-Instruct")
    _, params, _ = abstract_model(shape, ModelSource(), None)
    assert count_parameters(params) / 1e9 == pytest.approx(billions, abs=0.001)


def test_an_unknown_model_is_refused():
    with pytest.raises(UserError, match="no such model"):
        published_shape("gpt-7")
