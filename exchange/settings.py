"""The base of all settings, and their error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def contradiction(key: str, message: str) -> PydanticCustomError:
    """Return what a validator raises: the setting's path below its model, and what to write."""
    return PydanticCustomError(
        "contradiction", "{key}: {message}", {"key": key, "message": message}
    )
