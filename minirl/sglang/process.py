"""SGLang servers that this process starts, and that end with it, however it ends.

Run as a program, `python -P process.py COMMAND...`, this file is the watchdog between the two: it
runs the command in a session of its own (Ctrl-C at the terminal is for the learner alone), and ends
the whole session when the learner closes the watchdog's standard input or dies. It therefore
imports nothing outside of the standard library.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minirl.config import SglangConfig

_HOST = "127.0.0.1"
_END_S, _POLL_S = 20, 0.5
# What a server has to end by itself after SIGTERM.
_GRACE_S = 2.0
_LOG_CHARACTERS = 300
_PR_SET_PDEATHSIG = 1


class ChildServer:
    """A server on this host, started when this is made; its output is appended to a log."""

    def __init__(self, command: list[str], variables: dict[str, str], port: int, log: Path) -> None:
        self.url = f"http://{_HOST}:{port}"
        self._command, self._variables, self._log = command, variables, log
        self._watchdog: subprocess.Popen | None = None
        self._lock, self._is_closed = Lock(), False
        self.start()

    @property
    def is_running(self) -> bool:
        """Tell whether it has not ended by itself."""
        return self._watchdog is not None and self._watchdog.poll() is None

    def start(self) -> None:
        """End it if it runs, and start it again; do nothing after `close`."""
        with self._lock:
            self._end()
            if self._is_closed:
                return
            with self._log.open("ab") as log:
                self._watchdog = subprocess.Popen(
                    # -P: the modules beside this file are none of the standard library's.
                    [sys.executable, "-P", __file__, *self._command],
                    env=os.environ | self._variables,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
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
        if self._watchdog is None:
            return
        assert self._watchdog.stdin is not None
        with suppress(BrokenPipeError):
            self._watchdog.stdin.close()
        try:
            self._watchdog.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()


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
    """Find ports that nobody uses; all are held at once, so that none is found twice."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in held]


def watch(command: list[str]) -> int:
    """Run a command until it ends, standard input is closed, or the parent is gone."""
    parent = os.getppid()
    # Whoever wants the command to end closes standard input.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent
    )
    try:
        while server.poll() is None and os.getppid() == parent:
            if select.select([sys.stdin], [], [], _POLL_S)[0]:
                break
    finally:
        _end_session(server)
    return server.returncode


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_session(server: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(_GRACE_S)
    # Even if the server has ended, processes that it started may be left.
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    sys.exit(watch(sys.argv[1:]))
