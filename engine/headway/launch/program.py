"""The commands that start a learner and a generator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# -P: a file of the user's folder must not shadow a module of the child
HEADWAY: tuple[str, ...] = (sys.executable, "-P", "-m", "headway")


def learner_command(program: Sequence[str], run_dir: Path, control: str) -> list[str]:
    """The learner of a run.

    Args:
        control: endpoint of the supervisor's control socket.
    """
    return [*program, "learner", "--run", str(run_dir), "--control", control]


def generator_command(program: Sequence[str], run_dir: Path, endpoints: str, index: int) -> list[str]:
    """One generator of a run.

    Args:
        endpoints: where the learner listens, as it said in Event.ready.
    """
    return [*program, "generator", "--run", str(run_dir), "--connect", endpoints, "--index", str(index)]
