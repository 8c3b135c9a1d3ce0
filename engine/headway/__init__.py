"""headway: asynchronous off-policy reinforcement learning of language models.

    with headway.Engine("recipe.toml", learner={"lr": 1e-6}) as engine:
        for step in engine:
            print(step.step, step.reward)

Public names are loaded when they are first used, so that `import headway` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.config import RunConfig, load_recipe
    from headway.engine import Engine
    from headway.errors import ConfigError, HeadwayError, RunFailed
    from headway.types import LearnerStatus, StepRecord

__all__ = [
    "ConfigError",
    "Engine",
    "HeadwayError",
    "LearnerStatus",
    "RunConfig",
    "RunFailed",
    "StepRecord",
    "__version__",
    "load_recipe",
]

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "headway.errors",
    "Engine": "headway.engine",
    "HeadwayError": "headway.errors",
    "LearnerStatus": "headway.types",
    "RunConfig": "headway.config",
    "RunFailed": "headway.errors",
    "StepRecord": "headway.types",
    "load_recipe": "headway.config",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headway' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
