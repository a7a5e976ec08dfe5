"""The accelerators that a plan knows, and how they are wired: `v5p:4x4x4`, `h100x8`."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from minirl.errors import UserError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    """What one accelerator can do, by its maker.

    Attributes:
        kind: What it is, and so how several are wired: a torus of TPUs, a node of GPUs, or
            nothing known of it.
        flops_s: Peak of dense bf16 products, operations a second.
        memory_bytes: What a program may use.
        memory_bytes_s: Peak of its memory.
        link_bytes_s: Of one link in one direction. A TPU has two links an axis of the torus; a
            GPU's links to its node are counted as one.
        wraps: Smallest length of an axis whose ends are wired to each other.
        network_bytes_s: To GPUs of other nodes.
    """

    kind: Literal["tpu", "gpu", "cpu"]
    flops_s: float
    memory_bytes: float
    memory_bytes_s: float
    link_bytes_s: float
    wraps: int = 0
    network_bytes_s: float = 0.0


CHIPS = {
    "v5e": Chip("tpu", 197e12, 15.75 * _GIB, 819e9, 50e9, wraps=16),
    "v5p": Chip("tpu", 459e12, 95.74 * _GIB, 2765e9, 100e9, wraps=4),
    "v6e": Chip("tpu", 918e12, 31.25 * _GIB, 1600e9, 100e9, wraps=16),
    "h100": Chip("gpu", 989e12, 79.1 * _GIB, 3350e9, 450e9, network_bytes_s=50e9),
    "h200": Chip("gpu", 989e12, 139.8 * _GIB, 4800e9, 450e9, network_bytes_s=50e9),
    # Pretended devices, to try a plan out: as one TPU v5e each, without its limit of memory.
    "cpu": Chip("cpu", 197e12, math.inf, 819e9, 50e9),
}
"""Sources. TPUs: the tables of docs.cloud.google.com/tpu/docs/v5e, v5p and v6e; the interconnect
given there (1,600, 4,800 and 3,200 Gbit/s) is that of all links of a chip, 4 on a 2D and 6 on a 3D
torus; usable memory is what libtpu's compiler says is there. GPUs: NVIDIA's data sheets of the H100
SXM and the H200 SXM (dense products, NVLink 900 GB/s in both directions together, 400 Gbit/s of
network a GPU in a DGX); usable memory is what the driver leaves of 80 and 141 GB."""

# Chips of a process: GPUs of a node, TPUs of a host along each axis.
_NODE = 8
_HOST = (2, 2, 1)
_TORUS = re.compile(r"(v\w+):(\d+(?:x\d+){1,2})")
_NODES = re.compile(r"([a-z]+\d*)x(\d+)")


@dataclass(frozen=True, slots=True)
class Topology:
    """So many chips of one kind, and how they are wired.

    Attributes:
        name: As it was written.
        chip: What each of them is.
        shape: Lengths of the torus; of GPUs their number alone.
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
        if self.chip.kind != "tpu":
            size = min(self.size, _NODE) if self.chip.kind == "gpu" else self.size
            return replace(self, shape=(size,))
        shape = tuple(map(min, self.shape, _HOST))
        kind, _, _ = self.name.partition(":")
        return replace(self, name=f"{kind}:{'x'.join(map(str, shape))}", shape=shape)

    def bytes_s(self, devices: Sequence[Any]) -> float:
        """Return what each of a group of devices can take from the others, at most.

        A group on a torus uses both links of every axis that it spans where the axis is a ring,
        and one where it is a line, whose ends take everything through one link.
        """
        if self.chip.kind == "gpu":
            nodes = {device.id // _NODE for device in devices}
            return self.chip.network_bytes_s if len(nodes) > 1 else self.chip.link_bytes_s
        places = [getattr(device, "coords", (device.id,)) for device in devices]
        spanned = [
            axis for axis, along in enumerate(zip(*places, strict=True)) if len({*along}) > 1
        ]
        return self.chip.link_bytes_s * max(sum(map(self._links, spanned)), 1)

    def _links(self, axis: int) -> int:
        length = self.shape[axis]
        return 2 if self.chip.wraps and length % self.chip.wraps == 0 else 1


def parse_topology(text: str) -> Topology:
    """Read `v5p:4x4x4`, `v5e:4x4`, `h100x8`, or `cpux8` for pretended devices.

    Raises:
        UserError: No chip that is known, or no shape.
    """
    match = _TORUS.fullmatch(text) or _NODES.fullmatch(text)
    name = match[1] if match else text
    if match is None or name not in CHIPS or (CHIPS[name].kind == "tpu") != (":" in text):
        raise UserError(
            f"--topology {text}: unknown; write a TPU slice (v5e:4x4, v5p:4x4x4, v6e:8x8) or a "
            "number of GPUs (h100x8, h200x1)"
        )
    shape = tuple(map(int, match[2].split("x")))
    if min(shape) < 1:
        raise UserError(f"--topology {text}: no chips")
    return Topology(text, CHIPS[name], shape)


def described_devices(topology: Topology) -> tuple[list[Any], str]:
    """Return devices to compile for, none of which need be here, and whose compiler that is.

    There is no compiler for GPUs without a GPU: programs for them are compiled for as many TPU
    v5p chips, which have memory of the same size, or for pretended CPU devices without libtpu.

    Raises:
        UserError: A TPU was asked for without libtpu, or it cannot have that shape.
    """
    if topology.chip.kind == "tpu":
        return _tpu_devices(topology.name, topology.shape), f"TPU ({topology.name})"
    if topology.chip.kind == "gpu" and _has_libtpu():
        shape = _as_torus(topology.size)
        name = f"v5p:{'x'.join(map(str, shape))}"
        return _tpu_devices(name, shape), f"TPU ({name}, in place of GPUs)"
    return _cpu_devices(topology.size), "CPU (pretended devices)"


def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def _tpu_devices(name: str, shape: tuple[int, ...]) -> list[Any]:
    if not _has_libtpu():
        raise UserError(
            f"--topology {name}: compiling for TPUs needs libtpu: pip install '.[tpu]'; no TPU is "
            "needed"
        )
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
    host = tuple(map(min, (*shape, 1), _HOST))
    try:
        found = topologies.get_topology_desc(name, platform="tpu", chips_per_host_bounds=host)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"--topology {name}: no such slice ({reason})") from None
    return list(found.devices)


def _as_torus(size: int) -> tuple[int, int, int]:
    """Write a number of chips as the shape of a TPU v5p slice."""
    shape = [1, 1, 1]
    while size > 1:
        if size % 2:
            raise UserError(f"--topology: {size} GPUs; write a power of two")
        size //= 2
        shape[shape.index(min(shape))] *= 2
    return shape[0], shape[1], shape[2]


def _cpu_devices(size: int) -> list[Any]:
    """Pretend so many CPU devices, where nobody has said how many and JAX has not looked yet."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", size)
    devices = jax.devices("cpu")
    if len(devices) < size:
        raise UserError(f"--topology: {size} devices are asked for, and {len(devices)} pretended")
    return devices[:size]
