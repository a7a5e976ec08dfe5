"""Plan a job for devices that are not here: does it fit, and with which micro-batch.

The programs of the update and of the sampler are compiled ahead of time by the devices' own
compiler; nothing is computed and no weights are needed. docs/scaling.md says what a plan counts.

    python -m launch.plan --cfg progress.yaml --topology v5e:2x2 sampler.slots=32
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from pydantic import BaseModel, PositiveFloat, PositiveInt, ValidationError

from exchange import UserError
from launch import cli, config_merge, options
from launch.config import JobConfig, load_config
from launch.files import write_json
from launch.tables import show_table

if TYPE_CHECKING:
    from minirl.model.config import ModelConfig
    from minirl.plan.fit import Devices, Fit, Workload

_log = logging.getLogger(__name__)

_GIB = 2**30
PLAN = "plan.json"
# Share of the memory free beside a CPU that a plan fills: other programs want more at times, and
# the run itself has data and processes of queries there.
_CPU_FILLED = 0.8
# A model whose weights and optimizer take less of a device's memory fits, whatever else it needs.
_SMALL_SHARE = 1 / 256
# Enough to keep a device busy.
_FEW_SLOTS = 16


def plan(
    *overrides: options.Overrides,
    cfg: options.ConfigOption,
    topology: Annotated[
        str,
        Parameter(
            help="v5e:4x4, v5p:4x4x4, v6e:8x8 (TPU slices), h100x1, a100x8, a800x32, h200x8 (GPUs)"
        ),
    ],
    model: options.ModelOption = None,
    seed: options.SeedOption = None,
    json: options.JsonOption = None,
) -> None:
    """Plan a job."""
    config = load_config(cfg, options.with_seed(overrides, seed))
    with cli.progress_bar("plan") as progress:
        found = make_plan(config, topology, model=model, progress=progress)
    if json != options.STDOUT:
        _show(found)
    options.write_result(json, found)


main = options.Command(plan)


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
    from minirl.plan.fit import FILLED, Devices

    topology = parse_topology(topology_name)
    shape = model_shape(config, model)
    mesh = make_mesh(mesh_sizes(config, shape, topology.size), described_devices(topology))
    # Described apart: compilers know no part of a slice.
    own, room = described_devices(topology.host), FILLED * topology.chip.memory_bytes
    found = _fitting(config, shape, Devices(mesh, own, room), progress)
    progress(1, 1, "done")
    return {
        "topology": topology.name,
        "devices": topology.size,
        "parameters": found.parameters,
        "update_memory_bytes": found.update,
        "generation_memory_bytes": found.generation,
        "update_bytes": sum(found.update.values()),
        "generation_bytes": sum(found.generation.values()),
        "room_bytes": room if math.isfinite(room) else None,
        "processes": topology.size // len(own),
        "sampler_mesh": dict(found.sampler_mesh.shape) if found.sampler_mesh else None,
        "micro_batch_tokens": found.tokens,
        "compile_s": {name: round(one.seconds, 1) for name, one in found.programs.items()},
        "model": model or str(config.model.path or "tiny"),
        "mesh": dict(mesh.shape),
        "plan_s": round(perf_counter() - started, 1),
    }


def workload_of(config: JobConfig, shape: ModelConfig) -> Workload:
    """Take out of a job what a plan depends on."""
    from minirl.plan.fit import Workload

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
    return _with_plan(config, found)


class Plan(BaseModel):
    """What a run was planned with on a device: tokens of a micro-batch, 10^9 bytes for the
    sampler's cache, and bytes by kind; neither for a model too small to be planned.
    """

    micro_batch_tokens: PositiveInt
    cache_gb: PositiveFloat | None = None
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
    from minirl.plan.fit import FILLED, Devices, training_of
    from minirl.run.memory import free_bytes, resident_bytes
    from minirl.sample.cache import GB

    mesh, own = arrange(config, shape), jax.local_devices()
    free, taken = free_bytes(own[0]), 0.0
    if own[0].platform == "cpu":
        taken = resident_bytes() / len(own)
        room = taken + _CPU_FILLED * free / len(own)
    else:
        room = FILLED * free
    if sum(training_of(workload_of(config, shape), mesh).memory.values()) < _SMALL_SHARE * room:
        return Plan(micro_batch_tokens=config.train.batching.budget)
    with cli.progress_bar("memory") as progress:
        found = _fitting(config, shape, Devices(mesh, own, room, taken), progress)
    cache_gb = None if found.cache_room is None else found.cache_room / GB
    return Plan(micro_batch_tokens=found.tokens, cache_gb=cache_gb, memory_bytes=found.largest)


def _fitting(config: JobConfig, shape: ModelConfig, devices: Devices, progress: Any) -> Fit:
    """Plan a job; raise a `UserError` if it needs more than there is, with settings that need less
    if there are any.
    """
    found = _fit(config, shape, devices, progress)
    if found.bytes <= devices.room:
        return found
    sizes = " + ".join(f"{name} {size / _GIB:.1f}" for name, size in found.largest.items())
    reason = found.problem or f"{sizes} = {_gib(found.bytes)} a device"
    advice, changes = "take a smaller model, more devices or shorter lengths", {}
    for setting in _savings(config):
        smaller = _changed(config, setting)
        if smaller == config:
            continue
        config, changes[setting.partition("=")[0]] = smaller, setting
        if _fit(config, shape, devices, progress).bytes <= devices.room:
            advice = f"it fits with {' '.join(changes.values())}"
            break
    raise UserError(f"does not fit: {reason}, of {_gib(devices.room)} free; {advice}")


def _fit(config: JobConfig, shape: ModelConfig, devices: Devices, progress: Any) -> Fit:
    from minirl.plan.fit import fit

    has_sampler = config.rollout.backend == "native"
    return fit(workload_of(config, shape), devices, progress, has_sampler=has_sampler)


def _savings(config: JobConfig) -> Iterator[str]:
    """Yield what takes memory off a job, from what costs least to what changes what is trained."""
    yield "train.batching.micro_batch_tokens=auto"
    if config.model.remat == "none":
        yield "model.remat=dots"
    yield "model.remat=full"
    if config.sampler.slots > _FEW_SLOTS:
        yield f"sampler.slots={_FEW_SLOTS}"
    if config.train.lora is None:
        yield "train.lora.rank=16"


def _changed(config: JobConfig, setting: str) -> JobConfig:
    """Return a job with another setting, or as it is where that contradicts others."""
    try:
        raw = config_merge.override(config.model_dump(mode="json"), setting)
        return JobConfig.model_validate(raw)
    except ValidationError:
        return config


def _with_plan(config: JobConfig, plan: Plan) -> JobConfig:
    """Return a job with the sizes of a plan where they were left to the program."""
    changes: dict[str, Any] = {}
    if config.sampler.cache_gb is None:
        sampler = config.sampler.model_copy(update={"cache_gb": plan.cache_gb})
        changes["sampler"] = sampler
    for name, phase in (("train", config.train), ("warm_start", config.warm_start)):
        if phase is not None and phase.batching.micro_batch_tokens == "auto":
            tokens = {"micro_batch_tokens": plan.micro_batch_tokens}
            batching = phase.batching.model_copy(update=tokens)
            changes[name] = phase.model_copy(update={"batching": batching})
    return config.model_copy(update=changes)


def model_shape(config: JobConfig, name: str | None) -> ModelConfig:
    """Return the shape of the named model, or of the job's own."""
    from launch.tiny import tiny_shape
    from minirl.model.config import read_config
    from minirl.plan.fit import published_shape

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


def _show(plan: dict[str, Any]) -> None:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    title = f"{plan['model']} ({plan['parameters'] / 1e9:.2f} B) on {plan['topology']}: {mesh}"
    columns = (plan["update_memory_bytes"], plan["generation_memory_bytes"])
    lines = [("a device's memory, GiB", "update", "generation")]
    for name in dict.fromkeys([*columns[0], *columns[1]]):
        cells = (f"{kinds[name] / _GIB:.2f}" if name in kinds else "" for kinds in columns)
        lines.append((name, *cells))
    lines.append(("together", *(f"{sum(kinds.values()) / _GIB:.2f}" for kinds in columns)))
    room = plan["room_bytes"]
    known = "not known" if room is None else f"{room / _GIB:.2f}"
    show_table(title, [*lines, ("may be filled", known, known)], sections=(len(lines) - 2,))
    batch = f"train.batching.micro_batch_tokens={plan['micro_batch_tokens']}"
    cli.output.print(f"Micro-batch of a device: {batch}", soft_wrap=True)
    if sampler_mesh := plan["sampler_mesh"]:
        axes = [f"{axis} {size}" for axis, size in sampler_mesh.items() if size > 1]
        each = " x ".join(axes) or "one device"
        cli.output.print(f"Samplers: {plan['processes']}, each on {each}")
    cli.output.print(f"This plan took {plan['plan_s']:.0f} s")


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


if __name__ == "__main__":
    cli.run(main)
