"""The environment variables of a child process: its share of the cores, and the watch on its parent."""

from __future__ import annotations

import os
from collections.abc import Mapping

from headway.config import RunConfig, derived
from headway.config.loading import ENVIRONMENT_PREFIX
from headway.telemetry.parent import PARENT_PIPE


def child_environment(
    config: RunConfig, role: str, cores: int | None = None, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What a learner or generator is started with.

    Args:
        role: "learner" or "generator".
        cores: to share among all processes; None asks the operating system.
        inherited: the environment to extend; None takes this process's.
    """
    inherited = os.environ if inherited is None else inherited
    # the recipe is resolved and saved: overrides in the environment must not be applied twice
    environ = {name: value for name, value in inherited.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    threads = str(derived.threads(config, role, cores))
    return environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # threads that wait by spinning take the cores of the other processes
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        PARENT_PIPE: "1",
    }
