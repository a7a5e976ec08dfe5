"""Queries that nobody has vetted: executed under control; results are values.

A database that cannot be used is a `UserError`, wherever that is noticed.
"""

from sqlenv.executor.executor import Executor

__all__ = ["Executor"]
