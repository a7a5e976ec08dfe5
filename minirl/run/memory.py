"""Memory of devices: how much there is, and how much a run has taken; bytes."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

# Where a container's limit and use are told, and how much of it is files that nobody has read of
# late, which give way: version 2 of control groups, and version 1.
_CGROUP = Path("/sys/fs/cgroup")
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def capacity_bytes(device: Any) -> float:
    """Return the memory of a device: what its runtime may take, or, for a CPU, all there is, of
    which a container may have a part.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None:
        return float(stats["bytes_limit"])
    return min(float(psutil.virtual_memory().total), *(limit for limit, _ in _containers()))


def free_bytes(device: Any) -> float:
    """Return what can still be taken of a device's memory; devices of a CPU share it."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return capacity_bytes(device) - stats.get("bytes_in_use", 0)
    free = float(psutil.virtual_memory().available)
    return min(free, *(limit - used for limit, used in _containers()))


def _containers() -> Iterator[tuple[float, float]]:
    """Yield the limit of the container that this process is in, and what of it is used."""
    yield math.inf, 0.0  # no container
    for version, *names, inactive in _GROUPS:
        folder = _CGROUP / version
        try:
            limit, used = (float((folder / name).read_text()) for name in names)
        except (OSError, ValueError):  # no such group, or no limit
            continue
        told = folder / "memory.stat"
        parts = dict(map(str.split, told.read_text().splitlines())) if told.exists() else {}
        yield limit, used - float(parts.get(inactive, 0))


def resident_bytes() -> float:
    """Return the memory that this process takes now."""
    return float(psutil.Process().memory_info().rss)


def peak_bytes(device: Any) -> float:
    """Return the most memory that was taken at a time: of a device, or of a CPU's process."""
    if device.platform != "cpu":
        return float((device.memory_stats() or {}).get("peak_bytes_in_use", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)
