"""Programs of `progress.yaml` for described GPUs, and the operations that they became."""

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from launch.config import load_config
from launch.learner import phase_of
from minirl.model.sharding import make_mesh
from minirl.plan.compile import described_devices, parse_topology
from minirl.plan.fit import Devices, published_shape
from minirl.sample.decode import lowered_programs
from minirl.train.batching import BatchShape

# (model, topology) that the facts are checked of.
CASES = (("qwen2.5-coder-0.5b", "h100x1"), ("qwen2.5-coder-7b", "h100x8"))
# Models with linear attention, whose heads of 256 are beyond a kernel's limits elsewhere.
HYBRID, SMALL_HYBRID = ("qwen3.5-9b", "h100x8"), ("qwen3.5-0.8b", "h100x1")
# A micro-batch of a device: a prompt and eight answers in the longest rows, and a flat list of
# fewer tokens than they have cells.
SHAPE = BatchShape(tokens=40_960, prompts=1, prompt_columns=6144, answers=8, answer_columns=8192)
# What a gradient returns beside what it was given: statistics, and a log-probability a target.
RETURNED_BYTES = 2**16 + 4 * SHAPE.answers * SHAPE.answer_columns


class Operation(NamedTuple):
    """An operation of a compiled program, outside of fusions.

    Attributes:
        opcode: As XLA names it.
        text: The whole line.
        times: How often it runs: the product of the known lengths of the loops around it.
        loops: The loops around it, outermost first, those of unknown length with a `?`;
            "condition" ends those of a loop's condition.
    """

    opcode: str
    text: str
    times: int
    loops: tuple[str, ...]


class Compiled(NamedTuple):
    """A compiled program."""

    memory: Any
    text: str
    operations: list[Operation]


@functools.cache
def _learning(model: str, topology: str) -> Any:
    config, chips = load_config("progress.yaml", []), parse_topology(topology)
    own = described_devices(chips)
    mesh, devices = make_mesh({"fsdp": len(own)}, own), Devices(own, chips.chip.memory_bytes)
    return phase_of(config, published_shape(model), "train", mesh, devices)


@functools.cache
def _lowered(model: str, topology: str, kind: str) -> dict[str, Any]:
    learning = _learning(model, topology)
    if kind == "update":
        return learning.learner.lower(learning.state, SHAPE)
    first, cache, _ = learning.place_sampler(held_bytes=0)
    return lowered_programs(first, cache)


@functools.cache
def compiled(model: str, topology: str, name: str) -> Compiled:
    """Compile a program of the update, or of the native sampler on one process's devices."""
    kind = "update" if name in ("gradient", "apply") else "sampler"
    found = _lowered(model, topology, kind)[name].compile()
    return Compiled(found.memory_analysis(), found.as_text(), list(_operations(found)))


_CALLED = re.compile(r"\b(body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{|(?:true|false)_computation=)([^},]+)")
_LENGTH = re.compile(r"known_trip_count[^\d]*(\d+)")
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")


def _operations(program: Any) -> Iterator[Operation]:
    """Yield the operations of a program as they are scheduled, the body of a loop once."""
    (module,) = program.runtime_executable().hlo_modules()
    computations = {one.name: one.instructions() for one in module.computations()}
    # A module lists computations before those that call them.
    entry = list(computations)[-1]

    def walk(name: str, times: int, loops: tuple[str, ...]) -> Iterator[Operation]:
        for instruction in computations[name]:
            text = instruction.to_string()
            opcode = _OPCODE.search(text.partition(" = ")[2])
            assert opcode is not None, text
            yield Operation(opcode[1], text, times, loops)
            called = dict(_CALLED.findall(text))
            if opcode[1] == "while":
                length = _LENGTH.search(text)
                inner = (*loops, instruction.name if length else f"{instruction.name}?")
                repeated = times * int(length[1] if length else 1)
                yield from walk(called["condition"], repeated, (*inner, "condition"))
                yield from walk(called["body"], repeated, inner)
            elif opcode[1] in ("call", "async-start"):
                yield from walk(called.get("to_apply") or called["calls"], times, loops)
            elif opcode[1] == "conditional":
                for branch in " ".join(_BRANCHES.findall(text)).replace("%", "").split():
                    yield from walk(branch.strip(","), times, loops)

    yield from walk(entry, 1, ())


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_NO_KERNEL = frozenset(
    {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "while"}
    | {"call", "conditional", "opt-barrier", "partition-id", "replica-id"}
)


def is_collective(one: Operation) -> bool:
    """Tell whether devices exchange data in it."""
    return one.opcode.removesuffix("-start") in COLLECTIVES


def kernels(operations: list[Operation]) -> int:
    """Count what a device launches: kernels, copies, library calls."""
    return sum(
        one.times
        for one in operations
        if one.opcode not in _NO_KERNEL and not one.opcode.endswith(("-done", "-update"))
    )


def sampling_loop(program: Compiled) -> list[Operation]:
    """Return the operations of the loop over tokens, whose length only the data decide."""
    loops = [one.loops[0] for one in program.operations if one.loops]
    (name,) = {loop for loop in loops if loop.endswith("?") and _is_long(program, loop)}
    return [one for one in program.operations if one.loops and one.loops[0] == name]


def _is_long(program: Compiled, loop: str) -> bool:
    return kernels([one for one in program.operations if one.loops[:1] == (loop,)]) > 50


_ARRAY = re.compile(r"\b([a-z]+\d+)\[([\d,]+)\]")


def arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """List the arrays that a line or a program names: type and dimensions."""
    return [(kind, tuple(map(int, dims.split(",")))) for kind, dims in _ARRAY.findall(text)]
