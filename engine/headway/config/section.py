"""What every section of the recipe is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: frozen, strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
