"""Plan a job for chips that are not here: does it fit, how long does a step take, and why.

The programs of the update and of the sampler are compiled for the chips, ahead of time; nothing is
computed and no weights are needed.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from launch import cli
from launch.config import JobConfig, load_config
from launch.folders import check_place
from launch.texts import write_json
from minirl.errors import UserError

if TYPE_CHECKING:
    from minirl.model.config import ModelConfig
    from minirl.plan.chips import Topology
    from minirl.plan.estimate import Estimate
    from minirl.plan.plan import Fit
    from minirl.plan.resident import Job

_log = logging.getLogger(__name__)

_GIB = 2**30


def main(arguments: list[str]) -> None:
    """Run the command."""
    example = "--topology v5e:2x2 sampler.slots=32"
    parser = cli.make_parser("launch.plan", __doc__ or "", example=example)
    parser.add_argument(
        "--topology",
        required=True,
        metavar="CHIPS",
        help="v5e:4x4, v5p:4x4x4, v6e:8x8 (TPU slices), h100x8, h200x1 (GPUs)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a published shape in place of model.path's, for example qwen2.5-coder-7b",
    )
    parser.add_argument(
        "--prompt-tokens", type=float, metavar="N", help="mean length; default: the longest"
    )
    parser.add_argument(
        "--response-tokens", type=float, metavar="N", help="mean length; default: the longest"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan here too")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.cfg, options.overrides)
    file: Path | None = options.json
    if file is not None:  # before the minutes that a plan takes
        if file.is_dir():
            raise UserError(f"--json {file}: is a folder; write the name of a file in it")
        check_place(file.parent, key="--json")
    with cli.progress_bar("plan") as progress:
        plan = make_plan(
            config,
            options.topology,
            model=options.model,
            prompt=options.prompt_tokens,
            response=options.response_tokens,
            progress=progress,
        )
    if file is not None:
        write_json(file, plan)
    for table in _tables(plan):
        cli.output.print(table)
    for line in plan["assumptions"]:
        cli.output.print(line, soft_wrap=True)


def make_plan(
    config: JobConfig,
    topology_name: str,
    *,
    model: str | None,
    prompt: float | None,
    response: float | None,
    progress: Any,
) -> dict[str, Any]:
    """Plan a job.

    Args:
        config: The job.
        topology_name: The chips, as `minirl.plan.chips.parse_topology` reads them.
        model: Name of a published shape; None for the job's own model.
        prompt: Mean length of the prompts in tokens; None for the longest.
        response: The same of the responses.
        progress: Called as `cli.progress_bar` says.

    Returns:
        Everything that there is to say, as JSON has it.

    Raises:
        UserError: The topology or the model is not known, or nothing fits.
    """
    started = perf_counter()
    # JAX takes seconds to import, and mistakes above need not wait for it.
    import jax

    # Devices are described; the ones that are here are left alone.
    jax.config.update("jax_platforms", "cpu")
    from launch.wiring import mesh_sizes
    from minirl.model.sharding import make_mesh
    from minirl.plan.chips import described_devices, parse_topology
    from minirl.plan.estimate import estimate
    from minirl.plan.plan import check_lengths, fit

    topology = parse_topology(topology_name)
    shape = model_shape(config, model)
    job = job_of(config, shape, prompt=prompt, response=response)
    check_lengths(job)
    devices, compiler = described_devices(topology)
    mesh = make_mesh(mesh_sizes(config, shape, topology.size), devices)
    found = fit(job, topology, mesh, progress)
    progress(1, 1, "done")
    timed = estimate(job, topology, mesh, found)
    report = _report(job, topology, found, timed)
    return report | {
        "model": model or str(config.model.path or "tiny"),
        "mesh": dict(mesh.shape),
        "compiler": compiler,
        "assumptions": _assumptions(job, topology, compiler),
        "plan_s": round(perf_counter() - started, 1),
    }


def job_of(
    config: JobConfig,
    shape: ModelConfig,
    *,
    prompt: float | None = None,
    response: float | None = None,
) -> Job:
    """Take out of a job's settings what a plan depends on; lengths are the longest, or given."""
    from minirl.plan.resident import Job

    sampler = config.sampler
    return Job(
        shape,
        config.model,
        sampler,
        config.train,
        sampler.max_prompt_tokens if prompt is None else prompt,
        sampler.max_response_tokens if response is None else response,
    )


def check_memory(config: JobConfig, folder: Path) -> None:
    """Log what the job holds on each device, and refuse what can not fit.

    Activations are an estimate: where they alone are too much, a warning says so.

    Args:
        config: The job.
        folder: Where the `config.json` of its model is.

    Raises:
        UserError: It is more than a device has, activations apart.
    """
    import jax

    from launch.wiring import arrange
    from minirl.model.config import read_config
    from minirl.plan.resident import resident_bytes

    shape = read_config(folder)
    limit = _device_limit()
    mesh = arrange(config, shape)
    job, own = job_of(config, shape), jax.local_devices()
    count = partial(
        resident_bytes,
        job,
        mesh,
        own,
        memory_bytes=limit or math.inf,
        has_sampler=config.rollout.backend == "native",
    )
    found = count()
    total = sum(found.values())
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in found.items() if size >= _GIB / 20)
    of = f" of {_gib(limit)}" if limit else ""
    line = f"memory of a device, activations estimated: {_gib(total)}{of}"
    line += f" ({parts})" * bool(parts)
    if limit and sum(count(has_activations=False).values()) > limit:
        raise UserError(
            f"{line}: does not fit; use more devices, a smaller model, fewer sampler.slots or "
            "train.optimizer.moments=bfloat16 (launch.plan tells what fits where)"
        )
    if limit and total > limit:
        _log.warning(
            "%s: will hardly fit; use a smaller train.batching.answers_per_batch or "
            "groups_per_batch, or model.remat=full (launch.plan tells what fits)", line,
        )  # fmt: skip
        return
    _log.info("%s", line)


def _device_limit() -> float | None:
    """Return the bytes that a device lets be filled, where it says so."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def model_shape(config: JobConfig, name: str | None) -> ModelConfig:
    """Return the shape of the named model, or of the job's own.

    Raises:
        UserError: The job's model is not there yet, and none is named.
    """
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


def _report(job: Job, topology: Topology, found: Fit, timed: Estimate) -> dict[str, Any]:
    """Put what was found into JSON's types; bytes, operations and seconds of one device."""
    phases = {
        name: {
            "seconds": phase.seconds,
            "flops": phase.flops,
            "bytes_moved": phase.moved,
            "collective_bytes": phase.taken,
            "compute_s": phase.compute_s,
            "memory_s": phase.memory_s,
            "collective_s": phase.link_s + phase.hidden_s,
            "collective_share": phase.collective_share,
        }
        for name, phase in timed.phases.items()
    }
    collective = sum(phase["seconds"] * phase["collective_share"] for phase in phases.values())
    room = found.room if math.isfinite(found.room) else None
    return {
        "topology": topology.name,
        "chips": topology.size,
        "parameters": found.parameters,
        "memory_bytes": found.memory,
        "generation_memory_bytes": found.generation,
        "processes": found.sampling.processes,
        "sampler_mesh": dict(found.sampling.mesh.shape),
        "update_bytes": found.update_bytes,
        "generation_bytes": found.generation_bytes,
        "room_bytes": room,
        "groups_per_batch": found.batch.groups,
        "answers_per_batch": found.batch.answers,
        "micro_batches": found.batch.count,
        "phases": phases,
        "collective_share": collective / timed.step_s,
        "step_s": timed.step_s,
        "mfu": timed.mfu,
        "update_tokens": timed.tokens,
        "compile_s": {name: round(one.seconds, 1) for name, one in found.programs.items()},
    }


def _assumptions(job: Job, topology: Topology, compiler: str) -> list[str]:
    """Say what a plan rests on: what the compiler says, and what is assumed."""
    from minirl.plan.estimate import EFFICIENCY, LINK_EFFICIENCY, MEMORY_EFFICIENCY
    from minirl.plan.plan import FILLED

    chip = topology.chip
    reached = (
        f"{EFFICIENCY[chip.kind]:.0%} of it reached in products, {MEMORY_EFFICIENCY:.0%} of the "
        f"memory's and {LINK_EFFICIENCY:.0%} of the links' bytes a second"
    )
    memory = "no known memory" if math.isinf(chip.memory_bytes) else f"{_gib(chip.memory_bytes)}"
    return [
        f"From the compiler, {compiler}: activations and other temporaries, bytes moved, "
        "collectives. The sampler's programs are compiled for one layer and two, and continued; "
        "compilers for TPUs take their least effort, which plans up to a fifth more memory.",
        f"From the chip's data sheet: {chip.flops_s / 1e12:.0f} TFLOP/s (bf16), {memory} of which "
        f"{FILLED:.0%} may be filled, {chip.memory_bytes_s / 1e9:.0f} GB/s, "
        f"{chip.link_bytes_s / 1e9:.0f} GB/s a link in each direction.",
        f"Assumed: {reached}; collectives are waited for unless the program computes meanwhile.",
        "A rollout and an update take turns with the memory; each process samples from a copy of "
        "the weights on its own devices, and takes it from all of them once a step.",
        f"Lengths: memory for the longest ({job.sampler.max_prompt_tokens} + "
        f"{job.sampler.max_response_tokens} tokens), time for means of {job.prompt:g} + "
        f"{job.response:g}; environments and rewards take no time.",
        "MFU: 6 operations a weight and computed token of the update, attention left out; "
        "operations are counted from the shape, and attention half where it is causal.",
    ]


def _tables(plan: dict[str, Any]) -> list[RichTable]:
    """Show a plan to a person."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    title = f"{plan['model']} ({plan['parameters'] / 1e9:.2f} B) on {plan['topology']}: {mesh}"
    memory = RichTable("a device's memory", "update, GiB", "generation, GiB", title=title)
    columns = (plan["memory_bytes"], plan["generation_memory_bytes"])
    for name in dict.fromkeys([*columns[0], *columns[1]]):
        memory.add_row(
            name, *[f"{kinds[name] / _GIB:.2f}" if name in kinds else "" for kinds in columns]
        )
    memory.add_section()
    memory.add_row("together", *[f"{sum(kinds.values()) / _GIB:.2f}" for kinds in columns])
    room = plan["room_bytes"]
    known = "not known" if room is None else f"{room / _GIB:.2f}"
    memory.add_row("may be filled", known, known)
    time = RichTable(
        "of a step", "s", "TFLOP", "GB moved", "GB taken", "collectives alone", title="A device"
    )
    for name, phase in plan["phases"].items():
        time.add_row(
            name,
            f"{phase['seconds']:.1f}",
            f"{phase['flops'] / 1e12:.1f}",
            f"{phase['bytes_moved'] / 1e9:.1f}",
            f"{phase['collective_bytes'] / 1e9:.1f}",
            f"{100 * phase['collective_share']:.0f} %",
        )
    whole = RichTable("of all", "", title="A step")
    for name, value in (
        ("largest micro-batch", _batch_words(plan)),
        ("samplers", _sampler_words(plan)),
        ("seconds", f"{plan['step_s']:.1f}"),
        ("MFU of the update", f"{100 * plan['mfu']:.1f} %"),
        ("collectives alone", f"{100 * plan['collective_share']:.0f} %"),
        ("this plan took", f"{plan['plan_s']:.0f} s"),
    ):
        whole.add_row(name, value)
    return [memory, time, whole]


def _batch_words(plan: dict[str, Any]) -> str:
    return (
        f"train.batching.groups_per_batch={plan['groups_per_batch']} "
        f"train.batching.answers_per_batch={plan['answers_per_batch']} "
        f"({plan['micro_batches']} a step)"
    )


def _sampler_words(plan: dict[str, Any]) -> str:
    sizes = plan["sampler_mesh"]
    over = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return f"{plan['processes']}, each on {over or 'one device'}"


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


if __name__ == "__main__":
    cli.run(main)
