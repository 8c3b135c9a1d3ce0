"""Policy versions: which weights sampled or scored a token."""

from __future__ import annotations

import msgspec


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """(epoch, step): step = optimizer steps the weights have seen; a resume bumps the epoch.

    Ordered by epoch, then step, so versions strictly increase over a run, restarts included.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"
