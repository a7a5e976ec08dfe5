"""Copies of a process that has imported the libraries, which takes seconds: run as a program, this
file is that process, and starts a copy for each line of its input.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

LIBRARIES = (
    "jax", "flax.nnx", "optax", "orbax.checkpoint", "sqlglot", "tokenizers", "yaml",
    "rich.progress", "scipy.stats", "sqlenv.witness", "launch.config", "minirl.model.tokenizer",
    "minirl.train.trainer",
)  # fmt: skip
ROOT = Path(__file__).parents[1]


class Copy:
    """A running copy; its folder has what it prints, and a pipe that tells its end."""

    def __init__(self, folder: Path, words: tuple[str | Path, ...]) -> None:
        self._folder, self._words = folder, words
        self._told = (folder / "end").open("rb", buffering=0)
        self.pid = int(self._told.readline())

    def is_running(self, *, wait_s: float | None = 0) -> bool:
        """Tell whether it still runs after so many seconds; None waits for its end."""
        return not select.select([self._told], [], [], wait_s)[0]

    def said(self, where: str) -> str:
        """Return what it has printed, to `out` or `err`."""
        return (self._folder / where).read_text(errors="surrogateescape")

    def end(self, *, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for its end; one that takes longer is killed, which its status shows."""
        if self.is_running(wait_s=timeout_s):
            os.kill(self.pid, signal.SIGKILL)
        with self._told:
            status = int(self._told.readline())
        return subprocess.CompletedProcess(self._words, status, *map(self.said, ("out", "err")))


@contextmanager
def copying(place: Path, environment: Mapping[str, str]) -> Generator[Callable[..., Copy]]:
    """Start the process; yield `start(*words, cwd=folder, code="", **variables)`, which starts a
    copy as `python -m words` or as a script with this code, in an environment with these changes.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked"], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    numbers = count()

    def start(*words: str | Path, cwd: Path, code: str = "", **variables: str) -> Copy:
        folder = place / str(next(numbers))
        folder.mkdir()
        os.mkfifo(folder / "end")
        script = []
        if code:
            script = [folder / "code.py"]
            script[0].write_text(code)
        line = [*map(str, (*script, *words))]
        asked = {"words": line, "cwd": str(cwd), "folder": str(folder), "variables": variables}
        assert server.stdin
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        return Copy(folder, words)

    yield start
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()


def main() -> None:
    """Start copies, and for each a process that waits for its end."""
    for name in LIBRARIES:
        import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        if os.fork():
            continue
        if not (copy := os.fork()):
            return run(**asked)
        with Path(asked["folder"], "end").open("wb", buffering=0) as told:
            told.write(b"%d\n" % copy)
            told.write(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
        os._exit(0)
    return None


def run(words: list[str], cwd: str, folder: str, variables: dict[str, Any]) -> None:
    """Run a script, or a module as `python -m` does, in the process that this one has become."""
    os.chdir(cwd)
    os.environ.update(variables)
    for number, path in ((0, os.devnull), (1, f"{folder}/out"), (2, f"{folder}/err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.argv = words
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
