"""Memory of devices: how much there is, and how much a run has taken; bytes."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

# Which control groups this process is in, and where they are. By the controllers that a line of the
# former names (none in version 2): where a group's limit and use are told, and how much of it is
# files that nobody has read of late, which give way.
_OWN_GROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
_GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def capacity_bytes(device: Any) -> float:
    """Return the memory of a device: what its runtime may take, or, for a CPU, all there is, of
    which a container or a job of Slurm may have a part.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None:
        return float(stats["bytes_limit"])
    return min(float(psutil.virtual_memory().total), *(limit for limit, _ in _limits()))


def free_bytes(device: Any) -> float:
    """Return what can still be taken of a device's memory; devices of a CPU share it."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return capacity_bytes(device) - stats.get("bytes_in_use", 0)
    free = float(psutil.virtual_memory().available)
    return min(free, *(limit - used for limit, used in _limits()))


def _limits() -> Iterator[tuple[float, float]]:
    """Yield the limit of each control group that this process is in, and what of it is used."""
    yield math.inf, 0.0  # no group
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else ()
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers not in _GROUPS:
            continue
        *names, inactive = _GROUPS[controllers]
        own = Path(controllers, path.lstrip("/"))
        # A container may see its own group as the first one, under a path of the machine's.
        for folder in (_CGROUP / group for group in (own, *own.parents)):
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
