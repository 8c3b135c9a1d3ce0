"""vLLM as the inference engine: stepped in this process, weights written in place between two steps.

Names are loaded when they are first used: every vLLM process of an environment imports headway.generate.vllm.transfer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.generate.vllm.engine import VLLMEngine
    from headway.generate.vllm.start import open_vllm

__all__ = ["VLLMEngine", "open_vllm"]

_HOMES = {"VLLMEngine": "headway.generate.vllm.engine", "open_vllm": "headway.generate.vllm.start"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
