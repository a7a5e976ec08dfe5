"""Results as plain tuples, which `marshal` and `json` can write."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sqlenv.types import Denied, Result, SqlError, Table, TimedOut, TooLarge

Wire = tuple[Any, ...]

_KINDS = {kind.__name__: kind for kind in (Table, SqlError, TimedOut, TooLarge, Denied)}
_FIELDS = {name: [field.name for field in fields(kind)] for name, kind in _KINDS.items()}


def encode(result: Result) -> Wire:
    """Write a result as the name of its kind and its fields."""
    kind = type(result).__name__
    return (kind, *[getattr(result, name) for name in _FIELDS[kind]])


def decode(wire: Wire) -> Result:
    """Read what `encode` wrote."""
    name, *values = wire
    return _KINDS[name](*values)
