"""The runs on which predictions are tried: generation-bound, learner-bound, heavy tails, slow pushes and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway.planner import Curve
from headway_bench.shaped.play import recipe
from headway_bench.shaped.shape import Shape

LONG_TAIL = 0.8  # sigma of the log-normal lengths: p99/mean 4.7
QUICK = Curve([(0, 0.1), (4000, 0.6)])
SLOW = Curve([(0, 0.8), (4000, 4.8)])


@dataclass(frozen=True)
class Case:
    """A shape and what its recipe says beyond the common one."""

    name: str
    shape: Shape
    sections: dict[str, Any]

    def recipe(self, steps: int) -> dict[str, Any]:
        """The recipe with so many updates."""
        return recipe(self.shape, steps=steps, **self.sections)


def shape(train: Curve, sigma: float = 0.0, pause: float = 0.02) -> Shape:
    """Decode steps of 20 to 30 ms, 30 tokens on average."""
    decode = Curve([(1, 0.020), (64, 0.030)])
    return Shape(decode=decode, train=train, mean=30, sigma=sigma, longest=240, apply=pause, publish=pause)


CASES = (
    Case("generation-bound", shape(QUICK), {"generator": {"max_running": 16}, "staleness": {"max_lag": 2}}),
    Case("learner-bound", shape(SLOW), {"staleness": {"max_lag": 2}}),
    Case("long tail", shape(QUICK, LONG_TAIL), {"staleness": {"max_lag": 2}}),
    Case("long tail, learner-bound", shape(SLOW, LONG_TAIL), {"staleness": {"max_lag": 4}}),
    Case("slow pushes", shape(QUICK, LONG_TAIL, pause=0.25), {"staleness": {"max_lag": 2}}),
    Case(
        "two generators", shape(QUICK, LONG_TAIL),
        {"generator": {"replicas": 2, "max_running": 16}, "staleness": {"max_lag": 4}},
    ),
    Case("policy capacity", shape(QUICK, LONG_TAIL), {"staleness": {"max_lag": 2, "policy": "capacity"}}),
    Case("policy wait", shape(QUICK, LONG_TAIL), {"staleness": {"max_lag": 2, "policy": "wait"}}),
    Case("policy drop", shape(QUICK, LONG_TAIL), {"staleness": {"max_lag": 2, "policy": "drop"}}),
    Case("synchronous", shape(QUICK, LONG_TAIL), {"staleness": {"max_lag": 0}}),
)  # fmt: skip
