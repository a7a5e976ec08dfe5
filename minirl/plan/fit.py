"""What fits: the largest micro-batch of a job, and its memory, on devices here or described.

What programs need besides their arguments comes from the compiler of those devices, everything else
is counted from shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered

from minirl.config import MOST_TOKENS, LoraConfig, Remat
from minirl.model.sharding import axes_sharding, device_bytes, row_parts
from minirl.plan.compile import Program, compile_program
from minirl.plan.memory import (
    Sampling,
    Training,
    Workload,
    abstract_model,
    cudnn_workspace,
    longest_group,
    sampling_of,
    training_of,
)
from minirl.sample.decode import lowered_programs
from minirl.sample.weights import copy_shapes
from minirl.train.batching import Batch, empty_batch
from minirl.train.layout import Shape, largest_shape
from minirl.types import Progress

FILLED = 0.95
"""Share of a device's memory that a plan fills; the rest is the runtime's or lost between buffers.
Commands let JAX take as much of a GPU (`XLA_CLIENT_MEM_FRACTION`)."""
# libtpu's least effort to make a program fast: it compiles two to three times as quickly, and plans
# up to a fifth more memory.
_TPU_OPTIONS = {"exec_time_optimization_effort": -1.0}


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a job, here or described: how the learner arranges them (None for a single
    one), those of one process, the bytes of each that may be filled, and those of them that a CPU's
    process has taken before it plans.
    """

    mesh: Mesh | None
    own: Sequence[Any]
    room: float
    taken: float = 0.0

    @property
    def platform(self) -> str:
        """Return what they are: `cpu`, `gpu` or `tpu`."""
        return self.own[0].platform


@dataclass(frozen=True, slots=True)
class Fit:
    """What a job needs on a device: bytes by kind while the update runs and while the sampler
    works, with micro-batches of so many tokens, the largest that fit where the settings say `auto`.
    `problem` is the compiler's word where an empty device is too small.
    """

    tokens: int
    training: Training
    sampling: Sampling | None
    update: dict[str, float]
    generation: dict[str, float]
    programs: dict[str, Program]

    @property
    def bytes(self) -> float:
        """Return the most that is needed at a time."""
        return sum(self.largest.values())

    @property
    def largest(self) -> dict[str, float]:
        """Return what is needed then, by kind."""
        return max(self.update, self.generation, key=lambda kinds: sum(kinds.values()))

    @property
    def problem(self) -> str:
        """Return what a compiler said that found no room; "" where none did."""
        return next((one.problem for one in self.programs.values() if one.problem), "")


@dataclass(frozen=True, slots=True)
class _Planner:
    """A job on devices, and the programs that were compiled for it."""

    work: Workload
    devices: Devices
    training: Training
    progress: Progress
    programs: dict[str, Program] = field(default_factory=dict)

    def compiled(self, name: str, lowered: Lowered) -> Program:
        done = len(self.programs)
        self.progress(done, max(done + 1, 6), f"compiling {name}")
        options = _TPU_OPTIONS if self.devices.platform == "tpu" else {}
        self.programs[name] = compile_program(lowered, options=options)
        return self.programs[name]

    def update(self, tokens: int) -> dict[str, float]:
        """Compile an update's programs, and return what it needs on a device by kind."""
        training, mesh = self.training, self.devices.mesh
        sizes = self.work.train.batching.model_copy(update={"micro_batch_tokens": tokens})
        shape = largest_shape(longest_group(self.work), sizes)
        batch = abstract_batch(shape, mesh, top=self.work.train.algorithm.score_centering)
        lowered = dict(training.learner.lower(training.state, batch))
        program = self.compiled("gradient", lowered["gradient"])
        # It does not depend on the batch.
        apply = self.programs.get("apply") or self.compiled("apply", lowered["apply"])
        gradient = device_bytes(training.state.params)
        memory = {
            "gradient": gradient,
            "batch": program.arguments - training.memory["weights"] - gradient,
            # The gradient of the micro-batch among them.
            "temporaries": max(program.temporaries, apply.temporaries),
        }
        if self.devices.platform == "gpu":
            tensor = 1 if mesh is None else mesh.shape["tensor"]
            memory["cuDNN's workspace"] = cudnn_workspace(self.work.model, shape, tensor=tensor)
        return memory

    def largest(self, room: float) -> tuple[int, dict[str, float]]:
        """Return the most tokens of a micro-batch that there is room for, and what they need; the
        fewest where nothing fits. Memory grows evenly with the tokens.
        """
        train, longest = self.work.train, longest_group(self.work)
        parts = row_parts(self.devices.mesh)
        groups = -(-train.prompts_per_step // (train.mini_batches * parts))
        fewest = longest.prompt + longest.answers[0]
        most = min(MOST_TOKENS, groups * (longest.prompt + sum(longest.answers)))
        tokens, found, above = max(most, fewest), self.update(max(most, fewest)), None
        while sum(found.values()) > room and tokens > fewest:
            above = sum(found.values())
            tokens = max(tokens // 2, fewest)
            found = self.update(tokens)
        free = room - sum(found.values())
        if above is not None and math.isfinite(above) and free > 0:
            more = tokens + int(0.95 * free / (above - sum(found.values())) * tokens)
            larger = self.update(more)
            if sum(larger.values()) <= room:
                return more, larger
        return tokens, found


def fit(work: Workload, devices: Devices, progress: Progress, *, has_sampler: bool = True) -> Fit:
    """Compile the programs of a job for its devices, and say what they need.

    With `has_sampler=False` others sample.
    """
    training = training_of(work, devices.mesh)
    planner = _Planner(work, devices, training, progress)
    generation, sampling = {}, None
    held = ({"process": devices.taken} if devices.taken else {}) | training.memory
    if has_sampler:
        sampling = sampling_of(work, devices.mesh, devices.own, memory_bytes=devices.room)
        held |= sampling.kept
        compiled = {
            name: planner.compiled(name, lowered)
            for name, lowered in sampler_programs(work, sampling)
        }
        needs = {name: program.temporaries + program.outputs for name, program in compiled.items()}
        # Before there is a cache, what came from the other devices lies beside the copy, and then
        # what is made of it.
        before = max(needs.pop("prepare"), sampling.transfer) - sampling.memory["cache"]
        temporaries = {"sampler's temporaries": max(*needs.values(), before)}
        generation = held | sampling.memory | temporaries
    tokens = work.train.batching.micro_batch_tokens
    if tokens == "auto":
        tokens, update = planner.largest(devices.room - sum(held.values()))
    else:
        update = planner.update(tokens)
    return Fit(tokens, training, sampling, held | update, generation, planner.programs)


def sampler_programs(work: Workload, sampling: Sampling) -> Iterator[tuple[str, Lowered]]:
    """Yield what one process samples with, ready to be compiled."""
    # Adapters are part of the copy.
    graph, params, frozen = abstract_model(work.model, work.source, sampling.mesh)
    model = nnx.merge(graph, copy_shapes(params, sampling.mesh, work.dtype), frozen)
    yield from lowered_programs(model, sampling.cache).items()


def settings_that_fit(
    work: Workload, devices: Devices, progress: Progress, *, has_sampler: bool = True
) -> list[str]:
    """Return changes of settings with which a job fits, as few as there are; none if none do."""
    told: dict[str, str] = {}
    for text, changed in _CHANGES:
        smaller = changed(work)
        if smaller == work:
            continue
        key, work = text.partition("=")[0], smaller
        told[key] = text
        found = fit(work, devices, progress, has_sampler=has_sampler)
        if found.bytes <= devices.room:
            return [*told.values()]
    return []


def _with_train(work: Workload, **changes: Any) -> Workload:
    return replace(work, train=work.train.model_copy(update=changes))


def _with_auto(work: Workload) -> Workload:
    batching = work.train.batching.model_copy(update={"micro_batch_tokens": "auto"})
    return _with_train(work, batching=batching)


def _with_lora(work: Workload) -> Workload:
    return work if work.train.lora else _with_train(work, lora=LoraConfig())


def _with_remat(remat: Remat, work: Workload) -> Workload:
    if work.source.remat != "none" and remat == "dots":
        return work
    return replace(work, source=work.source.model_copy(update={"remat": remat}))


def _with_slots(work: Workload) -> Workload:
    slots = min(work.sampler.slots, 16)
    return replace(work, sampler=work.sampler.model_copy(update={"slots": slots}))


# What takes memory off a job, from what costs least to what changes what is trained.
_CHANGES: tuple[tuple[str, Callable[[Workload], Workload]], ...] = (
    ("train.batching.micro_batch_tokens=auto", _with_auto),
    ("model.remat=dots", partial(_with_remat, "dots")),
    ("model.remat=full", partial(_with_remat, "full")),
    ("sampler.slots=16", _with_slots),
    ("train.lora.rank=16", _with_lora),
)


def abstract_batch(shape: Shape, mesh: Mesh | None, *, top: int = 0) -> Batch:
    """Return the shapes and shardings of a micro-batch, on all devices (`empty_batch`)."""

    def abstract(array: Any) -> Any:
        axes = ("batch", "position")[: array.ndim]
        place = None if mesh is None else axes_sharding(axes, array.shape, mesh, name="batch")
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    return jax.tree.map(abstract, empty_batch(shape, parts=row_parts(mesh), top=top))
