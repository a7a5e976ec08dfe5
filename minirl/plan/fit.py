"""What fits: the largest micro-batch of a job on described devices, and its memory.

Temporaries come from the compiler of those devices, everything else is counted from shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered

from minirl.errors import UserError
from minirl.model.sharding import axes_sharding, device_bytes, row_parts
from minirl.plan.compile import Program, Topology, compile_program, described_devices
from minirl.plan.memory import (
    Sampling,
    Tokens,
    Training,
    Workload,
    abstract_model,
    cudnn_workspace,
    longest_batch,
    sampling_of,
    training_of,
)
from minirl.sample.decode import lowered_programs
from minirl.sample.weights import copy_shapes
from minirl.train.batching import Batch, empty_batch
from minirl.train.packing import Layout
from minirl.types import Progress

FILLED = 0.95
"""Share of a device's memory that a plan fills; the rest is the runtime's or lost between buffers.
Commands let JAX take as much of a GPU (`XLA_CLIENT_MEM_FRACTION`)."""
# libtpu's least effort to make a program fast: it compiles two to three times as quickly, and plans
# up to a fifth more memory.
_TPU_OPTIONS = {"exec_time_optimization_effort": -1.0}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Groups of each part of the mesh that has rows of its own, their answers, and how many of
    these micro-batches an update has.
    """

    groups: int
    answers: int
    count: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A job that fits: its largest micro-batch, and bytes of a device by kind, while the update
    runs and while the sampler works, of which so many may be filled.
    """

    batch: MicroBatch
    training: Training
    sampling: Sampling
    update: dict[str, float]
    generation: dict[str, float]
    room: float
    programs: dict[str, Program]


@dataclass(frozen=True, slots=True)
class _Planner:
    """A job on described devices, and the programs that were compiled for it."""

    work: Workload
    topology: Topology
    mesh: Mesh
    training: Training
    progress: Progress
    programs: dict[str, Program] = field(default_factory=dict)

    def compiled(self, name: str, lowered: Lowered) -> Program:
        done = len(self.programs)
        self.progress(done, max(done + 1, 6), f"compiling {name}")
        options = _TPU_OPTIONS if self.topology.chip.kind == "tpu" else {}
        self.programs[name] = compile_program(lowered, options=options)
        return self.programs[name]

    def largest(self, room: float) -> tuple[MicroBatch, dict[str, float]]:
        """Return the largest micro-batch in powers of two, of one group's answers and then of more
        groups, with what the update needs by kind; the smallest where nothing fits.
        """
        train = self.work.train
        answers = train.batching.answers_per_batch or train.group_size
        batch, memory = self.update(1, answers)
        while sum(memory.values()) > room and batch.answers > 1:
            batch, memory = self.update(1, batch.answers // 2 if batch.answers % 2 == 0 else 1)
        while batch.answers == answers and batch.count > 1:
            larger, found = self.update(2 * batch.groups, answers)
            if sum(found.values()) > room:
                break
            batch, memory = larger, found
        return batch, memory

    def update(self, groups: int, answers: int) -> tuple[MicroBatch, dict[str, float]]:
        """Compile an update's programs, and return what it needs on a device by kind."""
        train, training, parts = self.work.train, self.training, row_parts(self.mesh)
        each = -(-train.prompts_per_step // (train.mini_batches * parts))
        batch = MicroBatch(groups, answers, -(-each * (train.group_size // answers) // groups))
        tokens = longest_batch(self.work, groups=groups * parts, answers=answers)
        arrays = abstract_batch(tokens, self.mesh, packed=train.batching.pack)
        lowered = dict(training.learner.lower(training.state, arrays))
        program = self.compiled("gradient", lowered["gradient"])
        # It does not depend on the batch.
        apply = self.programs.get("apply") or self.compiled("apply", lowered["apply"])
        gradient = device_bytes(training.state.params)
        # With several micro-batches, their sum lies beside the gradient of the current one.
        gradients = gradient * min(batch.count, 2)
        memory = {
            "gradients": gradients,
            "batch": program.arguments - training.memory["weights"],
            "temporaries": max(program.temporaries, apply.temporaries - gradients + gradient),
        }
        if self.topology.chip.kind == "gpu":
            own = longest_batch(self.work, groups=groups, answers=answers)
            tensor = self.mesh.shape["tensor"]
            memory["cuDNN's workspace"] = cudnn_workspace(self.work.model, own, tensor=tensor)
        return batch, memory


def fit(work: Workload, topology: Topology, mesh: Mesh, progress: Progress) -> Fit:
    """Compile a job for a mesh, and find the largest micro-batch that there is memory for.

    Raises:
        UserError: Nothing fits.
    """
    training = training_of(work, mesh)
    planner = _Planner(work, topology, mesh, training, progress)
    room = FILLED * topology.chip.memory_bytes
    _check(training.memory | {"gradients": device_bytes(training.state.params)}, room)
    # Described apart: compilers know no part of a slice.
    devices = described_devices(topology.host)
    sampling = sampling_of(work, mesh, devices, memory_bytes=topology.chip.memory_bytes)
    sampler = {name: planner.compiled(name, one) for name, one in sampler_programs(work, sampling)}
    held = training.memory | sampling.kept
    own = {name: program.temporaries + program.outputs for name, program in sampler.items()}
    # Before there is a cache, what came from the other devices lies beside the copy, and then what
    # is made of it.
    before = max(own.pop("prepare"), sampling.transfer) - sampling.memory["cache"]
    temporaries = max(*own.values(), before)
    generation = held | sampling.memory | {"sampler's temporaries": temporaries}
    _check(generation, room, next((one.problem for one in sampler.values() if one.problem), ""))
    batch, update = planner.largest(room - sum(held.values()))
    _check(held | update, room, planner.programs["gradient"].problem)
    return Fit(batch, training, sampling, held | update, generation, room, planner.programs)


def sampler_programs(work: Workload, sampling: Sampling) -> Iterator[tuple[str, Lowered]]:
    """Yield what one process samples with, ready to be compiled."""
    # Adapters are part of the copy.
    graph, params, frozen = abstract_model(work.model, work.source, sampling.mesh)
    model = nnx.merge(graph, copy_shapes(params, sampling.mesh, work.dtype), frozen)
    yield from lowered_programs(model, sampling.cache).items()


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
    rows = tokens.answers // tokens.prompts
    shape = Layout((), tokens.prompts, rows, tokens.prompt, tokens.answer)

    def abstract(array: Any) -> Any:
        axes = ("batch", "position")[: array.ndim]
        place = None if mesh is None else axes_sharding(axes, array.shape, mesh, name="batch")
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    return jax.tree.map(abstract, empty_batch(shape, is_packed=packed))
