"""The error of settings that contradict each other."""

from __future__ import annotations

from pydantic_core import PydanticCustomError


def contradiction(key: str, message: str) -> PydanticCustomError:
    """Return what a validator raises: the setting's path below its model, and what to write."""
    return PydanticCustomError(
        "contradiction", "{key}: {message}", {"key": key, "message": message}
    )
