"""Plan a job for devices that are not here: does it fit, and with which micro-batch.

The programs of the update and of the sampler are compiled ahead of time by the devices' own
compiler; nothing is computed and no weights are needed. docs/scaling.md says what a plan counts.

    python -m launch.plan --cfg progress.yaml --topology v5e:2x2 sampler.slots=32
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

from launch import cli, options
from launch.config import JobConfig, load_config
from launch.tables import show_table
from minirl.model.config import ModelConfig

_GIB = 2**30
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
    from launch.learner import mesh_sizes, model_shape, phase_of
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
    learner = sum(plans["train"].largest.values()) / FILLED
    return {
        "model": model or str(config.model.path or "tiny"),
        "parameters": parameters,
        "topology": topology.name,
        "devices": topology.size,
        "processes": topology.size // topology.host.size,
        "mesh": dict(mesh.shape),
        "room_bytes": devices.room if math.isfinite(devices.room) else None,
        "phases": {section: plan.model_dump() for section, plan in plans.items()},
        "servers": _servers(config, shape, memory_bytes, parameters, learner=learner),
    }


def _servers(
    config: JobConfig, shape: ModelConfig, memory_bytes: float, parameters: int, *, learner: float
) -> dict[str, dict[str, float]]:
    """Plan SGLang's servers on GPUs of their own, and beside the learner on its GPUs, where the job
    launches any: XLA's and SGLang's shares of a GPU, and the tokens of a server's cache. The
    learner takes so many bytes.
    """
    sglang = config.rollout.sglang
    if config.rollout.sampler == "native" or not sglang.launch or not math.isfinite(memory_bytes):
        return {}
    from minirl.sample.cache import token_bytes

    itemsize = {"bfloat16": 2, "float32": 4}[config.model.dtype]
    gpus = len(sglang.devices[0].split(",")) if sglang.devices else 1
    own = token_bytes(shape, itemsize=itemsize)
    found = {}
    for place, taken in {"apart": 0.0, "shared": learner}.items():
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
