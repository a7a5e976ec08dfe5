"""A plan's counts against what is compiled, and the devices it knows."""

from functools import partial

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from minirl.config import (
    BatchingConfig,
    LoraConfig,
    ModelSource,
    OptimizerConfig,
    SamplerConfig,
    SftConfig,
    TrainConfig,
)
from minirl.exchange import UserError
from minirl.model.lora import add_adapters
from minirl.model.sharding import choose_mesh, device_bytes, make_mesh
from minirl.plan.compile import compile_program, parse_topology
from minirl.plan.fit import Devices, Learning, WarmStart, abstract_model, published_shape
from minirl.train.batching import BatchShape
from minirl.train.supervised import Demonstration, Lessons, supervise
from minirl.train.update import abstract_batch
from minirl.types import Request
from tests.vectors import read

from . import toy

SHAPE = toy.CONFIG.model_copy(
    update={"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
)
LIMITS = SamplerConfig()
TOPOLOGIES = read("topologies")


def learning(shape, mesh=None, *, dtype="float32", remat="full", moments="float32", **more):
    train = TrainConfig(steps=4, optimizer=OptimizerConfig(moments=moments), **more)
    source = ModelSource(dtype=dtype, remat=remat)
    model = abstract_model(shape, source, mesh, lora=train.lora)
    return Learning(model, train, LIMITS, Devices(jax.devices(), 2.0**34), evaluation=LIMITS)


def programs_of(phase, *shape):
    return phase.learner.lower(phase.state, BatchShape(*shape))


def test_bytes_are_those_of_the_compiled_programs():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    shape = SHAPE.model_copy(update={"num_hidden_layers": 6})
    phase = learning(shape, mesh, dtype="bfloat16", moments="bfloat16")
    lowered = programs_of(phase, 1280, 1, 256, 4, 256)
    programs = {name: compile_program(low) for name, low in lowered.items()}
    weights, optimizer = map(device_bytes, phase.state[:2])
    # The weights, the optimizer's state, and the gradient, which is split as the weights are.
    assert programs["apply"].arguments == pytest.approx(2 * weights + optimizer, abs=8)
    # The sum of gradients is donated; statistics are left, and four bytes of each token.
    assert programs["gradient"].outputs < 4 * 1280 + 256
    # All but the norms and biases is split over all devices.
    assert weights < 1.1 * 4 * phase.parameters / 8
    # Moments of two bytes and of four; besides, a few counts and the norms of the last gradients.
    assert optimizer == pytest.approx(1.5 * weights, abs=256)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_an_average_takes_four_bytes_of_each_trained_parameter(lora):
    mesh, more = make_mesh({"fsdp": 4, "tensor": 2}), {"dtype": "bfloat16", "lora": lora}
    plain, averaged = (learning(SHAPE, mesh, average=average, **more) for average in (None, 0.9))
    trained = jax.tree.leaves(plain.state.params)
    assert {leaf.dtype.name for leaf in trained} == {"float32"}
    assert averaged.memory == plain.memory | {"average": device_bytes(trained)}


def test_a_batch_is_split_by_rows_alone():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    target_XT = abstract_batch(BatchShape(64, 1, 8, 2, 16), mesh).target_XT
    assert target_XT.shape == (4, 64)
    assert target_XT.sharding.shard_shape(target_XT.shape) == (1, 64)


def test_flops_are_those_of_the_unrolled_program():
    prompts, prompt, answers, answer = 2, 96, 4, 64
    computed = prompts * prompt + answers * answer  # without padding
    lowered = programs_of(learning(SHAPE, remat="none"), computed, prompts, prompt, 2, answer)
    found = lowered["gradient"].compile().cost_analysis()["flops"]
    # Two a weight and token (arXiv:2001.08361, section 2.1), and in attention four a query, key and
    # element of a head; twice as many back. Logits are computed again in the backward pass.
    attention = 2 * SHAPE.hidden_size * (4 + 2) * SHAPE.head_dim
    weights = SHAPE.num_hidden_layers * (
        attention + 3 * SHAPE.hidden_size * SHAPE.intermediate_size
    )
    pairs = prompts * prompt**2 + answers * answer * (prompt + answer)
    width = SHAPE.num_attention_heads * SHAPE.head_dim
    forward = 2 * weights * computed + 4 * SHAPE.num_hidden_layers * width * pairs
    logits = 2 * SHAPE.vocab_size * SHAPE.hidden_size * answers * answer
    expected = 3 * forward + 4 * logits
    assert found == pytest.approx(expected, rel=0.05)


def test_a_program_does_not_grow_with_depth_and_holds_a_gradient_once():
    """Beside the sum of gradients there is one gradient, that of the micro-batch."""
    wide = {"intermediate_size": 2048}
    deep = [{"num_hidden_layers": depth, **wide} for depth in (12, 24)]
    phases = [learning(SHAPE.model_copy(update=changes)) for changes in deep]
    lowered = [programs_of(one, 288, 1, 32, 1, 256)["gradient"] for one in phases]
    assert len({len(one.as_text().splitlines()) for one in lowered}) == 1
    gradient = device_bytes(phases[1].state.params)
    assert gradient < compile_program(lowered[1]).temporaries < 1.5 * gradient


def test_an_effort_to_compile_is_that_of_one_program():
    """Every supported JAX takes it, and the run's own programs are compiled as before."""
    before = jax.config.values["jax_optimization_level"]
    assert compile_program(jax.jit(lambda x: x + 1).lower(1.0), level="O1").arguments == 4
    assert jax.config.values["jax_optimization_level"] == before


@pytest.fixture
def compiled(tmp_path):
    """Return what names the programs that have been compiled, in a cache of their own."""
    folder = tmp_path / "compiled"
    # Each is written: whatever a machine compiles it in, and whatever was compiled before.
    jax.clear_caches()
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in settings}

    def use(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    use(settings)
    yield lambda: {path.name for path in folder.glob("*-cache")}
    use(before)


def test_a_run_reads_what_its_plan_compiled(tmp_path, compiled):
    """The programs of the model that is measured first, and those of the warm start."""
    model, lora = toy.model(layers=1), LoraConfig(rank=2)
    sizes = BatchingConfig(micro_batch_tokens=64)
    warm = SftConfig(steps=1, groups_per_step=2, group_size=2, lora=lora, batching=sizes)
    limits = SamplerConfig(slots=2, max_prompt_tokens=20, max_response_tokens=20)
    measured = limits.model_copy(update={"max_prompt_tokens": 48})
    source, train = ModelSource(dtype="float32"), TrainConfig(lora=lora)
    base, adapted = (abstract_model(model.config, source, None, lora=one) for one in (None, lora))
    taught = [Demonstration(((toy.Message("user", "ABCD"),),), (text,)) for text in ("EF", "GH")]
    lessons = Lessons.of(taught, toy.Tokenizer(), warm, seed=0)
    devices = Devices(jax.local_devices()[:1], 2.0**34)
    for phase in (
        Learning(adapted, train, limits, devices, evaluation=measured, first=base),
        WarmStart(adapted, warm, limits, devices, lessons),
    ):
        phase.fit(lambda *_: None)
    planned = compiled()
    # So that nothing is found in memory.
    jax.clear_caches()
    sampler = toy.sampler(model, slots=2, max_prompt_tokens=48, max_response_tokens=20)
    toy.run(sampler, [Request(e, tuple(range(4, 40 + e)), 4) for e in range(2)])
    add_adapters(model, lora, seed=0)
    supervise(model, lessons, warm, folder=tmp_path / "warm")
    new = {name.partition("-")[0] for name in compiled() - planned}
    large = {"jit_fill", "jit_decode", "jit_accumulate", "jit_apply"}
    assert large <= {name.partition("-")[0] for name in planned}
    assert not new & large


def test_the_cache_of_a_plan_holds_the_longest_episode_that_fits():
    """It needs 26 MB, and a cache's share of the memory is a quarter of 60."""
    model, long = toy.model(layers=1), {"slots": 2, "max_prompt_tokens": 200_000}
    train = TrainConfig(batching=BatchingConfig(micro_batch_tokens=64))
    limits = SamplerConfig(slots=2, max_prompt_tokens=20, max_response_tokens=20)
    plan = Learning(
        abstract_model(model.config, ModelSource(dtype="float32"), None), train, limits,
        Devices(jax.local_devices()[:1], 6e7), evaluation=limits.model_copy(update=long),
    ).fit(lambda *_: None)  # fmt: skip
    assert plan.cache_gb is not None
    assert plan.cache_gb > 0.015
    # A smaller cache is refused.
    toy.sampler(model, **long, max_response_tokens=20, cache_gb=plan.cache_gb)


def test_more_devices_than_prompts_share_layers():
    choose = partial(choose_mesh, width=3584)
    assert choose(16, prompts=64, heads=28) == {"data": 1, "fsdp": 16, "tensor": 1}
    assert choose(256, prompts=64, heads=28) == {"data": 1, "fsdp": 64, "tensor": 4}
    # 8 does not divide 12 heads: nothing that shares enough does.
    assert choose(64, prompts=8, heads=12) == {"data": 1, "fsdp": 8, "tensor": 8}
    assert choose(64, prompts=16, heads=12) == {"data": 1, "fsdp": 16, "tensor": 4}
    assert choose(1, prompts=1, heads=4) == {"data": 1, "fsdp": 1, "tensor": 1}
    # Matrices are split over as many as divide the width, or every device would hold them whole.
    assert choose(24, prompts=64, heads=28) == {"data": 3, "fsdp": 8, "tensor": 1}
    assert choose(80, prompts=64, heads=28) == {"data": 5, "fsdp": 8, "tensor": 2}


@pytest.mark.parametrize("case", TOPOLOGIES["known"], ids=lambda case: case["name"])
def test_topologies(case):
    topology = parse_topology(case["name"])
    assert topology.size == case["size"]
    assert topology.chip.memory_bytes / 2**30 == pytest.approx(case["memory"], abs=0.1)
    assert case.get("part") in (None, topology.host.name)


@pytest.mark.parametrize("name", TOPOLOGIES["unknown"])
def test_unknown_topologies_are_refused(name):
    with pytest.raises(UserError, match="--topology"):
        parse_topology(name)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("0.5B", 0.494), ("7B", 7.616), ("32B", 32.764)],
)
def test_published_shapes_have_the_published_parameters(name, billions):
    # As the models' cards give them: 0.49, 7.61 and 32.5 to 32.8 billion.
    phase = learning(published_shape(f"Qwen/Qwen2.5-Coder-{name}-Instruct"))
    assert phase.parameters / 1e9 == pytest.approx(billions, abs=0.001)
    with pytest.raises(UserError, match="no such model"):
        published_shape("gpt-7")
