"""Tell whether the jobs of this machine get on: status 1 if one has written nothing for long.

For health checks of containers. A job is a process that holds a run folder; while one is still
reading its questions, or if several work at one run, only the first of them does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from launch import cli
from launch.folders import CONFIG

# Servers write also when nobody asks them.
_NO_PROGRESS = "sglang-*.log"


def make_parser() -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser = cli.Parser(prog="python -m launch.health", description=__doc__)
    parser.add_argument(
        "--quiet-s",
        type=float,
        default=7200,
        metavar="S",
        help="longest time without anything new in the folder of a job (default 7200)",
    )
    return parser


def main(arguments: list[str]) -> None:
    """Run the command."""
    limit = make_parser().parse_args(arguments).quiet_s
    quiet = {folder: silence_s(folder) for folder in sorted(held_folders())}
    for folder, seconds in quiet.items():
        cli.output.print(f"{folder}: last written {seconds:.0f} s ago", soft_wrap=True)
    if not quiet:
        cli.output.print("no job holds a folder here")
    if any(seconds > limit for seconds in quiet.values()):
        sys.exit(1)


def held_folders() -> set[Path]:
    """List the folders that commands of this user hold (`folders.claimed`)."""
    links = (link for process in _numbered(Path("/proc")) for link in _numbered(process / "fd"))
    found: set[Path] = set()
    for link in links:
        with suppress(OSError):
            folder = link.readlink()
            if (folder / CONFIG).is_file():
                found.add(folder)
    return found


def silence_s(folder: Path) -> float:
    """Return the seconds since anything in a folder was written; 0 for one that is gone."""
    times: list[float] = []
    for place, _, names in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in names)):
            with suppress(OSError):
                if not path.match(_NO_PROGRESS):
                    times.append(path.stat().st_mtime)
    return max(time.time() - max(times), 0.0) if times else 0.0


def _numbered(folder: Path) -> Iterator[Path]:
    # A process may end meanwhile, or be another user's.
    with suppress(OSError):
        yield from (path for path in folder.iterdir() if path.name.isdigit())


if __name__ == "__main__":
    cli.run(main)
