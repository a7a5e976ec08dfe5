"""The base of all settings; apart, since a worker process starts without pydantic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
