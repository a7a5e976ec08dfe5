"""Compile a job's programs for devices that are not here: `v5p:4x4x4`, `h100x8`.

XLA's compilers for TPUs (libtpu) and for NVIDIA GPUs (JAX's CUDA plug-in) compile for a described
device; neither needs one. They plan the memory, and give no error of a GPU's: the sum is compared
with the device's memory here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import jax
from jax.stages import Lowered

from minirl.errors import UserError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator, by its maker's data sheet.

    Attributes:
        kind: Whose compiler; `cpu` is a pretended device without a limit.
        memory_bytes: Its memory, as its compiler or its driver tells it.
        flops_s: Peak of dense bf16 products, operations a second.
        memory_bytes_s: Peak of its memory.
        name: Its name to the CUDA compiler.
    """

    kind: Literal["tpu", "gpu", "cpu"]
    memory_bytes: float
    flops_s: float
    memory_bytes_s: float
    name: str = ""


CHIPS = {
    "v5e": Chip("tpu", 15.75 * _GIB, 197e12, 819e9),
    "v5p": Chip("tpu", 95.74 * _GIB, 459e12, 2765e9),
    "v6e": Chip("tpu", 31.25 * _GIB, 918e12, 1600e9),
    "h100": Chip("gpu", 84_942_979_072, 989e12, 3352e9, "NVIDIA H100 80GB HBM3"),
    "h200": Chip("gpu", 150_109_945_856, 989e12, 4800e9, "NVIDIA H200"),
    "cpu": Chip("cpu", math.inf, 197e12, 819e9),
}
"""Sources: docs.cloud.google.com/tpu/docs/v5e, v5p and v6e, with the memory that libtpu reports;
NVIDIA's data sheets of the H100 SXM and the H200 SXM, with the memory that the driver reports."""

# Devices of a process: GPUs of a node, TPU chips of a host along each axis.
_NODE = 8
_HOST = (2, 2, 1)
_SLICE = re.compile(r"(v\w+):(\d+(?:x\d+){1,2})")
_NODES = re.compile(r"([a-z]+\d*)x(\d+)")

# A Hopper GPU as XLA's compiler wants it described. Without `cub_version`: a sort would ask for a
# device.
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  name: "{name}"  device_vendor: "NVIDIA Corporation"
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98  threads_per_warp: 32
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  device_memory_size: {memory:.0f}  memory_bandwidth: {speed:.0f}  l2_cache_size: 52428800
  pcie_bandwidth: 34359738368  device_address_bits: 64
  device_interconnect_info {{ active_links: 18 }}
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True, slots=True)
class Topology:
    """So many chips of one kind.

    Attributes:
        name: As it was written.
        chip: What each of them is.
        shape: Of a TPU slice the lengths of its axes; else their number.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Count the chips."""
        return math.prod(self.shape)

    @property
    def host(self) -> Topology:
        """Return the part that one process has: four TPU chips, a node of GPUs, or all."""
        if self.chip.kind == "cpu":
            return self
        largest = _HOST if self.chip.kind == "tpu" else (_NODE,)
        shape = tuple(map(min, self.shape, largest))
        separator = ":" if self.chip.kind == "tpu" else "x"
        kind = re.split("[:x]", self.name)[0]
        return replace(self, name=f"{kind}{separator}{'x'.join(map(str, shape))}", shape=shape)


def parse_topology(text: str) -> Topology:
    """Read `v5p:4x4x4`, `v5e:4x4`, `h100x8`, or `cpux8` for pretended devices.

    Raises:
        UserError: No chip that is known, or no shape.
    """
    match = _SLICE.fullmatch(text) or _NODES.fullmatch(text)
    name = match[1] if match else text
    if match is None or name not in CHIPS or (CHIPS[name].kind == "tpu") != (":" in text):
        raise UserError(
            f"--topology {text}: unknown; write a TPU slice (v5e:4x4, v5p:4x4x4, v6e:8x8) or a "
            "number of GPUs (h100x8, h200x8)"
        )
    shape = tuple(map(int, match[2].split("x")))
    if min(shape) < 1:
        raise UserError(f"--topology {text}: no chips")
    if CHIPS[name].kind == "gpu" and shape[0] > _NODE and shape[0] % _NODE:
        raise UserError(f"--topology {text}: write whole nodes of {_NODE} GPUs")
    return Topology(text, CHIPS[name], shape)


def described_devices(topology: Topology) -> list[Any]:
    """Return devices to compile for, none of which need be here.

    Raises:
        UserError: The compiler is not installed, or there is no TPU slice of that shape.
    """
    if topology.chip.kind == "tpu":
        return _tpu_devices(topology)
    return _gpu_devices(topology) if topology.chip.kind == "gpu" else _cpu_devices(topology.size)


def _need(topology: Topology, modules: Sequence[str], extra: str) -> None:
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise UserError(
            f"--topology {topology.name}: its compiler is not installed: pip install '.[{extra}]' "
            "in an environment of its own; no device is needed"
        )


def _gpu_devices(topology: Topology) -> list[Any]:
    # ptxas and libdevice, which the plug-in runs, are in these packages.
    _need(topology, ("jax_plugins.xla_cuda13", "nvidia.cu13", "nvidia.cudnn"), "plan-gpu")
    # The compiler warns of what it would measure on a device.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from jax.experimental import topologies

    chip = topology.chip
    described = _HOPPER.format(name=chip.name, memory=chip.memory_bytes, speed=chip.memory_bytes_s)
    nodes, each = max(topology.size // _NODE, 1), min(topology.size, _NODE)
    found = topologies.get_topology_desc(
        platform="cuda", target_config=described, topology=f"1x{nodes}x{each}"
    )
    return list(found.devices)


def _tpu_devices(topology: Topology) -> list[Any]:
    _need(topology, ("libtpu",), "tpu")
    # libtpu looks for a TPU machine around it, and complains.
    quiet = {
        "TPU_SKIP_MDS_QUERY": "1",
        # No TPU is used, so another process may have one, or describe one too.
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
        found = topologies.get_topology_desc(name, platform="tpu", chips_per_host_bounds=host)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"--topology {name}: no such slice ({reason})") from None
    return list(found.devices)


def _cpu_devices(size: int) -> list[Any]:
    """Pretend so many CPU devices, unless XLA_FLAGS or an earlier use of JAX has decided."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", size)
    devices = jax.devices("cpu")
    if len(devices) < size:
        raise UserError(f"--topology: {size} devices are asked for, and {len(devices)} pretended")
    return devices[:size]


@dataclass(frozen=True, slots=True)
class Program:
    """What the compiler says of a program; bytes are those of one device.

    Attributes:
        name: Which one.
        arguments: Bytes of what it is given.
        outputs: Bytes of what it returns in memory of its own, not in that of its arguments.
        temporaries: Bytes that it takes besides while it runs.
        seconds: How long it took to compile.
        problem: The compiler's words where the program does not fit an empty device.
    """

    name: str
    arguments: float
    outputs: float
    temporaries: float
    seconds: float
    problem: str = ""

    @property
    def total(self) -> float:
        """Return all bytes while it runs."""
        return self.arguments + self.outputs + self.temporaries


def compile_program(name: str, lowered: Lowered, *, options: Mapping[str, Any]) -> Program:
    """Compile a program and read what there is to know of it.

    Args:
        name: Of the program.
        lowered: What is compiled.
        options: The compiler's.
    """
    started = perf_counter()
    try:
        with warnings.catch_warnings():
            # A program for devices that are not here is kept, but cannot be read again.
            warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation")
            compiled = lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        problem = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in problem:
            raise
        return Program(name, 0, 0, math.inf, perf_counter() - started, problem[:300])
    memory: Any = compiled.memory_analysis()
    return Program(
        name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        seconds=perf_counter() - started,
    )
