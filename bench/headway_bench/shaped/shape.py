"""How long everything takes in a shaped run, and the same as rates for a plan."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec

from headway.planner import Curve, Rates, constant


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds, lengths in tokens.

    Attributes:
        decode: of a decode step by running sequences; train: of an update by forwarded tokens.
        apply: that a push stops a generator for; publish: that it stops the learner for.
        mean, sigma: of log-normal completion lengths (sigma 0: all alike); longest: they are cut there.
    """

    decode: Curve
    train: Curve
    mean: float
    sigma: float
    longest: int
    apply: float = 0.0
    publish: float = 0.0

    def length(self, seed: int, ticket_id: int, member: int) -> int:
        """Of this member, the same in every process."""
        rng = random.Random(f"{seed}.{ticket_id}.{member}")
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(self.longest, max(1, round(rng.lognormvariate(mu, self.sigma))))

    def rates(self, seed: int, samples: int, groups: int, prompt_tokens: float) -> Rates:
        """What a calibration of this shape would find, with the lengths of the first `groups` groups."""
        lengths = [
            [self.length(seed, ticket, member) for member in range(samples)] for ticket in range(groups)
        ]
        return Rates(
            hardware="sleeps",
            model="shape",
            decode=self.decode,
            prefill=constant(0.0),
            train=self.train,
            groups=lengths,
            publish=constant(self.publish),
            apply=constant(self.apply),
            prompt_tokens=prompt_tokens,
        )


class ShapeFile(msgspec.Struct, frozen=True):
    """What a child reads: the shape, and the seed of the lengths."""

    shape: Shape
    seed: int

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_bytes(msgspec.json.encode(self))


def read_shape(path: Path) -> ShapeFile:
    """A file of `ShapeFile.write`."""
    return msgspec.json.decode(path.read_bytes(), type=ShapeFile)
