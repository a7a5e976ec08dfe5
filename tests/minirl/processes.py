"""Processes that a test starts, of the toy run or of a script; several find each other."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# On a free core a process takes ten seconds, on a loaded machine minutes.
LIMIT_S = 480


def start(arguments, *, code="", count=1, cwd=HERE):
    """Start processes of `toy_run.py`, or of other code; several have two devices each."""
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}
    if count > 1:
        environment["XLA_FLAGS"] = re.sub(
            r"device_count=\d+", "device_count=2", environment["XLA_FLAGS"]
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for process in range(count):
        line = [sys.executable, *(["-c", code] if code else [HERE / "toy_run.py"]), *arguments]
        line += [coordinator, count, process] if count > 1 else []
        started.append(
            subprocess.Popen(
                list(map(str, line)),
                env=environment,
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ends(started):
    """Return status, output and errors of all; those that do not end are killed, and it shows."""
    until = time.monotonic() + LIMIT_S
    said = []
    for one in started:
        try:
            said.append(one.communicate(timeout=max(until - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            one.kill()
            said.append(one.communicate())
    return [(one.returncode, *texts) for one, texts in zip(started, said, strict=True)]
