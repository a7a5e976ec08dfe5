"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(is_so: Callable[[], object], *, limit_s: float = 120) -> None:
    """Wait, on a machine with much to do for minutes, until something is so."""
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int | str) -> bool:
    """Tell whether a process runs: one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
