"""The list of commands: `python -m launch`."""

from __future__ import annotations

import ast
from pathlib import Path

from launch import cli

_NAMES = ("prepare", "train", "eval", "ask", "score", "report", "export", "plan")


def main(_arguments: list[str]) -> None:
    """Print what every command does, the first line of its module."""
    folder = Path(__file__).parent
    for name in _NAMES:
        text = ast.get_docstring(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")))
        line = (text or "").partition("\n")[0]
        cli.output.print(f"python -m launch.{name:<8} {line}", soft_wrap=True)
    cli.output.print("Each has --help; README.md begins with one of them.")


if __name__ == "__main__":
    cli.run(main)
