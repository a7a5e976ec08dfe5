"""All commands: `python -m launch train`, as `python -m launch.train`."""

from __future__ import annotations

from importlib import import_module

from launch import cli, options

if __name__ == "__main__":
    for name in options.COMMANDS:
        import_module(f"launch.{name}")
    cli.run(options.run)
