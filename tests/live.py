"""What tests of real runs share: a run's processes, and waiting until there is something to see."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

import headway

Seen = TypeVar("Seen")
DEADLINE_S = 40.0


def wait_for(what: str, look: Callable[[], Seen | None], deadline_s: float = DEADLINE_S) -> Seen:
    """Look until there is something to see."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = look()
        if found is not None:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {deadline_s:g} s: {what}")


def processes(engine: headway.Engine, kind: str = "") -> dict[int, psutil.Process]:
    """Live processes of a run by pid; `kind` is learner or generator."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            line = child.cmdline()
            if (
                str(engine.run_dir) in line
                and {kind} <= {*line, ""}
                and child.status() != psutil.STATUS_ZOMBIE
            ):
                found[child.pid] = child
        except psutil.NoSuchProcess:
            continue
    return found


def one(engine: headway.Engine, kind: str, deadline_s: float = DEADLINE_S) -> psutil.Process:
    """A process of this kind, as soon as there is one."""
    return wait_for(
        f"a {kind} process", lambda: next(iter(processes(engine, kind).values()), None), deadline_s
    )
