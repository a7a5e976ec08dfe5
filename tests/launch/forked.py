"""Runs commands in copies of a process that has imported the libraries, which takes seconds.

Reads a JSON object a line (`words`, `cwd`, `out`, `err`); writes each exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib import import_module

LIBRARIES = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "sqlglot", "tokenizers", "yaml")
LIBRARIES += (
    "rich.progress",
    "scipy.stats",
    "tensorboardX",
    "launch.config",
    "minirl.train.trainer",
)


def run(words: list[str], cwd: str, out: str, err: str) -> None:
    """Run a script, or a module as `python -m` does, in the process that this one has become."""
    os.chdir(cwd)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.argv = words
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def main() -> None:
    for name in LIBRARIES:
        import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return run(**json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    main()
