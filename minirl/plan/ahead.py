"""Compiles the programs before there are weights, or devices."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Lowered

from minirl.model.sharding import axes_sharding
from minirl.plan.hlo import Collective, Hlo
from minirl.train.batching import Batch

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT]?)")


@dataclass(frozen=True, slots=True)
class Program:
    """What the compiler says of a program; bytes are those of one device.

    Attributes:
        name: Which one.
        arguments: Bytes of what it is given.
        outputs: Bytes of what it gives back in memory of its own, not in that of its arguments.
        temporaries: Bytes that it takes besides while it runs.
        flops: Operations, as XLA counts them: a loop's body once, what a kernel does not at all.
        moved: Bytes of memory that it moves, loops in full.
        collectives: What devices take from one another.
        seconds: How long it took to compile.
        fits: False where the compiler found no room for it on an empty device; then
            `temporaries` is what it would have taken at least, and what is moved is not known.
    """

    name: str
    arguments: float
    outputs: float
    temporaries: float
    flops: float
    moved: float
    collectives: tuple[Collective, ...]
    seconds: float
    fits: bool = True


def compile_program(
    name: str, lowered: Lowered, *, options: dict[str, Any] | None = None
) -> Program:
    """Compile a program and read what there is to know of it; the compiler may take options."""
    started = perf_counter()
    try:
        with warnings.catch_warnings():
            # A program for devices that are not here is kept, but cannot be read again.
            warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation")
            compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        needed = _NEEDED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or needed is None:
            raise
        size = float(needed[1]) * _UNITS[needed[2]]
        return Program(name, 0, 0, size, 0, 0, (), perf_counter() - started, fits=False)
    memory: Any = compiled.memory_analysis()
    hlo = Hlo(compiled.as_text() or "")
    return Program(
        name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        flops=(compiled.cost_analysis() or {}).get("flops", 0.0),
        moved=hlo.bytes_moved,
        collectives=tuple(hlo.collectives),
        seconds=perf_counter() - started,
    )


def at_depth(one: Program, two: Program, depth: int) -> Program:
    """Tell what a program would be for so many layers from that for one layer and that for two.

    Each layer adds the same: what the sampler compiles of a layer does not depend on the others.
    """

    def reach(first: float, second: float) -> float:
        return max(first + (second - first) * (depth - 1), 0.0)

    taken = [
        {(each.kind, each.devices, each.is_hidden): each.bytes for each in program.collectives}
        for program in (one, two)
    ]
    collectives = [
        Collective(*key, reach(taken[0].get(key, 0.0), taken[1].get(key, 0.0)))
        for key in {**taken[0], **taken[1]}
    ]
    names = ("arguments", "outputs", "temporaries", "flops", "moved")
    numbers = {name: reach(getattr(one, name), getattr(two, name)) for name in names}
    return replace(
        two,
        **numbers,
        collectives=tuple(collectives),
        seconds=one.seconds + two.seconds,
        fits=one.fits and two.fits,
    )


def abstract_batch(
    *, groups: int, group_size: int, prompt: int, answer: int, mesh: Mesh | None
) -> Batch:
    """Return the shapes and places of a micro-batch.

    Args:
        groups: Prompts on all devices together.
        group_size: Answers of each.
        prompt: Padded length of the prompts.
        answer: Padded length of the answers.
        mesh: What rows are split over.
    """

    def array(dtype: Any, *shape: int) -> Any:
        axes = ("batch", "position")[: len(shape)]
        place = None if mesh is None else axes_sharding(axes, shape, mesh, name="batch")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    rows = (groups * group_size, answer)
    return Batch(
        prefix_NP=array(jnp.int32, groups, prompt),
        prefix_length_N=array(jnp.int32, groups),
        input_BC=array(jnp.int32, *rows),
        target_BC=array(jnp.int32, *rows),
        is_action_BC=array(jnp.bool_, *rows),
        old_logp_BC=array(jnp.float32, *rows),
        advantage_BC=array(jnp.float32, *rows),
        weight_BC=array(jnp.float32, *rows),
    )
