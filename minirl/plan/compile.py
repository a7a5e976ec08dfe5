"""Compile a job's programs for devices that are described, not here: `v5p:4x4x4`, `h100x8`.

libtpu reports a program that exceeds a TPU's memory; XLA's CUDA compiler does not for a GPU's.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import yaml
from jax.stages import Lowered

from minirl.exchange import UserError

_GIB = 2**30
# What XLA's CUDA compiler wants to know.
_GPUS = yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text())


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator, of so much memory as its compiler or driver reports; `cpu` is a pretended
    one without a limit.
    """

    kind: Literal["tpu", "gpu", "cpu"]
    memory_bytes: float


CHIPS = {
    "v5e": Chip("tpu", 15.75 * _GIB),
    "v5p": Chip("tpu", 95.74 * _GIB),
    "v6e": Chip("tpu", 31.25 * _GIB),
    **{name: Chip("gpu", one["memory"]) for name, one in _GPUS["chips"].items()},
    "cpu": Chip("cpu", math.inf),
}

# Devices of a process: GPUs of a node, TPU chips of a host along each axis.
_NODE = 8
_HOST = (2, 2, 1)
_SLICE = re.compile(r"(v\w+):(\d+(?:x\d+){1,2})")
_NODES = re.compile(r"([a-z]+\d*(?:-\d+)?)x(\d+)")


@dataclass(frozen=True, slots=True)
class Topology:
    """Chips of one kind (a key of `CHIPS`): the axes of a TPU slice, or a number of GPUs."""

    kind: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        """Return what each of them is."""
        return CHIPS[self.kind]

    @property
    def name(self) -> str:
        """Return it as it is written."""
        separator = ":" if self.chip.kind == "tpu" else "x"
        return f"{self.kind}{separator}{'x'.join(map(str, self.shape))}"

    @property
    def size(self) -> int:
        """Count the chips."""
        return math.prod(self.shape)

    @property
    def host(self) -> Topology:
        """Return the part that one process has: four TPU chips, a node of GPUs, or all."""
        most = {"tpu": _HOST, "gpu": (_NODE,), "cpu": self.shape}[self.chip.kind]
        return Topology(self.kind, tuple(map(min, self.shape, most)))


def parse_topology(text: str) -> Topology:
    """Read `v5p:4x4x4`, `v5e:4x4`, `h100x8`, or `cpux8` for pretended devices."""
    if match := _SLICE.fullmatch(text) or _NODES.fullmatch(text):
        topology = Topology(match[1], tuple(map(int, match[2].split("x"))))
        is_known = topology.kind in CHIPS and topology.name == text and topology.size > 0
        if is_known and topology.size % topology.host.size == 0:
            return topology
    gpus = ", ".join(name for name, chip in CHIPS.items() if chip.kind == "gpu")
    raise UserError(
        f"--topology {text}: unknown; write a TPU slice (v5e:4x4, v5p:4x4x4, v6e:8x8), up to "
        f"{_NODE} GPUs of a node, or whole nodes (a100x8, h200x16); GPUs are {gpus}"
    )


def described_devices(topology: Topology) -> list[Any]:
    """Return devices to compile for; a `UserError` tells what is not installed, or no slice."""
    describe = {"tpu": _tpu_devices, "gpu": _gpu_devices, "cpu": _cpu_devices}
    return describe[topology.chip.kind](topology)


def _need(topology: Topology, modules: Sequence[str], extra: str) -> None:
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"--topology {topology.name}: its compiler is not installed: pip install '.[{extra}]' "
            "in an environment of its own; no device is needed"
        ) from None


def _gpu_devices(topology: Topology) -> list[Any]:
    # ptxas and libdevice, which the plug-in runs, are in these packages.
    _need(topology, ("jax_plugins.xla_cuda13", "nvidia.cu13", "nvidia.cudnn"), "plan-gpu")
    # The compiler warns of what it would measure on a device.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from jax.experimental import topologies

    chip = _GPUS["chips"][topology.kind]
    described = _GPUS["description"].format(**{**chip, "architecture": _GPUS[chip["architecture"]]})
    nodes, each = max(topology.size // _NODE, 1), min(topology.size, _NODE)
    description = topologies.get_topology_desc(
        platform="cuda", target_config=described, topology=f"1x{nodes}x{each}"
    )
    return list(description.devices)


def _tpu_devices(topology: Topology) -> list[Any]:
    _need(topology, ("libtpu",), "tpu")
    # libtpu looks for a TPU machine around it, and complains; no TPU is used, so another process
    # may have one.
    quiet = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }
    for key, value in quiet.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    # Hosts of four chips, but where the slice is smaller.
    host = tuple(map(min, (*topology.shape, 1), _HOST))
    name = topology.name
    try:
        description = topologies.get_topology_desc(name, platform="tpu", chips_per_host_bounds=host)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"--topology {name}: no such slice ({reason})") from None
    return list(description.devices)


def _cpu_devices(topology: Topology) -> list[Any]:
    """Pretend CPU devices, unless XLA_FLAGS or an earlier use of JAX has decided their number."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", topology.size)
    devices, size = jax.devices("cpu"), topology.size
    if len(devices) < size:
        raise UserError(f"--topology: {size} devices are asked for, and {len(devices)} pretended")
    return devices[:size]


@dataclass(frozen=True, slots=True)
class Program:
    """What the compiler says of a program: bytes of one device, of outputs those that are not in
    the memory of donated arguments; and its words where an empty device is too small.
    """

    arguments: float
    outputs: float
    temporaries: float
    problem: str = ""


def compile_program(
    lowered: Lowered, *, level: str = "UNKNOWN", options: dict[str, Any] | None = None
) -> Program:
    """Compile a program for its devices, with an effort to make it fast: JAX's `O0` to `O3`, and
    XLA's own options.
    """
    before = jax.config.values["jax_optimization_level"]
    # As an option of `compile` it is a number in JAX 0.10 and a name in 0.12.
    jax.config.update("jax_optimization_level", level)
    try:
        with warnings.catch_warnings():
            # A program for devices that are not here is kept, but cannot be read again.
            warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation")
            compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        problem = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in problem:
            raise
        return Program(0, 0, math.inf, problem[:300])
    finally:
        jax.config.update("jax_optimization_level", before)
    memory: Any = compiled.memory_analysis()
    return Program(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
    )
