"""The environment variables of a child process: its share of the cores, its GPU, and the watch on its parent."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

from headway.config import RunConfig, derived
from headway.config.loading import ENVIRONMENT_PREFIX
from headway.errors import ConfigError
from headway.telemetry.parent import PARENT_PIPE

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def child_environment(
    config: RunConfig,
    role: str,
    index: int = 0,
    cores: int | None = None,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What a learner or generator is started with.

    Args:
        role: "learner" or "generator"; index: of the generator.
        cores: to share among all processes; None asks the operating system.
        inherited: the environment to extend; None takes this process's.

    Raises:
        ConfigError: the recipe names a GPU that CUDA_VISIBLE_DEVICES leaves out.
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
        **_gpu(config, role, index, inherited.get(_VISIBLE)),
    }


def check_gpus(config: RunConfig, inherited: Mapping[str, str] | None = None) -> None:
    """Whether every GPU that the recipe names can be seen, as far as the environment says.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES leaves one out.
    """
    visible = (os.environ if inherited is None else inherited).get(_VISIBLE)
    _gpu(config, "learner", 0, visible)
    for index in range(config.generator.replicas):
        _gpu(config, "generator", index, visible)


def _gpu(config: RunConfig, role: str, index: int, visible: str | None) -> dict[str, str]:
    """The variable that shows a process its GPUs alone; empty where the recipe names none."""
    if role == "learner":
        key, gpus = "learner.gpu", [config.learner.gpu] if config.learner.gpu >= 0 else []
    else:  # one that another machine has added has no place in the list
        each = derived.gpus_of_a_generator(config)
        key, gpus = "generator.gpus", config.generator.gpus[index * each : (index + 1) * each]
    if not gpus:
        return {}
    if visible is None:
        return {_VISIBLE: ",".join(map(str, gpus))}
    # CUDA's own rule: the list ends at the first entry that is no device
    seen = list(itertools.takewhile(lambda name: name and name != "-1", map(str.strip, visible.split(","))))
    if max(gpus) >= len(seen):
        fault = f"{max(gpus)}: {_VISIBLE} = {visible!r} shows {len(seen)}, counted from 0"
        raise ConfigError([(key, fault)])
    return {_VISIBLE: ",".join(seen[gpu] for gpu in gpus)}
