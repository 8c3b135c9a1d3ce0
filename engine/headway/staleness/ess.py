"""The closed loop of `staleness.target_ess`: it moves what makes samples old, and how far ratios may go.

Effective sample size of the importance ratios r over n loss tokens, as a share: (sum r)^2 / (n sum r^2). It is 1
for samples of the very weights that train on them and falls as they age.

    below the target   push every step first, then fewer slots, then a tighter clip bound
    above the target   the same in reverse, up to what the recipe says

One move at a time; the next is made when the groups that were out at the last one have been trained, because only
then does the measurement show it. Pure: fed with measurements, answers with settings; no clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

SMOOTHING = 0.3  # of the newest measurement
BAND = 0.25  # of the way from the target to 1: no move while the measurement is this close
CLIP_FACTOR = 0.8
LEAST_CLIP_SHARE = 0.2


@dataclass(frozen=True)
class EssLimits:
    """What the recipe says, and so the most that the loop allows itself.

    Attributes:
        groups_per_step: P, the fewest slots; slots: the most.
        push_interval: the most optimizer steps per push.
        clip: the bounds of the objective by key: caps ("algo.cap"), which move towards 1, and half-widths
            ("algo.clip_low"), which move towards 0.
    """

    groups_per_step: int
    slots: int
    push_interval: int
    clip: Mapping[str, float]


class EssState(msgspec.Struct, frozen=True):
    """A controller as data, for checkpoints: what it measured, and where it has moved what it moves."""

    measured: float | None
    exhausted: bool
    slots: int
    interval: int
    clip_share: float
    settle: int


class EssController:
    """Keeps the measured effective sample size near a target.

    Args:
        target: share in (0, 1).
        limits: of the recipe.

    Attributes:
        measured: smoothed; None before the first step.
        exhausted: every setting is at its end and the measurement is still below the target.
    """

    def __init__(self, target: float, limits: EssLimits) -> None:
        if not 0.0 < target < 1.0:
            raise AssertionError(f"target_ess {target} is not inside (0, 1)")
        self.target = target
        self.limits = limits
        self.measured: float | None = None
        self.exhausted = False
        self._slots = limits.slots
        self._interval = limits.push_interval
        self._clip_share = 1.0
        self._settle = 0

    def observe(self, ess: float) -> dict[str, int | float]:
        """One optimizer step's measurement.

        Args:
            ess: of its batch; one that is not finite (a skipped step) is passed over.

        Returns:
            Settings to change now, by key; most of the time none.
        """
        if not math.isfinite(ess):
            return {}
        self.measured = ess if self.measured is None else self.measured + SMOOTHING * (ess - self.measured)
        if self._settle > 0:
            self._settle -= 1
            return {}
        band = BAND * (1.0 - self.target)
        if self.measured < self.target - band:
            moves = self._tighten()
            self.exhausted = not moves
        elif self.measured > self.target + band:
            moves = self._loosen()
        else:
            return {}
        if moves:
            self._settle = -(-self._slots // self.limits.groups_per_step)
        return moves

    def state(self) -> EssState:
        """For a checkpoint."""
        return EssState(
            self.measured, self.exhausted, self._slots, self._interval, self._clip_share, self._settle
        )

    def restore(self, state: EssState) -> None:
        """Go on from there; the settings that it had moved are for the caller to put in force."""
        self.measured, self.exhausted = state.measured, state.exhausted
        self._slots, self._interval = state.slots, state.interval
        self._clip_share, self._settle = state.clip_share, state.settle

    def _tighten(self) -> dict[str, int | float]:
        if self._interval > 1:
            self._interval -= 1
            return {"push.interval": self._interval}
        if self._slots > self.limits.groups_per_step:
            self._slots = max(self.limits.groups_per_step, self._slots - self._notch)
            return {"staleness.slots": self._slots}
        if self._clip_share > LEAST_CLIP_SHARE and self.limits.clip:
            self._clip_share = max(LEAST_CLIP_SHARE, self._clip_share * CLIP_FACTOR)
            return self._clip()
        return {}

    def _loosen(self) -> dict[str, int | float]:
        if self._clip_share < 1.0:
            self._clip_share = min(1.0, self._clip_share / CLIP_FACTOR)
            return self._clip()
        if self._slots < self.limits.slots:
            self._slots = min(self.limits.slots, self._slots + self._notch)
            return {"staleness.slots": self._slots}
        if self._interval < self.limits.push_interval:
            self._interval += 1
            return {"push.interval": self._interval}
        return {}

    @property
    def _notch(self) -> int:
        """Half a step's groups: two notches are one optimizer step of lag."""
        return max(1, self.limits.groups_per_step // 2)

    def _clip(self) -> dict[str, int | float]:
        share = self._clip_share
        return {
            key: value * share if "clip" in key else 1.0 + (value - 1.0) * share
            for key, value in self.limits.clip.items()
        }
