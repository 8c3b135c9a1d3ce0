"""A recipe whose runs are ended by whoever measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.config import RunConfig

ENDLESS = 10**9  # updates


def endless(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """The sections of a recipe without an end, and without files and sinks that nobody wants; to be changed."""
    data = config.model_dump()
    data.update(steps=ENDLESS, run_dir=str(run_dir), save=False)
    data["checkpoint"]["interval"] = 0
    data["telemetry"]["sinks"] = []
    return data
