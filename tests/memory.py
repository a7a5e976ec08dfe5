"""How much memory a process of a test has taken."""

import resource
from pathlib import Path


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts the process that this one was forked from into its ru_maxrss.
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
