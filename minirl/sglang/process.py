"""SGLang servers that this process starts, and that end with it, however it ends."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minirl.config import SglangConfig

_HOST = "127.0.0.1"
# What a server has to end by itself after SIGTERM.
_GRACE_S = 2.0
_LOG_CHARACTERS = 300
# SGLang takes 22,000 to 29,999 for its own, Linux 32,768 and more for connections.
_PORTS = range(10_000, 22_000)
# Lets a command end with the thread that starts it; what SGLang starts ends with SGLang so, too.
# Only Linux can (PR_SET_PDEATHSIG), and Python code between fork and exec might wait for ever for a
# lock of one of JAX's threads.
_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class ChildServer:
    """A server on this host, started when this is made; its output is appended to a log."""

    def __init__(self, command: list[str], variables: dict[str, str], port: int, log: Path) -> None:
        self.url = f"http://{_HOST}:{port}"
        self._command, self._variables, self._log = command, variables, log
        self._process: subprocess.Popen | None = None
        self._lock, self._is_closed = Lock(), False
        self.start()

    @property
    def is_running(self) -> bool:
        """Tell whether it has not ended by itself."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """End it if it runs, and start it again; do nothing after `close`."""
        with self._lock:
            self._end()
            if self._is_closed:
                return
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-SIc", _TIED, str(os.getpid()), *self._command],
                    env=os.environ | self._variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C at the terminal is for the learner alone.
                    start_new_session=True,
                )

    def close(self) -> None:
        """End it for good, with all that it has started."""
        with self._lock:
            self._is_closed = True
            self._end()

    def log_tail(self) -> str:
        """Say where its log is, and how it ends."""
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        return f"{self._log} ends with {' '.join(text[-_LOG_CHARACTERS:].split())!r}"

    def _end(self) -> None:
        if self._process is None:
            return
        # Even if the server has ended, processes that it started may be left.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)


def close(children: Sequence[ChildServer]) -> None:
    """End servers side by side: a cluster's notice is short."""
    with ThreadPoolExecutor(max(len(children), 1)) as threads:
        list(threads.map(lambda child: child.close(), children))


def launch(
    config: SglangConfig,
    model: Path,
    *,
    dtype: str,
    seed: int,
    logs: Path,
    first: int = 0,
    options: Sequence[str] = (),
) -> list[ChildServer]:
    """Start the servers that a process of a run launches, with logs in a folder.

    `first` is the number of the first one among those of all processes; the seed is that of the
    run's server 0, the others count on from it. `options` come before those of the settings.
    """
    if not config.launch:
        return []
    logs.mkdir(parents=True, exist_ok=True)
    python = config.find_python()
    # SGLang calls programs of its environment (ninja), as if that were activated.
    path = os.pathsep.join([str(Path(python).parent.absolute()), os.environ["PATH"]])
    children: list[ChildServer] = []
    for index, port in enumerate(free_ports(config.launch)):
        arguments = {
            "model-path": str(model.absolute()),
            "host": _HOST,
            "port": port,
            "dtype": dtype,
            "random-seed": (seed + first + index) % 2**31,
            "skip-server-warmup": True,
            **config.arguments,
        }
        command = [python, "-m", "sglang.launch_server", *options]
        for name, value in arguments.items():
            if value is not False:
                command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        variables = {"PATH": path, **config.variables}
        if config.devices:
            variables["CUDA_VISIBLE_DEVICES"] = config.devices[index]
        log = logs / f"sglang-{first + index}.log"
        children.append(ChildServer(command, variables, port, log))
    return children


def free_ports(count: int) -> list[int]:
    """Find ports that nobody uses, below those that the system gives to connections.

    A server listens long after its port was found, and by then a port of the system's may be a
    connection's.
    """
    ports = random.SystemRandom().sample(_PORTS, len(_PORTS))
    return list(itertools.islice(filter(_is_free, ports), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind((_HOST, port))
        return True
    return False
