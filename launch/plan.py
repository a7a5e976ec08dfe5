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

from rich.table import Table as RichTable

from launch import cli
from launch.config import JobConfig, load_config
from launch.texts import write_json
from minirl.errors import UserError

if TYPE_CHECKING:
    from minirl.model.config import ModelConfig
    from minirl.plan.compile import Topology
    from minirl.plan.memory import Workload

_log = logging.getLogger(__name__)

_GIB = 2**30


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
    from minirl.plan.fit import fit

    topology = parse_topology(topology_name)
    shape = model_shape(config, model)
    work = workload_of(config, shape)
    mesh = make_mesh(mesh_sizes(config, shape, topology.size), described_devices(topology))
    found = fit(work, topology, mesh, progress)
    progress(1, 1, "done")
    return {
        "topology": topology.name,
        "devices": topology.size,
        "parameters": found.training.parameters,
        "update_memory_bytes": found.update,
        "generation_memory_bytes": found.generation,
        "update_bytes": sum(found.update.values()),
        "generation_bytes": sum(found.generation.values()),
        "room_bytes": found.room if math.isfinite(found.room) else None,
        "processes": found.sampling.processes,
        "sampler_mesh": dict(found.sampling.mesh.shape),
        "groups_per_batch": found.batch.groups,
        "answers_per_batch": found.batch.answers,
        "micro_batches": found.batch.count,
        "compile_s": {name: round(one.seconds, 1) for name, one in found.programs.items()},
        "model": model or str(config.model.path or "tiny"),
        "mesh": dict(mesh.shape),
        "assumptions": _assumptions(work, topology),
        "plan_s": round(perf_counter() - started, 1),
    }


def workload_of(config: JobConfig, shape: ModelConfig) -> Workload:
    """Take out of a job what a plan depends on."""
    from minirl.plan.memory import Workload

    return Workload(shape, config.model, config.sampler, config.train)


def check_memory(config: JobConfig, folder: Path) -> None:
    """Log what the job holds on each device; see `describe_memory`."""
    from minirl.model.config import read_config

    line, is_tight = describe_memory(config, read_config(folder))
    _log.log(logging.WARNING if is_tight else logging.INFO, "%s", line)


def describe_memory(config: JobConfig, shape: ModelConfig) -> tuple[str, bool]:
    """Say what the job holds on each device, and whether that will hardly fit.

    Activations are an estimate: where they alone are too much, it will hardly fit.

    Raises:
        UserError: It is more than a device has, activations apart.
    """
    import jax

    from launch.build import arrange
    from minirl.plan.memory import estimate_memory

    limit = _device_limit()
    turns = estimate_memory(
        workload_of(config, shape),
        arrange(config, shape),
        jax.local_devices(),
        memory_bytes=limit or math.inf,
        has_sampler=config.rollout.backend == "native",
    )
    found = max(turns, key=lambda kinds: sum(kinds.values()))
    total = sum(found.values())
    least = max(sum(kinds.values()) - kinds.get("activations", 0) for kinds in turns)
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in found.items() if size >= _GIB / 20)
    line = f"memory of a device, activations estimated: {_gib(total)} ({parts or 'little'})"
    if not limit or total <= limit:
        return line, False
    line += (
        f" of {_gib(limit)}: use more devices, a smaller model, fewer sampler.slots, a smaller "
        "train.batching.answers_per_batch or groups_per_batch, model.remat=full or "
        "train.optimizer.moments=bfloat16 (launch.plan tells what fits where)"
    )
    if least > limit:
        raise UserError(f"does not fit: {line}")
    return f"will hardly fit: {line}", True


def _device_limit() -> float | None:
    """Return the bytes that a device lets be filled, where it says so."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def model_shape(config: JobConfig, name: str | None) -> ModelConfig:
    """Return the shape of the named model, or of the job's own."""
    from minirl.model.config import read_config
    from minirl.model.tiny import tiny_shape
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
        "largest micro-batch",
        f"train.batching.groups_per_batch={plan['groups_per_batch']} "
        f"train.batching.answers_per_batch={plan['answers_per_batch']} "
        f"({plan['micro_batches']} a step)",
    )
    step.add_row("samplers", f"{plan['processes']}, each on {' x '.join(axes) or 'one device'}")
    step.add_row("this plan took", f"{plan['plan_s']:.0f} s")
    return [memory, step]


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


if __name__ == "__main__":
    cli.run(main)
