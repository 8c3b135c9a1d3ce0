"""From a seed to a recipe and the faults that its run will meet."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import Any

HEARTBEAT_S = 1.0


class Fault(enum.StrEnum):
    """What is done, and to whom."""

    KILL_GENERATOR = "kill generator"
    KILL_LEARNER = "kill learner"
    KILL_SUPERVISOR = "kill supervisor"
    KILL_ALL = "kill all"
    FREEZE_GENERATOR = "freeze generator"  # SIGSTOP until it is noticed
    FREEZE_LEARNER = "freeze learner"
    PAUSE_GENERATOR = "pause generator"  # SIGSTOP, SIGCONT before anybody may notice
    PAUSE_LEARNER = "pause learner"
    CUT = "cut connections"
    SLOW = "slow connections"
    SILENCE = "silence connections"  # open, and nothing passes
    FULL_DISK = "full disk"
    CLOCK_JUMP = "clock jump"


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        fault: what; step: after which optimizer step's row (0: as soon as a generator runs).
        delay_s: after that; seconds: how long it lasts, where it lasts.
    """

    fault: Fault
    step: int
    delay_s: float
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """A run and its faults.

    Attributes:
        seed: that it was made from; sections: of the recipe; strikes: in the order of their steps.
    """

    seed: int
    sections: dict[str, Any]
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        staleness = self.sections["staleness"]
        what = ", ".join(
            f"{strike.fault} after {strike.step} (+{strike.delay_s:.2f} s)" for strike in self.strikes
        )
        return (
            f"seed {self.seed}: {staleness['policy']} lag {staleness['max_lag']} by {staleness['unit']}, "
            f"{self.sections['generator']['replicas']} generators; {what}"
        )


def make_schedule(seed: int, steps: int = 8) -> Schedule:
    """The schedule of a seed: one to three faults of any kind, at any step, within a run of `steps` updates."""
    rng = random.Random(seed)
    max_lag = rng.choice([0, 1, 2, 4])
    # Every fault comes first once in as many seeds as there are faults; the rest is chance.
    first = list(Fault)[seed % len(Fault)]
    faults = [first, *rng.choices(list(Fault), k=rng.choice([0, 0, 1, 2]))]
    strikes = [
        Strike(
            fault, rng.randint(0, steps - 2), rng.choice([0.0, rng.uniform(0.0, 0.5)]), rng.uniform(0.2, 1.0)
        )
        for fault in faults
    ]
    sections: dict[str, Any] = {
        "name": f"chaos-{seed}",
        "seed": seed,
        "steps": steps,
        "save": False,
        "model": {"path": "builtin:sort3"},
        "env": {"name": "sort", "args": {"digits": 3}},
        "batch": {"prompts": 2, "samples": 4, "tokens_per_row": 512},
        # Members run to their budget, so that requests are in flight at any moment.
        "sampling": {"max_new_tokens": 24, "ignore_eos": True},
        "algo": {"filter_zero_variance": False},
        "learner": {"lr": 1e-4},
        "staleness": {
            "policy": rng.choice(["window", "window", "capacity", "drop", "wait"]),
            "max_lag": max_lag,
            "unit": rng.choice(["trajectory", "token"]),
        },
        "push": {"dtype": rng.choice(["float32", "bfloat16"])},
        "generator": {"replicas": rng.choice([1, 1, 2])},
        "stream": {
            "transport": "tcp",
            "heartbeat_s": HEARTBEAT_S,
            "rollout_deadline_s": 60.0,
            "startup_deadline_s": 120.0,
            "max_restarts": 20,
        },
        "checkpoint": {"interval": rng.choice([1, 2, 3]), "keep": 2},
    }
    return Schedule(seed, sections, tuple(sorted(strikes, key=lambda strike: strike.step)))
