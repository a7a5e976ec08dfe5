"""The base of all settings, and their error."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


def at_home(path: Any) -> Any:
    """Put the home folder in the place of a path's `~`; what has none stays as it is, but for the
    number that YAML makes of a name like 2026.
    """
    if isinstance(path, int) and not isinstance(path, bool):
        return f"{path}"
    if isinstance(path, str) and path.startswith("~") and "/" in path:
        with suppress(RuntimeError):  # of somebody unknown
            return str(Path(path).expanduser())
    return path


Place = Annotated[Path, BeforeValidator(at_home)]
"""The path of a setting: every one is of this type."""


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys and infinities refused; a number is text too."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, defer_build=True,
        allow_inf_nan=False, coerce_numbers_to_str=True,
    )  # fmt: skip


def contradiction(key: str, message: str) -> PydanticCustomError:
    """Return what a validator raises: the setting's path below its model, and what to write."""
    return PydanticCustomError(
        "contradiction", "{key}: {message}", {"key": key, "message": message}
    )
