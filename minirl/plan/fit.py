"""What fits: the largest micro-batch of a job on devices that are not here, and its memory.

Temporaries come from the compiler of those devices, everything else is counted from shapes. Seconds
are an assumption: operations and bytes over the shares of the peaks that are named here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered

from minirl.errors import UserError
from minirl.model.sharding import axes_sharding, device_bytes, row_parts
from minirl.plan.compile import Program, Topology, compile_program, described_devices
from minirl.plan.memory import (
    Sampling,
    Training,
    Workload,
    abstract_model,
    cudnn_workspace,
    longest_batch,
    sampling_of,
    training_of,
)
from minirl.plan.operations import Tokens, decode_bytes, forward_flops, update_flops
from minirl.sample.decode import lowered_programs
from minirl.sample.weights import copy_shapes
from minirl.train.batching import Batch, Packed

FILLED = 0.95
"""Share of a device's memory that a plan fills; the rest is the runtime's or lost between buffers.
Commands let JAX take as much of a GPU (`XLA_CLIENT_MEM_FRACTION`)."""
COMPUTE_SHARE, MEMORY_SHARE = 0.4, 0.8
"""Assumed shares of the peaks: of operations in an update and in prompts (Llama 3, arXiv:
2407.21783, table 4: 0.38 to 0.43 on H100s), of memory bandwidth in decoding."""
# libtpu's least effort to make a program fast: it compiles two to three times as quickly, and plans
# up to a fifth more memory.
_TPU_OPTIONS = {"exec_time_optimization_effort": -1.0}

# Called with (programs compiled, how many there will be at least, a status line).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """How much one micro-batch holds.

    Attributes:
        groups: Groups for each part of the mesh that has rows of its own.
        answers: Trajectories of each.
        count: Micro-batches of an update.
    """

    groups: int
    answers: int
    count: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A job that fits.

    Attributes:
        batch: The largest micro-batch.
        sampling: How one process samples.
        update: Bytes of a device by kind, while the update runs.
        generation: Bytes of a device by kind, while the sampler works.
        room: Bytes that may be filled.
        programs: By name.
        parameters: Numbers of the model.
    """

    batch: MicroBatch
    sampling: Sampling
    update: dict[str, float]
    generation: dict[str, float]
    room: float
    programs: dict[str, Program]
    parameters: int


def fit(work: Workload, topology: Topology, mesh: Mesh, progress: Progress) -> Fit:
    """Compile a job for a mesh, and find the largest micro-batch that there is memory for.

    Args:
        work: What is planned.
        topology: The chips.
        mesh: Of their devices.
        progress: Called before each compilation.

    Raises:
        UserError: Nothing fits.
    """
    training = training_of(work, mesh)
    room = FILLED * topology.chip.memory_bytes
    _check(training.memory | {"gradients": device_bytes(training.state.params)}, room)
    # Described apart: compilers know no part of a slice.
    own = described_devices(topology.host)
    sampling = sampling_of(work, mesh, own, memory_bytes=topology.chip.memory_bytes)
    programs: dict[str, Program] = {}

    def compiled(name: str, lowered: Lowered) -> Program:
        progress(len(programs), max(len(programs) + 1, 6), f"compiling {name}")
        options = _TPU_OPTIONS if topology.chip.kind == "tpu" else {}
        programs[name] = compile_program(name, lowered, options=options)
        return programs[name]

    for name, lowered in sampler_programs(work, sampling):
        compiled(name, lowered)
    held = training.memory | sampling.kept
    generation = held | sampling.memory
    # Before there is a cache, what came from the other devices lies beside the copy.
    generation["sampler's temporaries"] = max(
        *(programs[name].temporaries + programs[name].outputs for name in ("fill", "decode")),
        sampling.transfer - sampling.memory["cache"],
    )
    _check(generation, room, programs["fill"].problem or programs["decode"].problem)
    batch, update = _largest(
        work,
        training,
        mesh,
        fits=lambda needed: sum((held | needed).values()) <= room,
        compiled=compiled,
    )
    _check(held | update, room, programs["gradient"].problem)
    return Fit(batch, sampling, held | update, generation, room, programs, training.parameters)


def sampler_programs(work: Workload, sampling: Sampling) -> Iterator[tuple[str, Lowered]]:
    """Yield what one process samples with, ready to be compiled."""
    # Adapters are part of the copy.
    graph, params, frozen = abstract_model(work.model, work.source, sampling.mesh)
    model = nnx.merge(graph, copy_shapes(params, sampling.mesh, work.dtype), frozen)
    yield from lowered_programs(model, sampling.cache).items()


def _largest(
    work: Workload,
    training: Training,
    mesh: Mesh,
    *,
    fits: Callable[[dict[str, float]], bool],
    compiled: Callable[[str, Lowered], Program],
) -> tuple[MicroBatch, dict[str, float]]:
    """Find the largest micro-batch that fits: the answers of one group, then more groups.

    Returns:
        The micro-batch, in powers of two, and what the update needs by kind; where nothing fits,
        the smallest.
    """
    train, parts = work.train, row_parts(mesh)
    each = -(-train.prompts_per_step // (train.mini_batches * parts))
    programs: dict[str, Program] = {}

    def batch_of(groups: int, answers: int) -> MicroBatch:
        return MicroBatch(groups, answers, -(-each * (train.group_size // answers) // groups))

    def memory_of(batch: MicroBatch) -> dict[str, float]:
        tokens = longest_batch(work, groups=batch.groups * parts, answers=batch.answers)
        lowered = training.learner.lower(
            training.state, abstract_batch(tokens, mesh, packed=train.batching.pack)
        )
        for name, one in lowered:
            # The others do not depend on the batch.
            if name == "gradient" or name not in programs:
                programs[name] = compiled(name, one)
        own = longest_batch(work, groups=batch.groups, answers=batch.answers)
        return _update_memory(work, training, mesh, programs, own, batch.count)

    answers = train.batching.answers_per_batch or train.group_size
    batch = batch_of(1, answers)
    memory = memory_of(batch)
    while not fits(memory) and batch.answers > 1:
        batch = batch_of(1, batch.answers // 2 if batch.answers % 2 == 0 else 1)
        memory = memory_of(batch)
    while batch.answers == answers and batch.count > 1:
        larger = batch_of(2 * batch.groups, answers)
        found = memory_of(larger)
        if not fits(found):
            break
        batch, memory = larger, found
    return batch, memory


def _update_memory(
    work: Workload,
    training: Training,
    mesh: Mesh,
    programs: dict[str, Program],
    own: Tokens,
    count: int,
) -> dict[str, float]:
    """Return what an update of so many micro-batches needs on a device, by kind."""
    gradient = device_bytes(training.state.params)
    # With several micro-batches, their sum lies beside the gradient of the current one.
    gradients = gradient * min(count, 2)
    apply = programs["apply"].temporaries - gradients + gradient
    memory = {
        "gradients": gradients,
        "batch": programs["gradient"].arguments - training.memory["weights"],
        "temporaries": max(programs["gradient"].temporaries, apply),
    }
    if mesh.devices.flat[0].platform == "gpu":
        tensor = mesh.shape["tensor"]
        memory["cuDNN's workspace"] = cudnn_workspace(work.model, own, tensor=tensor)
    return memory


def _check(memory: dict[str, float], room: float, problem: str = "") -> None:
    """Raise a `UserError` if this is more than there is room for, with the compiler's reason."""
    total = sum(memory.values())
    if total <= room:
        return
    if math.isinf(total):
        raise UserError(f"nothing fits: {problem}")
    parts = " + ".join(f"{name} {size / 2**30:.1f}" for name, size in memory.items())
    raise UserError(
        f"nothing fits: {parts} = {total / 2**30:.1f} GiB a device, and "
        f"{room / 2**30:.1f} may be filled; take more chips, a mesh with more of them on tensor, "
        "shorter lengths, a smaller sampler.cache_gb, or train.optimizer.moments=bfloat16"
    )


def abstract_batch(tokens: Tokens, mesh: Mesh | None, *, packed: bool = False) -> Batch:
    """Return the shapes and shardings of a micro-batch of these tokens, on all devices."""

    def array(dtype: Any, *shape: int) -> Any:
        axes = ("batch", "position")[: len(shape)]
        place = None if mesh is None else axes_sharding(axes, shape, mesh, name="batch")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    prompts, rows = (tokens.prompts, tokens.prompt), (tokens.answers, tokens.answer)
    segments = [array(jnp.int32, *shape) for shape in (prompts, prompts, rows, rows, rows)]
    return Batch(
        prefix_NP=array(jnp.int32, *prompts),
        prefix_length_N=array(jnp.int32, tokens.prompts),
        input_BC=array(jnp.int32, *rows),
        target_BC=array(jnp.int32, *rows),
        is_action_BC=array(jnp.bool_, *rows),
        old_logp_BC=array(jnp.float32, *rows),
        advantage_BC=array(jnp.float32, *rows),
        weight_BC=array(jnp.float32, *rows),
        packed=Packed(*segments) if packed else None,
    )


def assumed_seconds(work: Workload, topology: Topology, found: Fit) -> dict[str, float]:
    """Return the seconds of a step's phases at mean lengths, from the assumed shares of the peaks.

    Collectives, environments and rewards take no time here.
    """
    train, chip = work.train, topology.chip
    repeats = train.group_size // found.batch.answers
    prompts = train.prompts_per_step * repeats
    answers = train.prompts_per_step * train.group_size
    tokens = Tokens(prompts, round(work.prompt), answers, round(work.response))
    is_kernel = chip.kind != "cpu"
    update = update_flops(work.model, tokens, remat=work.source.remat, causal=is_kernel)
    filled = Tokens(train.prompts_per_step, round(work.prompt), 0, 0)
    fill = forward_flops(work.model, filled, causal=is_kernel)
    flops_s = COMPUTE_SHARE * chip.flops_s * topology.size
    # Every slot works until the longest response ends.
    sampling, shape = found.sampling, found.sampling.cache
    slots = shape.parts * shape.slots
    steps = max(answers / (sampling.processes * slots), 1.0) * work.response
    cached = decode_bytes(
        work.model,
        slots=slots,
        prompts=slots / shape.group_size,
        prompt=work.prompt,
        answer=work.response / 2,
        item=work.dtype.itemsize,
    )
    read = sampling.memory["sampler's weights"] + cached / sampling.mesh.size
    return {
        "prompts": fill / flops_s,
        "decoding": steps * read / (MEMORY_SHARE * chip.memory_bytes_s),
        "update": update / flops_s,
    }
