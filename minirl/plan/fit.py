"""What fits: the memory of a job, and the largest micro-batch, on devices here or described.

The compiler of those devices says what programs need; what lies there between them is known from
shapes.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jax.sharding import Mesh
from jax.stages import Lowered

from minirl.config import MOST_TOKENS
from minirl.model.sharding import device_bytes, row_parts
from minirl.plan.compile import Program, compile_program
from minirl.plan.programs import (
    Sampling,
    Training,
    Workload,
    abstract_batch,
    sampling_of,
    training_of,
)
from minirl.run import memory
from minirl.sample.decode import lowered_programs
from minirl.train.batching import largest_shape
from minirl.types import Progress

FILLED = 0.95
"""Share of a device's memory that a plan fills; the rest is the runtime's or lost between buffers.
Commands let JAX take as much of a GPU (`XLA_CLIENT_MEM_FRACTION`)."""
# libtpu's least effort to make a program fast: it compiles two to three times as quickly, and plans
# up to a fifth more memory.
_TPU_OPTIONS = {"exec_time_optimization_effort": -1.0}
# Those of a sampler and of an update.
_PROGRAMS = 5
# A CPU's process keeps its compiled programs in memory: a run has the sampler's two in about three
# sizes, as many again to evaluate, and small ones for the update.
_KEPT_PROGRAMS = 6
# Sizes of a micro-batch that are tried, up to the largest.
_SIZES = 8

# Bytes of a device by kind.
Memory = dict[str, float]
Compiler = Callable[[str, Lowered], Program]


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a job, here or described: how the learner arranges them (None for a single
    one), those of one process, the bytes of each that may be filled, and those of them that a CPU's
    process has taken before it plans.
    """

    mesh: Mesh | None
    local: Sequence[Any]
    room: float
    taken: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """What a job needs on a device while the update runs and while the sampler works (nothing where
    others sample), with micro-batches of so many tokens: the largest that fit where the settings
    say `auto`. `cache_room` is what the sampler's cache may take, and `problem` the compiler's word
    where an empty device is too small.
    """

    tokens: int
    cache_room: float | None
    parameters: int
    sampler_mesh: Mesh | None
    update: Memory
    generation: Memory
    programs: dict[str, Program]
    problem: str

    @property
    def largest(self) -> Memory:
        """Return the most that is needed at a time."""
        return max(self.update, self.generation, key=_total)

    @property
    def bytes(self) -> float:
        """Return how much that is."""
        return _total(self.largest)


def fit(work: Workload, devices: Devices, progress: Progress, *, has_sampler: bool = True) -> Fit:
    """Compile the programs of a job for its devices, and say what they need.

    With `has_sampler=False` others sample.
    """
    training, programs = training_of(work, devices.mesh), dict[str, Program]()

    def compiled(name: str, lowered: Lowered) -> Program:
        if name in programs:
            return programs[name]
        progress(len(programs), max(len(programs) + 1, _PROGRAMS), f"compiling {name}")
        options = _TPU_OPTIONS if devices.local[0].platform == "tpu" else {}
        programs[name] = compile_program(lowered, options=options)
        return programs[name]

    held = ({"process": devices.taken} if devices.taken else {}) | training.memory
    generation, sampler_mesh, cache_room = Memory(), None, None
    if has_sampler:
        sampling = sampling_of(
            work, devices.mesh, devices.local, memory_bytes=devices.room, held_bytes=_total(held)
        )
        cache_room = sampling.cache_room
        held |= {"sampler's frozen weights": sampling.frozen} if sampling.frozen else {}
        memory.trim()
        before = memory.resident_bytes()
        needs, sampler_mesh = _of_sampler(sampling, compiled), sampling.model.mesh
        memory.trim()
        if devices.taken:
            grown = max(memory.resident_bytes() - before, 0.0)
            held |= {"compiled programs": _KEPT_PROGRAMS * grown}
        generation = held | needs

    @cache
    def update(tokens: int) -> Memory:
        return held | _of_update(work, training, devices.mesh, tokens, compiled)

    sizes = _sizes(work, devices.mesh)
    tokens = _largest(sizes, devices.room, lambda tokens: _total(update(tokens)))
    # Of larger micro-batches, which need not fit, it says nothing.
    tried = [name for name in programs if not name.startswith("gradient")]
    problems = (programs[name].problem for name in (*tried, _gradient(tokens)))
    problem = next(filter(None, problems), "")
    return Fit(
        tokens,
        cache_room,
        training.parameters,
        sampler_mesh,
        update(tokens),
        generation,
        programs,
        problem,
    )


def _of_sampler(sampling: Sampling, compiled: Compiler) -> Memory:
    """Compile a sampler's programs, and return what it needs."""
    lowered = lowered_programs(sampling.model, sampling.cache)
    programs = {name: compiled(name, program) for name, program in lowered.items()}
    prepare, decode, size = programs.pop("prepare"), programs["decode"], sampling.cache_bytes
    temporaries = [program.temporaries + program.outputs for program in programs.values()]
    # While the copy is made there is no cache yet.
    temporaries.append(sampling.received + prepare.temporaries - size)
    return {
        "sampler's weights": decode.arguments - size,
        "cache": size,
        "sampler's temporaries": max(temporaries),
    }


def _of_update(
    work: Workload, training: Training, mesh: Mesh | None, tokens: int, compiled: Compiler
) -> Memory:
    """Compile an update's programs for micro-batches of so many tokens, and return what they need
    besides the learner's state.
    """
    sizes = work.train.batching.model_copy(update={"micro_batch_tokens": tokens})
    shape = largest_shape(work.longest_prefix, work.sampler.max_response_tokens, sizes)
    batch = abstract_batch(shape, mesh, top=work.train.algorithm.score_centering)
    lowered = dict(training.learner.lower(training.state, batch))
    program = compiled(_gradient(tokens), lowered["gradient"])
    apply = compiled("apply", lowered["apply"])
    gradient = device_bytes(training.state.params)
    return {
        "gradient": gradient,
        "batch": program.arguments - training.memory["weights"] - gradient,
        # The gradient of the micro-batch among them.
        "temporaries": max(program.temporaries, apply.temporaries),
    }


def _gradient(tokens: int) -> str:
    return f"gradient of {tokens} tokens"


def _sizes(work: Workload, mesh: Mesh | None) -> Sequence[int]:
    """Return the sizes of a micro-batch to choose from, in tokens and rising: the one that is set,
    or from a single trajectory to all that a part of the mesh has of an update.
    """
    train, prompt, answer = work.train, work.longest_prefix, work.sampler.max_response_tokens
    tokens = train.batching.micro_batch_tokens
    if tokens != "auto":
        return [tokens]
    groups = -(-train.prompts_per_step // (train.mini_batches * row_parts(mesh)))
    most = min(MOST_TOKENS, groups * (prompt + train.group_size * answer))
    return sorted({max(most * n // _SIZES, prompt + answer) for n in range(1, _SIZES + 1)})


def _largest(sizes: Sequence[int], room: float, needs: Callable[[int], float]) -> int:
    """Return the largest size that there is room for; the smallest where there is for none."""
    # The largest alone is compiled where it fits, as it does most often.
    *smaller, most = sizes
    if needs(most) <= room or not smaller:
        return most
    return smaller[max(bisect(smaller, room, key=needs) - 1, 0)]


def _total(memory: Memory) -> float:
    return sum(memory.values())
