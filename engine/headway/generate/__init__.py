"""Inference engines: what a generator decodes with. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.generate.engine import TorchEngine
    from headway.generate.protocol import FinishedMember, GroupRequest, InferenceEngine, Unservable
    from headway.generate.seeds import mix

__all__ = ["FinishedMember", "GroupRequest", "InferenceEngine", "TorchEngine", "Unservable", "mix"]

_HOMES = {"TorchEngine": "headway.generate.engine", "mix": "headway.generate.seeds"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "headway.generate.protocol")), name)
