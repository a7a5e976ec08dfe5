"""Plan a job for devices that are not here: does it fit, and with which micro-batch.

The programs of the update and of the sampler are compiled ahead of time by the devices' own
compiler; nothing is computed and no weights are needed.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, PositiveInt
from rich.table import Table as RichTable

from launch import cli
from launch.config import JobConfig, load_config
from launch.texts import write_json
from minirl.errors import UserError

if TYPE_CHECKING:
    from minirl.model.config import ModelConfig
    from minirl.plan.compile import Topology
    from minirl.plan.fit import Devices, Fit
    from minirl.plan.memory import Workload

_log = logging.getLogger(__name__)

_GIB = 2**30
PLAN = "plan.json"
# Share of the memory free beside a CPU that a plan fills: other programs want more at times, and
# the run itself has data and processes of queries there.
_CPU_FILLED = 0.8
# A model whose weights and optimizer take less of a device's memory fits, whatever else it needs.
_SMALL_SHARE = 1 / 256


def main(arguments: list[str]) -> None:
    """Run the command."""
    example = "--topology v5e:2x2 sampler.slots=32"
    parser = cli.make_parser("launch.plan", __doc__, example=example)
    chips = "v5e:4x4, v5p:4x4x4, v6e:8x8 (TPU slices), h100x1, h100x8, h200x8, h100x16 (GPUs)"
    parser.add_argument("--topology", required=True, metavar="CHIPS", help=chips)
    name = "a published shape in place of model.path's, for example qwen2.5-coder-7b"
    parser.add_argument("--model", metavar="NAME", help=name)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan here too")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.cfg, options.overrides)
    with cli.progress_bar("plan") as progress:
        plan = make_plan(config, options.topology, model=options.model, progress=progress)
    cli.output.print(*_tables(plan), sep="\n")
    cli.output.print(*plan["assumptions"], sep="\n", soft_wrap=True)
    if options.json:
        write_json(options.json, plan)


def make_plan(
    config: JobConfig, topology_name: str, *, model: str | None, progress: Any
) -> dict[str, Any]:
    """Plan a job, as JSON has it; bytes are those of one device.

    The model is the name of a published shape; None for the job's own.
    """
    started = perf_counter()
    # JAX takes seconds to import, and mistakes above need not wait for it.
    import jax

    # Devices are described; the ones that are here are left alone.
    jax.config.update("jax_platforms", "cpu")
    from launch.build import mesh_sizes
    from minirl.model.sharding import make_mesh
    from minirl.plan.compile import described_devices, parse_topology
    from minirl.plan.fit import FILLED, Devices, fit

    topology = parse_topology(topology_name)
    shape = model_shape(config, model)
    work = workload_of(config, shape)
    mesh = make_mesh(mesh_sizes(config, shape, topology.size), described_devices(topology))
    # Described apart: compilers know no part of a slice.
    own, room = described_devices(topology.host), FILLED * topology.chip.memory_bytes
    devices = Devices(mesh, own, room)
    found = fit(work, devices, progress)
    _check_room(found, work, devices, progress)
    progress(1, 1, "done")
    assert found.sampling is not None
    return {
        "topology": topology.name,
        "devices": topology.size,
        "parameters": found.training.parameters,
        "update_memory_bytes": found.update,
        "generation_memory_bytes": found.generation,
        "update_bytes": sum(found.update.values()),
        "generation_bytes": sum(found.generation.values()),
        "room_bytes": room if math.isfinite(room) else None,
        "processes": found.sampling.processes,
        "sampler_mesh": dict(found.sampling.mesh.shape),
        "micro_batch_tokens": found.tokens,
        "compile_s": {name: round(one.seconds, 1) for name, one in found.programs.items()},
        "model": model or str(config.model.path or "tiny"),
        "mesh": dict(mesh.shape),
        "assumptions": _assumptions(work, topology),
        "plan_s": round(perf_counter() - started, 1),
    }


def workload_of(config: JobConfig, shape: ModelConfig) -> Workload:
    """Take out of a job what a plan depends on."""
    from minirl.plan.memory import Workload

    return Workload(shape, config.model, config.sampler, config.train, config.evaluation_sampler)


def plan_memory(config: JobConfig, shape: ModelConfig, folder: Path) -> JobConfig:
    """Compile the largest programs of a job for the devices that are here, and refuse what does not
    fit; return the job with micro-batches of a size where they had none.

    The plan is kept in the run folder, so that a resumed run has the same micro-batches. A model
    that is small beside the memory is not compiled for it.

    Raises:
        UserError: The job needs more than there is, with settings that need less.
    """
    from minirl.run import distributed
    from minirl.run.files import read_json

    path = folder / PLAN
    if path.exists():
        found = read_json(path, Plan, advice="delete it to plan again")
    else:
        tokens = distributed.gather(lambda: _planned(config, shape))
        found = min(tokens, key=lambda plan: plan.micro_batch_tokens)
        distributed.from_first(lambda: write_json(path, found.model_dump()))
    _log.info("memory: %s", found)
    return _with_tokens(config, found.micro_batch_tokens)


class Plan(BaseModel):
    """What a run was planned with on a device: tokens of a micro-batch, and bytes by kind; none for
    a model too small to be planned.
    """

    micro_batch_tokens: PositiveInt
    memory_bytes: dict[str, float] = {}

    def __str__(self) -> str:
        """Say it in a line."""
        named = self.memory_bytes.items()
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in named if size >= _GIB / 20)
        total = (
            f"{_gib(sum(self.memory_bytes.values()))} of a device ({parts})" if parts else "little"
        )
        return f"{total}; micro-batches of up to {self.micro_batch_tokens:,} tokens"


def describe_memory(config: JobConfig, shape: ModelConfig) -> str:
    """Plan a job, and say in a line what it needs; see `plan_memory`."""
    return str(_planned(config, shape))


def _planned(config: JobConfig, shape: ModelConfig) -> Plan:
    """Plan a job for this process's devices."""
    import jax

    from launch.build import arrange
    from minirl.plan.fit import FILLED, Devices, fit
    from minirl.plan.memory import training_of
    from minirl.run.memory import free_bytes, resident_bytes

    work, mesh, own = workload_of(config, shape), arrange(config, shape), jax.local_devices()
    free, taken = free_bytes(own[0]), 0.0
    if own[0].platform == "cpu":
        taken = resident_bytes() / len(own)
        room = taken + _CPU_FILLED * free / len(own)
    else:
        room = FILLED * free
    if sum(training_of(work, mesh).memory.values()) < _SMALL_SHARE * room:
        return Plan(micro_batch_tokens=work.train.batching.budget)
    devices, has_sampler = Devices(mesh, own, room, taken), config.rollout.backend == "native"
    with cli.progress_bar("memory") as progress:
        found = fit(work, devices, progress, has_sampler=has_sampler)
        _check_room(found, work, devices, progress, has_sampler=has_sampler)
    return Plan(micro_batch_tokens=found.tokens, memory_bytes=found.largest)


def _check_room(
    found: Fit, work: Workload, devices: Devices, progress: Any, *, has_sampler: bool = True
) -> None:
    """Raise a `UserError` if a job needs more than there is, with settings that need less."""
    from minirl.plan.fit import settings_that_fit

    if found.bytes <= devices.room:
        return
    sizes = " + ".join(f"{name} {size / _GIB:.1f}" for name, size in found.largest.items())
    reason = found.problem or f"{sizes} = {_gib(found.bytes)} a device"
    changes = settings_that_fit(work, devices, progress, has_sampler=has_sampler)
    advice = "take a smaller model, more devices or shorter lengths"
    if changes:
        advice = f"it fits with {' '.join(changes)}"
    raise UserError(f"does not fit: {reason}, of {_gib(devices.room)} free; {advice}")


def _with_tokens(config: JobConfig, tokens: int) -> JobConfig:
    """Return a job whose micro-batches have so many tokens where they were left to the program."""
    changes = {}
    for name, phase in (("train", config.train), ("warm_start", config.warm_start)):
        if phase is not None and phase.batching.micro_batch_tokens == "auto":
            batching = phase.batching.model_copy(update={"micro_batch_tokens": tokens})
            changes[name] = phase.model_copy(update={"batching": batching})
    return config.model_copy(update=changes)


def model_shape(config: JobConfig, name: str | None) -> ModelConfig:
    """Return the shape of the named model, or of the job's own."""
    from launch.tiny import tiny_shape
    from minirl.model.config import read_config
    from minirl.plan.memory import published_shape

    if name is not None:
        return published_shape(name)
    if config.model.tiny is not None:
        return tiny_shape(config.model.tiny)
    path = config.model.path
    assert path is not None
    if not (path / "config.json").exists():
        raise UserError(
            f"{path}: no config.json there; download the model, or plan by name: "
            "--model qwen2.5-coder-7b"
        )
    return read_config(path)


def _assumptions(work: Workload, topology: Topology) -> list[str]:
    from minirl.plan.fit import FILLED

    chip = topology.chip
    compiler = {
        "tpu": "XLA's for TPUs, at its least effort, which plans up to a fifth more memory",
        "gpu": "XLA's for CUDA, without autotuning; with cuBLASLt in place of Triton's products "
        "temporaries grow by a tenth. cuDNN's workspace is a formula",
        "cpu": "XLA's for CPUs: pretended devices",
    }[chip.kind]
    memory = "no known memory" if math.isinf(chip.memory_bytes) else _gib(chip.memory_bytes)
    return [
        f"Temporaries are the compiler's ({compiler}); all else is counted from shapes.",
        f"A device has {memory}, of which {FILLED:.0%} may be filled; commands take as much of a "
        "GPU unless XLA_CLIENT_MEM_FRACTION says otherwise.",
        "A rollout and an update take turns with the memory; each process samples from a copy of "
        "the weights on its own devices.",
        f"Memory is that of the longest prompts and responses ({work.sampler.max_prompt_tokens} + "
        f"{work.sampler.max_response_tokens} tokens).",
    ]


def _tables(plan: dict[str, Any]) -> list[RichTable]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    title = f"{plan['model']} ({plan['parameters'] / 1e9:.2f} B) on {plan['topology']}: {mesh}"
    memory = RichTable("a device's memory", "update, GiB", "generation, GiB", title=title)
    columns = (plan["update_memory_bytes"], plan["generation_memory_bytes"])
    for name in dict.fromkeys([*columns[0], *columns[1]]):
        cells = (f"{kinds[name] / _GIB:.2f}" if name in kinds else "" for kinds in columns)
        memory.add_row(name, *cells)
    memory.add_section()
    memory.add_row("together", *(f"{sum(kinds.values()) / _GIB:.2f}" for kinds in columns))
    room = plan["room_bytes"]
    known = "not known" if room is None else f"{room / _GIB:.2f}"
    memory.add_row("may be filled", known, known)
    axes = [f"{axis} {size}" for axis, size in plan["sampler_mesh"].items() if size > 1]
    step = RichTable("of a step", "", title="A step")
    step.add_row(
        "micro-batch of a device", f"train.batching.micro_batch_tokens={plan['micro_batch_tokens']}"
    )
    step.add_row("samplers", f"{plan['processes']}, each on {' x '.join(axes) or 'one device'}")
    step.add_row("this plan took", f"{plan['plan_s']:.0f} s")
    return [memory, step]


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


if __name__ == "__main__":
    cli.run(main)
