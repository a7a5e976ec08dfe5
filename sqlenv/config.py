"""Settings of databases, data, prompts and environments. Defaults are the papers' values."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all settings here: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
