"""Processes that a test starts, of the toy run or of a script; several find each other."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

HERE = Path(__file__).parent
# On a free core a process takes ten seconds, on a loaded machine minutes.
LIMIT_S = 480


def start(copies, arguments, *, code="", count=1, cwd=HERE):
    """Start processes of `toy_run.py`, or of other code; several have two devices each."""
    devices = 8 if count == 1 else 2
    flags = re.sub(r"device_count=\d+", f"device_count={devices}", os.environ["XLA_FLAGS"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    script = [] if code else [HERE / "toy_run.py"]
    return [
        copies(
            *(*script, *arguments, *([coordinator, count, process] if count > 1 else [])),
            cwd=cwd, code=code, XLA_FLAGS=flags,
        )
        for process in range(count)
    ]  # fmt: skip


def ends(started):
    """Return status, output and errors of all; those that do not end are killed, and it shows."""
    until = time.monotonic() + LIMIT_S
    ended = [one.end(timeout_s=max(until - time.monotonic(), 0.1)) for one in started]
    return [(one.returncode, one.stdout, one.stderr) for one in ended]
