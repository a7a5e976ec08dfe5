"""Plan a job for devices that are not here: does it fit, and with which micro-batch.

The programs of the update and of the sampler are compiled ahead of time by the devices' own
compiler; nothing is computed and no weights are needed. docs/scaling.md says what a plan counts.

    python -m launch.plan --cfg progress.yaml --topology v5e:2x2 sampler.slots=32
"""

from __future__ import annotations

import logging
import math
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import cli, options
from launch.build import arrange, mesh_sizes
from launch.config import JobConfig, load_config
from launch.files import write_json
from launch.tables import show_table
from minirl.config import LoraConfig
from minirl.exchange import UserError
from minirl.exchange.memory import trim
from minirl.model.config import ModelConfig, read_config
from minirl.run.files import read_json

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from minirl.model.decoder import Decoder
    from minirl.plan.fit import Devices, Phase, Plan, Section
    from minirl.train.supervised import Lessons

_log = logging.getLogger(__name__)

_GIB = 2**30
PLAN = "plan.json"
_BASIS = "basis"  # in plan.json: what it was made from
# Share of the memory free beside a CPU that a plan fills: other programs want more at times, and
# the run itself has data and processes of queries there.
_CPU_FILLED = 0.8
# A model whose weights and optimizer take less of a device's memory fits, whatever else it needs.
_SMALL_SHARE = 1 / 256
# Shares of a GPU's free memory for the weights and the cache of an SGLang server: the rest is for
# its activations and CUDA graphs, which take more of what a learner on the same GPU leaves.
_STATIC = {"apart": 0.85, "shared": 0.8}
# What SGLang gives to states of linear attention, of what it gives to keys and values
# (`--mamba-full-memory-ratio`).
_STATES = 0.9


@options.command
def main(
    *overrides: options.Overrides,
    cfg: options.ConfigOption,
    topology: str,
    model: options.ModelOption = None,
    json: options.JsonOption = None,
) -> None:
    """Plan a job.

    Args:
        topology: v5e:4x4, v5p:4x4x4, v6e:8x8 (TPU slices), h100x1, a100x8, a800x32, h200x8 (GPUs)
    """
    options.check_result(json)
    config = load_config(cfg, overrides)
    with cli.progress_bar("plan") as progress:
        found = make_plan(config, topology, model=model, progress=progress)
    if json != options.STDOUT:
        _show(found)
    options.write_result(json, found)


def make_plan(
    config: JobConfig, topology_name: str, *, model: str | None, progress: Any
) -> dict[str, Any]:
    """Plan a job, as JSON has it; bytes are those of one device.

    The model is the name of a published shape; None for the job's own.
    """
    # JAX takes seconds to import, and mistakes above need not wait for it.
    import jax

    # Devices are described; the ones that are here are left alone.
    jax.config.update("jax_platforms", "cpu")
    from minirl.model.sharding import make_mesh
    from minirl.plan.compile import described_devices, parse_topology
    from minirl.plan.fit import FILLED, SECTIONS, Devices

    topology = parse_topology(topology_name)
    shape, memory_bytes = model_shape(config, model), topology.chip.memory_bytes
    mesh = make_mesh(mesh_sizes(config, shape, topology.size), described_devices(topology))
    # Described apart: compilers know no part of a slice.
    devices = Devices(described_devices(topology.host), FILLED * memory_bytes)
    phases = {
        section: phase_of(config, shape, section, mesh, devices)
        for section in SECTIONS
        if getattr(config, section) is not None
    }
    plans = {section: phase.fit(progress) for section, phase in phases.items()}
    progress(1, 1, "done")
    parameters = phases["train"].parameters
    return {
        "model": model or str(config.model.path or "tiny"),
        "parameters": parameters,
        "topology": topology.name,
        "devices": topology.size,
        "processes": topology.size // topology.host.size,
        "mesh": dict(mesh.shape),
        "room_bytes": devices.room if math.isfinite(devices.room) else None,
        "phases": {section: plan.model_dump() for section, plan in plans.items()},
        "servers": _servers(config, shape, memory_bytes, parameters, plans["train"]),
    }


def _servers(
    config: JobConfig, shape: ModelConfig, memory_bytes: float, parameters: int, learner: Plan
) -> dict[str, dict[str, float]]:
    """Plan SGLang's servers on GPUs of their own, and beside the learner on its GPUs, where the job
    launches any: XLA's and SGLang's shares of a GPU, and the tokens of a server's cache.
    """
    sglang = config.rollout.sglang
    if config.rollout.sampler == "native" or not sglang.launch or not math.isfinite(memory_bytes):
        return {}
    from minirl.plan.fit import FILLED
    from minirl.sample.cache import token_bytes

    itemsize = {"bfloat16": 2, "float32": 4}[config.model.dtype]
    gpus = len(sglang.devices[0].split(",")) if sglang.devices else 1
    own = token_bytes(shape, itemsize=itemsize)
    found = {}
    for place, taken in {"apart": 0.0, "shared": sum(learner.largest.values()) / FILLED}.items():
        xla = math.ceil(100 * taken / memory_bytes) / 100
        static = _STATIC[place] * (1 - xla) * memory_bytes
        cache = gpus * static - itemsize * parameters
        cache /= 1 + _STATES * bool(shape.hybrid)
        found[place] = {
            "xla_client_mem_fraction": xla,
            "mem_fraction_static": _STATIC[place],
            "static_bytes": static,
            "cache_tokens": max(cache // own, 0),
        }
    return found


def phase_of(
    config: JobConfig,
    shape: ModelConfig,
    section: Section,
    mesh: Mesh | None,
    devices: Devices,
    lessons: Lessons | None = None,
) -> Phase:
    """Build a phase of a job, of weights that are shapes.

    Without lessons those of the warm start may be as long as the longest prompt and response.
    """
    from minirl.plan.fit import Learning, WarmStart, abstract_model

    def model(lora: LoraConfig | None) -> Decoder:
        return abstract_model(shape, config.model, mesh, lora=lora)

    train, warm = config.train, config.warm_start
    if section == "warm_start":
        assert warm is not None
        return WarmStart(model(warm.lora), warm, config.sampler, devices, lessons)
    return Learning(
        model(train.lora), train, config.sampler, devices,
        evaluation=config.evaluation_sampler, first=model(None) if config.has_base else None,
        has_sampler=config.rollout.sampler == "native",
    )  # fmt: skip


def plan_memory(
    config: JobConfig, folder: Path, section: Section = "train", lessons: Lessons | None = None
) -> JobConfig:
    """Compile the largest programs of a phase for the devices that are here, and refuse what does
    not fit; return the job with micro-batches and a cache of a size where they had none.

    The plan is kept in the folder: a run that is resumed on the same devices has the same
    micro-batches. A model that is small beside the memory is not compiled for it.

    Raises:
        UserError: The phase needs more than there is.
    """
    from minirl.plan.fit import SECTIONS
    from minirl.run import distributed

    plan = kept_plan(config, folder, section)
    if plan is None:
        plans = distributed.gather(lambda: plan_phase(config, section, lessons))
        plan = min(plans, key=lambda plan: plan.micro_batch_tokens)
        kept = {**plan.model_dump(), _BASIS: _basis(config, section)}
        distributed.from_first(lambda: write_json(folder / PLAN, kept))
    _log.info("memory of %s: %s", SECTIONS[section], plan)
    phase, sampler, changed = getattr(config, section), config.sampler, dict[str, Any]()
    if sampler.cache_gb is None:
        changed["sampler"] = sampler.model_copy(update={"cache_gb": plan.cache_gb})
    if phase.batching.micro_batch_tokens == "auto":
        tokens = {"micro_batch_tokens": plan.micro_batch_tokens}
        batching = phase.batching.model_copy(update=tokens)
        changed[section] = phase.model_copy(update={"batching": batching})
    return config.model_copy(update=changed)


def kept_plan(config: JobConfig, folder: Path, section: Section) -> Plan | None:
    """Return the plan that a folder keeps, if it was made for devices and settings like these."""
    from minirl.plan.fit import Plan
    from minirl.run import distributed
    from minirl.run.files import check

    path, advice, basis = folder / PLAN, "delete it to plan again", _basis(config, section)

    def read() -> Plan | None:
        kept = read_json(path, dict[str, Any], advice=advice) if path.exists() else {}
        is_same = kept.get(_BASIS) == basis
        return check(Plan, kept, where=str(path), advice=advice) if is_same else None

    return distributed.from_first(read)  # hosts that share a disk may see it later


def _basis(config: JobConfig, section: Section) -> dict[str, Any]:
    """Tell what a plan is made from, of what may change while a run goes on: the devices of each
    process, of how much memory, which machines of a kind have to a few megabytes, and settings.
    """
    import jax

    from minirl.run import distributed
    from minirl.run.memory import capacity_bytes

    own = jax.local_devices()
    device = own[0].device_kind, len(own), round(capacity_bytes(own[0]) / _GIB)
    settings: dict[str, Any] = {"mesh": True, "model": {"remat"}, section: {"batching"}}
    basis = {"devices": [[*one] for one in distributed.gather(lambda: device)]}
    if section == "train":  # a warm start samples nothing
        settings["sampler"] = {"slots", "cache_gb"}
        basis["backend"] = config.rollout.sampler
    return basis | config.model_dump(mode="json", include=settings)


def plan_phase(config: JobConfig, section: Section, lessons: Lessons | None = None) -> Plan:
    """Plan a phase of a job for this process's devices."""
    import jax

    from minirl.plan.fit import FILLED, SECTIONS, Devices, Plan
    from minirl.run.memory import free_bytes, resident_bytes

    own = jax.local_devices()
    free, taken = free_bytes(own[0]), 0.0
    if own[0].platform == "cpu":
        trim()  # of what was planned before
        taken = resident_bytes() / len(own)
        room = taken + _CPU_FILLED * free / len(own)
    else:
        room = FILLED * free
    devices = Devices(own, room, taken)
    shape = model_shape(config)
    phase = phase_of(config, shape, section, arrange(config, shape), devices, lessons)
    if sum(phase.memory.values()) < _SMALL_SHARE * room:
        return Plan(micro_batch_tokens=getattr(config, section).batching.budget)
    with cli.progress_bar(f"memory of {SECTIONS[section]}") as progress:
        plan = phase.fit(progress)
    trim()
    return plan


def model_shape(config: JobConfig, name: str | None = None) -> ModelConfig:
    """Return the shape of the named model, or of the job's own."""
    from launch.tiny import tiny_shape
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
    train, warm = plan["phases"]["train"], plan["phases"].get("warm_start")
    columns = {
        "update": train["update_memory_bytes"],
        "generation": train["generation_memory_bytes"],
        **({"warm start": warm["update_memory_bytes"]} if warm else {}),
    }
    lines = [("a device's memory, GiB", *columns)]
    for name in dict.fromkeys(chain(*columns.values())):
        cells = (f"{kinds[name] / _GIB:.2f}" if name in kinds else "" for kinds in columns.values())
        lines.append((name, *cells))
    sums = (f"{sum(kinds.values()) / _GIB:.2f}" for kinds in columns.values())
    lines.append(("together", *sums))
    room = plan["room_bytes"]
    known = "not known" if room is None else f"{room / _GIB:.2f}"
    lines.append(("may be filled", *[known] * len(columns)))
    show_table(title, lines, sections=(len(lines) - 3,))
    batch = " ".join(
        f"{section}.batching.micro_batch_tokens={phase['micro_batch_tokens']}"
        for section, phase in plan["phases"].items()
    )
    cli.output.print(f"Micro-batch of a device: {batch}")
    if sampler_mesh := train["sampler_mesh"]:
        axes = [f"{axis} {size}" for axis, size in sampler_mesh.items() if size > 1]
        each = " x ".join(axes) or "one device"
        cli.output.print(f"Samplers: {plan['processes']}, each on {each}")
    for place, server in plan["servers"].items():
        cli.output.print(_server_line(place, server))


def _server_line(place: str, server: dict[str, float]) -> str:
    where = {"apart": "on GPUs of their own", "shared": "on the learner's GPUs"}[place]
    if not server["cache_tokens"]:
        return f"Servers {where}: no room"
    learner = server["xla_client_mem_fraction"]
    first = f"XLA_CLIENT_MEM_FRACTION={learner:g} and " if learner else ""
    return (
        f"Servers {where}: {first}mem-fraction-static={server['mem_fraction_static']:g}, "
        f"{server['static_bytes'] / _GIB:.1f} GiB of a GPU, with a cache of "
        f"{server['cache_tokens']:,.0f} tokens each"
    )


if __name__ == "__main__":
    cli.run(main)
