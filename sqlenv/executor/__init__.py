"""Queries that nobody has vetted: executed under control, in workers; results are values.

A database that cannot be used is a `UserError`, wherever that is noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlenv.executor.executor import Executor

__all__ = ["Executor"]


def __getattr__(name: str) -> Any:
    # Late: a worker process imports this package, and starts without pydantic.
    if name == "Executor":
        from sqlenv.executor.executor import Executor

        return Executor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
