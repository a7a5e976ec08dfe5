"""The base of all settings, and the error of settings that contradict each other."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def contradiction(key: str, message: str) -> PydanticCustomError:
    """Return the error of a setting that contradicts others, for a validator to raise.

    Args:
        key: Path of the setting, below the model that is validated.
        message: What is wrong and what to write, in a line.
    """
    return PydanticCustomError(
        "contradiction", "{key}: {message}", {"key": key, "message": message}
    )
