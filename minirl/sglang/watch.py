"""Run a command that ends with its parent, however that ends: `python -P watch.py COMMAND...`.

Started as a file, so that nothing else is imported. The command has a session of its own: Ctrl-C at
the terminal is for the parent, and all that the command starts is ended with it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_LOOK_EVERY_S = 0.5
_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Run a command until it ends, standard input is closed, or the parent is gone."""
    parent = os.getppid()
    # Only this process may end the command: whoever wants that closes standard input.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent
    )
    try:
        while child.poll() is None and os.getppid() == parent:
            if select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
                break
    finally:
        _end(child)
    return child.returncode


def _end_with_parent() -> None:
    """Ask the system to end this process when its parent is killed; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(child: subprocess.Popen) -> None:
    """End the session: politely, then at once."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    # Also after a good end: some of its processes may be left.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
