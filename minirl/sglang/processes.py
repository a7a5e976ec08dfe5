"""SGLang servers that are children of this process: started with it, and gone with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock

import jax

from minirl.config import SglangConfig
from minirl.run import distributed
from minirl.sglang import watch

_HOST = "127.0.0.1"
_END_S = 20
# How much of a server's log a message shows.
_SHOWN = 300


class Child:
    """A server of this host.

    Args:
        line: The command.
        variables: Of its environment, besides this process's.
        port: Where it listens.
        log: File that it writes to.
    """

    def __init__(self, line: list[str], variables: dict[str, str], port: int, log: Path) -> None:
        self.url = f"http://{_HOST}:{port}"
        self._line, self._variables, self._log = line, variables, log
        self._process: subprocess.Popen | None = None
        self._lock, self._is_closed = Lock(), False
        self.start()

    @property
    def is_running(self) -> bool:
        """Tell whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it anew, whatever became of it; do nothing after `close`."""
        with self._lock:
            self._end()
            if self._is_closed:
                return
            with self._log.open("ab") as log:
                # -P: what is beside the leash are no modules of its own.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", watch.__file__, *self._line],
                    env=os.environ | self._variables,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def let_go(self) -> None:
        """Let it end for good, and all that it has started; returns at once."""
        with self._lock:
            self._is_closed = True
            self._release()

    def close(self) -> None:
        """End it for good, and all that it has started."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _release(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _end(self) -> None:
        if self._process is None:
            return
        self._release()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """Say where its log is, and what ends it."""
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        return f"{self._log} ends with {' '.join(text[-_SHOWN:].split())!r}"


def close(children: Sequence[Child]) -> None:
    """End servers, all at a time: a cluster's notice is short."""
    for child in children:
        child.let_go()
    for child in children:
        child.close()


def launch(config: SglangConfig, model: Path, *, dtype: str, seed: int, logs: Path) -> list[Child]:
    """Start servers.

    Args:
        config: How many, and how.
        model: Hugging Face folder.
        dtype: In which they compute, unless `config.arguments` say.
        seed: Decides, with the number of the server, what it draws.
        logs: Folder of their logs.
    """
    python = config.interpreter
    found = shutil.which(python)
    assert found is not None  # `check_installed`
    logs.mkdir(parents=True, exist_ok=True)
    # Processes of a run share its folder.
    first = jax.process_index() * config.launch
    children: list[Child] = []
    for number, port in enumerate(free_ports(config.launch)):
        words = {
            "model-path": str(model.absolute()),
            "host": _HOST,
            "port": port,
            "dtype": dtype,
            "random-seed": (seed * config.launch * distributed.count() + first + number) % 2**31,
            "skip-server-warmup": True,
            **config.arguments,
        }
        line = [python, "-m", "sglang.launch_server"]
        for name, value in words.items():
            if value is not False:
                line += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        # SGLang calls programs of its environment (ninja), as if that were activated.
        path = os.pathsep.join([str(Path(found).parent.absolute()), os.environ["PATH"]])
        variables = {"PATH": path, **config.variables}
        if config.devices:
            variables["CUDA_VISIBLE_DEVICES"] = config.devices[number]
        children.append(Child(line, variables, port, logs / f"sglang-{first + number}.log"))
    return children


def free_ports(count: int) -> list[int]:
    """Find ports that nobody has; all are held at once, so that none is found twice."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in held]
