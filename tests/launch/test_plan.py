"""The command `launch.plan`, and what a training job checks of a device's memory."""

import functools
import gc
import json
import logging
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from launch import learner, plan
from launch.build import SqlSide
from launch.config import load_config
from launch.files import WARM, WARM_MODEL
from launch.learner import model_folder
from launch.tiny import tiny_shape
from launch.warm_start import refuse_early, start_model
from minirl.model.sharding import device_bytes, make_mesh
from minirl.plan import compile as compilers
from minirl.plan import fit as planner
from minirl.plan.fit import Devices, Plan, published_shape

from .conftest import mistake

QWEN = Path(__file__).parents[1] / "data" / "reference" / "qwen2"
SMALL = (
    "model.tiny={vocab_size: 512, hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2, "
    "kv_heads: 2}",
    "sampler={max_prompt_tokens: 64, max_response_tokens: 48, max_reply_tokens: 24, slots: 8}",
    "train.prompts_per_step=8",
    "train.group_size=4",
)

# Data that is soon made, for what reads any.
FEW = (
    "data.demo={train_databases: 2, validation_databases: 1, test_databases: 1, "
    "questions_per_database: 12}"
)


def config(*overrides):
    return load_config("progress-demo.yaml", [*SMALL, *overrides])


def make(topology="cpux1", *overrides, progress=lambda *_: None):
    return plan.make_plan(config(*overrides), topology, progress=progress, model=None)


@pytest.fixture(scope="module")
def made():
    """The one plan whose programs are compiled here, and what was said meanwhile."""
    said = []

    def progress(done, total, status):
        assert 0 <= done <= total
        said.append(status)

    return make("cpux4", progress=progress), said


@pytest.fixture
def uncompiled(monkeypatch):
    """Return what lets a program take what it is given, and a gradient so much for each token."""

    def use(token_bytes: float = 0.0) -> None:
        def described(lowered, **_options):
            batch = next((one for one in lowered.in_avals[0] if hasattr(one, "ids_XT")), None)
            tokens = 0 if batch is None else batch.ids_XT.size
            given = sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(lowered.in_avals))
            return compilers.Program(given, 0.0, token_bytes * tokens)

        monkeypatch.setattr(planner, "compile_program", described)

    # What is not compiled need not be lowered either: what it is given is known when it is traced.
    monkeypatch.setattr(jax.stages.Traced, "lower", lambda traced, **_: traced)
    use()
    return use


def test_a_plan_says_what_there_is_to_know(made):
    found, said = made
    assert (found["devices"], found["mesh"]) == (4, {"data": 1, "fsdp": 4, "tensor": 1})
    train, warm = found["phases"]["train"], found["phases"]["warm_start"]
    memory = train["update_memory_bytes"]
    # AdamW keeps two numbers beside each weight.
    assert memory["optimizer"] == pytest.approx(2 * memory["weights"], abs=64)
    # The demo's own; `auto` would be two of the eight groups on each of four devices.
    assert train["micro_batch_tokens"] == 2048
    assert memory["gradient"] == memory["weights"]
    assert (found["processes"], train["sampler_mesh"]) == (1, {"data": 4, "fsdp": 1, "tensor": 1})
    assert any("gradient" in status for status in said)
    # The demo's warm start has the same weights and optimizer, no sampler and no reference.
    assert {name: warm["update_memory_bytes"][name] for name in ("weights", "gradient")} == {
        name: memory[name] for name in ("weights", "gradient")
    }
    assert warm["micro_batch_tokens"] == 2048
    assert warm["generation_memory_bytes"] == {}
    json.dumps(found)


SERVERS = ("rollout.sglang.urls=[http://gpu1:30000]",)


@pytest.mark.usefixtures("uncompiled")
def test_a_plan_shows_a_warm_start_and_a_sampler_where_there_is_one(made, capsys):
    plan._show(made[0])
    said = capsys.readouterr().out
    assert "warm_start.batching.micro_batch_tokens=2048" in said
    assert all(phase in said for phase in ("warm start", "Samplers"))
    found = make("cpux1", *SERVERS, "warm_start=null")
    [train] = found["phases"].values()
    assert (train["generation_memory_bytes"], train["sampler_mesh"]) == ({}, None)
    plan._show(found)
    said = capsys.readouterr().out
    assert not any(phase in said for phase in ("warm", "Samplers"))


def test_a_plan_shares_gpus_between_the_learner_and_its_servers():
    """Two layers of one head of 16 in bfloat16: 128 bytes a token."""
    sizes = {"num_key_value_heads": 1, "head_dim": 16}
    layers = {"num_hidden_layers": 2}
    plain = tiny_shape(config().model.tiny).model_copy(update=sizes | layers)

    def servers(*overrides, memory=80e9, shape=plain):
        asked = config("model.dtype=bfloat16", *overrides)
        return plan._servers(asked, shape, memory, 10**9, learner=31.6e9)

    found = servers("rollout.sglang.launch=2")
    assert found["apart"]["cache_tokens"] == (0.85 * 80e9 - 2e9) // 128
    assert found["shared"]["xla_client_mem_fraction"] == 0.4
    assert found["shared"]["static_bytes"] == pytest.approx(0.8 * 0.6 * 80e9)
    assert found["shared"]["cache_tokens"] == (0.8 * 0.6 * 80e9 - 2e9) // 128
    two = servers("rollout.sglang.launch=1", 'rollout.sglang.devices=["0,1"]')
    assert two["apart"]["cache_tokens"] == (2 * 0.85 * 80e9 - 2e9) // 128
    # States of linear attention take nine tenths of what keys and values do, of one layer of four.
    hybrid = published_shape("qwen3.5-0.8b").model_copy(update=sizes | {"num_hidden_layers": 8})
    mixed = servers("rollout.sglang.launch=2", shape=hybrid)["apart"]
    assert mixed["cache_tokens"] == (0.85 * 80e9 - 2e9) / 1.9 // 128
    none = servers("rollout.sglang.launch=1", memory=31e9)["shared"]
    assert "no room" in plan._server_line("shared", none)
    assert "mem-fraction-static=0.8" in plan._server_line("shared", found["shared"])
    assert servers() == servers(*SERVERS) == {}


def learning(*overrides) -> Any:
    """Build the learning of a job on four devices."""
    own, shape = jax.devices()[:4], tiny_shape(config().model.tiny)
    place = make_mesh({"fsdp": 4}, own), Devices(own, 2.0**34)
    return learner.phase_of(config(*overrides), shape, "train", *place)


@functools.cache
def held(*overrides):
    """Return what is held while the update runs, and while the sampler does."""
    found = learning(*overrides).fit(lambda *_: None)
    return found.update_memory_bytes, found.generation_memory_bytes


def test_adapters_take_less_and_frozen_weights_are_copied_once():
    whole, _ = held()
    update, sampler = held("train.lora.rank=2")
    assert update["optimizer"] < 0.5 * whole["optimizer"]
    assert update["gradient"] < 0.5 * whole["gradient"]
    # The frozen weights lie there split, and whole for a sampler of several devices.
    assert update["weights"] > whole["weights"]
    copy = sampler["sampler's weights"]
    assert copy == pytest.approx(4 * whole["weights"], rel=0.2)
    # Adapters lie beside it while the sampler works.
    assert 0.9 * copy < update["sampler's frozen weights"] < copy


def test_a_sampler_shares_its_copy_over_few_devices(monkeypatch):
    copy = held()[1]["sampler's weights"]
    monkeypatch.setattr("minirl.sample.weights.COPY_SHARE", 0.9 * copy / 2**34)
    shared, *_ = learning().place_sampler(held_bytes=0)
    assert dict(shared.mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 2}
    assert device_bytes(nnx.state(shared)) < copy


AUTO = "train.batching.micro_batch_tokens=auto"
WARM_AUTO = "warm_start.batching.micro_batch_tokens=auto"


def test_the_largest_micro_batch_that_fits_is_taken_or_a_phase_is_refused_by_name(
    uncompiled, monkeypatch
):
    uncompiled(2**30 / 100)
    room = 6.0 * 2**30
    monkeypatch.setitem(compilers.CHIPS, "cpu", compilers.Chip("cpu", room / 0.95))
    told = mistake(make, "cpux1", AUTO)
    assert re.match(rf"the warm start does not fit: .* 6\.0 GiB .* {WARM_AUTO}", told)
    told = mistake(make, "cpux1", WARM_AUTO)
    assert re.match(rf"learning does not fit: .* free; .* {AUTO}", told)
    found = make("cpux1", AUTO, WARM_AUTO)
    assert found["room_bytes"] == pytest.approx(room)
    for phase in found["phases"].values():
        assert sum(phase["update_memory_bytes"].values()) <= room
    # Eight groups of 63 + 4 x 48 tokens would be 2,040: a quarter of it fits, and some more.
    assert 450 <= found["phases"]["train"]["micro_batch_tokens"] <= 600
    # Two groups of 8 x (63 + 48) would be 1,776 tokens, of which eighths are tried.
    assert found["phases"]["warm_start"]["micro_batch_tokens"] == 1776 * 2 // 8


def test_what_weights_alone_exceed_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(planner, "compile_program", None)
    monkeypatch.setitem(compilers.CHIPS, "cpu", compilers.Chip("cpu", 1000.0))
    told = mistake(make, "cpux1", "warm_start=null")
    assert re.match(r"learning does not fit: weights .* \+ gradient .* free", told)
    # Nothing is advised that is set.
    own = ("warm_start=null", AUTO, "model.remat=full", "train.lora.rank=16")
    assert "free; take fewer sampler.slots" in mistake(make, "cpux1", *own)


def test_the_example_of_the_help_is_a_command(monkeypatch, made, capsys, tmp_path):
    plan.main(["--help"])
    told = capsys.readouterr().out.splitlines()
    [example] = [shlex.split(line) for line in told if line.startswith(" python -m launch.plan")]
    asked = []
    monkeypatch.setattr(plan, "make_plan", lambda *given, **_: asked.append(given[1]) or made[0])
    file = tmp_path / "plan.json"
    words = [*example[example.index("launch.plan") + 1 :], "--json", str(file)]
    plan.main(words)
    assert asked == ["v5e:2x2"]
    assert json.loads(file.read_text()) == made[0]
    told = f"--json {file}: is there already, and is not written over"
    assert told in mistake(plan.main, words)
    assert len(asked) == 1


def test_a_model_that_is_not_there_can_be_named(tmp_path):
    lost = load_config("progress.yaml", [f"model.path={tmp_path}"])
    assert "--model qwen2.5-coder-7b" in mistake(learner.model_shape, lost)
    assert learner.model_shape(lost, "qwen2.5-coder-7b").num_hidden_layers == 28


@pytest.mark.parametrize(
    ("name", "extra", "absent"),
    [("v5e:4x4", "tpu", "libtpu"), ("h100x8", "plan-gpu", "jax_plugins")],
)
def test_the_compiler_is_asked_for(monkeypatch, name, extra, absent):
    monkeypatch.setitem(sys.modules, absent, None)
    topology = compilers.parse_topology(name)
    assert f"[{extra}]" in mistake(compilers.described_devices, topology)


@pytest.fixture
def free(monkeypatch):
    """Let a device have room for so many bytes, beside which no model is small."""

    def given(size):
        monkeypatch.setattr(
            "minirl.run.memory.free_bytes", lambda _device: size / learner._CPU_FILLED
        )
        monkeypatch.setattr(learner, "_SMALL_SHARE", 0)

    return given


def kept_plan(folder):
    return Plan(**json.loads((folder / learner.PLAN).read_text()))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("phase", "other", "setting", "tokens", "part", "named"),
    [
        # On each of eight devices one of the eight groups, or of two groups one at most.
        ("train", "warm_start", AUTO, 63 + 4 * 48, "cache", "learning"),
        ("warm_start", "train", WARM_AUTO, 8 * (63 + 48), "temporaries", "the warm start"),
    ],
)
def test_a_phase_is_planned_once_in_its_folder_and_refused_where_it_does_not_fit(
    tmp_path, free, monkeypatch, caplog, phase, other, setting, tokens, part, named
):
    given = ("sampler.cache_gb=0.001", setting)
    asked, taken = config(*given), 2.0**33
    monkeypatch.setattr("minirl.run.memory.resident_bytes", lambda: taken)
    folder = tmp_path / "run"
    free(2.0**30)
    with caplog.at_level(logging.INFO):
        planned = learner.plan_memory(asked, folder, phase)
    assert getattr(planned, phase).batching.micro_batch_tokens == tokens
    assert f"micro-batches of up to {tokens} tokens" in caplog.text
    assert getattr(planned, other) == getattr(asked, other)
    kept = kept_plan(folder).largest
    assert {"process", "weights", "optimizer", part} <= kept.keys()
    # Each of eight devices of this process has a part of what it has taken already.
    assert kept["process"] == taken / 8
    assert 0 < sum(kept.values()) < 2**30 + taken / 8
    # A resumed run has the same micro-batches, whatever memory is free.
    free(10_000.0)
    assert learner.plan_memory(asked, folder, phase) == planned
    # On devices with less memory, or by other settings, it is planned again.
    with monkeypatch.context() as smaller:
        smaller.setattr("minirl.run.memory.capacity_bytes", lambda _device: 2.0**30)
        assert f"{named} does not fit" in mistake(learner.plan_memory, asked, folder, phase)
    other_remat = config("model.remat=full", *given)
    assert f"{named} does not fit" in mistake(learner.plan_memory, other_remat, folder, phase)
    assert learner.plan_memory(asked, folder, phase) == planned
    found = kept_plan(folder)
    (folder / learner.PLAN).unlink()
    # A process that does not see the file yet, on a disk that hosts share, asks the first one.
    with monkeypatch.context() as hosts:
        hosts.setattr("minirl.run.distributed.from_first", lambda _make: found)
        assert learner.plan_memory(asked, folder, phase) == planned
    told = mistake(learner.plan_memory, asked, folder, phase)
    assert told.startswith(f"{named} does not fit")
    assert not (folder / learner.PLAN).exists()


@pytest.mark.usefixtures("uncompiled")
def test_a_warm_start_that_does_not_fit_is_refused_before_its_answers_are_known(
    tmp_path, free, monkeypatch
):
    """Measuring a trained model and screening by it take an hour."""
    own = ("warm_start.answers=own", "warm_start.mistake_share=0", "warm_start.repair_share=0")
    asked = config(FEW, "model.tiny=null", f"model.path={QWEN}", f"run.dir={tmp_path}", *own)
    with SqlSide(asked, tmp_path) as sql:
        free(2.0**30)
        refuse_early(asked, sql, ())
        learner.plan_memory(asked, tmp_path / WARM, "warm_start")
        free(10_000.0)
        refuse_early(asked, sql, ())
        # Where it is resumed there is less memory.
        monkeypatch.setattr("minirl.run.memory.capacity_bytes", lambda _device: 2.0**30)
        assert "the warm start does not fit" in mistake(refuse_early, asked, sql, ())
        (tmp_path / WARM_MODEL).mkdir(parents=True)
        refuse_early(asked, sql, ())


def test_a_warm_start_gives_back_what_it_took(tmp_path):
    """Learning has a plan of its own, without it; nothing waits for the garbage collector."""
    short = ("warm_start.steps=2", "warm_start.checkpoint_every=1", "warm_start.examples=16")
    asked = config(FEW, f"run.dir={tmp_path}", *short)
    with SqlSide(asked, tmp_path) as sql:
        train = sql.examples("train")
        before = {id(array) for array in jax.live_arrays()}
        gc.disable()
        try:
            source = model_folder(sql, train)
            made = start_model(asked, sql, train, source, ())
            left = [array.shape for array in jax.live_arrays() if id(array) not in before]
        finally:
            gc.enable()
    assert (made / "model.safetensors").exists()
    assert left == []


@pytest.mark.usefixtures("uncompiled")
def test_a_resumed_run_has_the_cache_that_was_planned_and_none_with_servers(
    tmp_path, free, monkeypatch
):
    monkeypatch.setattr("minirl.run.memory.resident_bytes", lambda: 0)
    free(2.0**30)
    asked = config("sampler.cache_gb=null")
    planned = learner.plan_memory(asked, tmp_path)
    # A quarter of a CPU's memory, of which each of eight devices has a part.
    assert planned.sampler.cache_gb == pytest.approx(2.0**30 / 4 / 8 / 1e9)
    free(2.0**40)
    assert learner.plan_memory(asked, tmp_path) == planned
    free(2.0**32)
    monkeypatch.setattr("minirl.plan.fit.plan_cache", None)
    served = tmp_path / "served"
    assert learner.plan_memory(config(*SERVERS), served).sampler.cache_gb is None
    kept = kept_plan(served)
    assert {"weights", "gradient", "temporaries"} <= set(kept.update_memory_bytes)
    assert kept.generation_memory_bytes == {}


def test_more_chips_than_prompts_share_a_part_of_the_torus():
    pytest.importorskip("libtpu", reason="libtpu is installed on Linux x86-64 only")
    devices = compilers.described_devices(compilers.parse_topology("v5p:4x4x8"))
    mesh = make_mesh({"fsdp": 64, "tensor": 2}, devices)
    # Neighbours share layers.
    assert all(
        sum(map(abs, map(int.__sub__, *(one.coords for one in pair)))) == 1
        for pair in mesh.devices[0]
    )


@pytest.mark.nightly
def test_a_tpu_program_is_compiled_without_a_tpu():
    pytest.importorskip("libtpu", reason="libtpu is installed on Linux x86-64 only")
    devices = compilers.described_devices(compilers.parse_topology("v5e:2x2"))
    assert (len(devices), devices[0].platform) == (4, "tpu")
    x = jax.ShapeDtypeStruct(
        (256, 256), "bfloat16", sharding=jax.sharding.SingleDeviceSharding(devices[0])
    )
    lowered = jax.jit(lambda x: x @ x).lower(x)
    found = compilers.compile_program(lowered, level="O1")
    assert found.arguments == found.outputs == 2 * 256 * 256
    # More than any chip has: the compiler says so.
    big = jax.ShapeDtypeStruct((2**17, 2**17), "float32", sharding=x.sharding)
    lowered = jax.jit(lambda x: (x * 2).sort()).lower(big)
    assert "HBM" in compilers.compile_program(lowered).problem
