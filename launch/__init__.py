"""Commands: train, measure, prepare data, score, report, export, plan.

Whatever a person or a file got wrong is a `UserError`, raised where it is noticed; it ends a
command with one line and status 2 (`launch.cli:run`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_result(path: str | Path) -> list[dict[str, Any]]:
    """Read an evaluation as flat records; see `launch.evaluation.results.read_result`."""
    from launch.evaluation import results  # commands that evaluate nothing do without

    return results.read_result(path)
