"""What a machine does of each kind of work, measured: the file that `headway calibrate` writes and plans read.

A calibration may come from another machine than the one that plans. Everything is in seconds, tokens and bytes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from pathlib import Path

import msgspec

from headway.errors import ConfigError

FORMAT = 2


class Curve(msgspec.Struct, frozen=True):
    """A measured function: straight lines between its points, the outer ones prolonged, never below 0.

    Attributes:
        points: (x, seconds), x strictly increasing; one point is a constant.
    """

    points: list[tuple[float, float]]

    def __post_init__(self) -> None:
        xs = [x for x, _ in self.points]
        if not xs or any(right <= left for left, right in itertools.pairwise(xs)):
            raise ValueError(f"a curve needs points with increasing x, got {xs}")
        if any(seconds < 0 for _, seconds in self.points):
            raise ValueError("a curve holds seconds, which are not negative")

    def __call__(self, x: float) -> float:
        """Seconds at x."""
        if len(self.points) == 1:
            return self.points[0][1]
        at = bisect.bisect_left(self.points, (x, 0.0))
        at = min(max(at, 1), len(self.points) - 1)
        (left, low), (right, high) = self.points[at - 1], self.points[at]
        return max(0.0, low + (high - low) * (x - left) / (right - left))

    def scaled(self, factor: float, more: float = 0.0) -> Curve:
        """`factor` times as long, and `more` seconds on top."""
        return Curve([(x, factor * seconds + more) for x, seconds in self.points])


def constant(seconds: float) -> Curve:
    """The same for every x."""
    return Curve([(0.0, seconds)])


def proportional(x: float, seconds: float) -> Curve:
    """Through the origin; a constant when there is no x."""
    return Curve([(0.0, 0.0), (float(x), seconds)]) if x > 0 else constant(seconds)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration.

    Attributes:
        hardware, model: that it was measured on, for people; versions: of the libraries.
        decode: seconds of a decode step by sequences that run in one generator, at the lengths of `groups`.
        context: seconds that a token of a running sequence's context adds to a decode step; 0: not known.
        prefill: seconds that the generator needs to forward so many prompt tokens.
        train: seconds of an optimizer step by tokens, sampled ones and each group's prompt once.
        publish: seconds that the learner stands still for a push; stage: from there until a generator has it
            ready beside decoding; apply: seconds that its decoding pauses. By bytes pushed.
        push_bytes: of one push at the recipe's dtype.
        turn: seconds per step that the learner spends on everything else (packing, messages, records).
        reward: sampled seconds that a reward worker spends on a completion.
        groups: completion lengths in tokens, one list per sampled group.
        prompt_tokens: mean length of a prompt.
        zero_variance: share of groups whose members all earn the same.
        drift: by how much an update of lag lowers the logarithm of the effective sample size; 0: not known.
        decode_beside, train_beside: factors on decode and train while the other side works on the same machine.
    """

    hardware: str
    model: str
    decode: Curve
    prefill: Curve
    train: Curve
    groups: list[list[int]]
    publish: Curve = constant(0.0)
    stage: Curve = constant(0.0)
    apply: Curve = constant(0.0)
    push_bytes: int = 0
    context: float = 0.0
    turn: float = 0.0
    reward: list[float] = msgspec.field(default_factory=lambda: [0.0])
    prompt_tokens: float = 1.0
    zero_variance: float = 0.0
    drift: float = 0.0
    decode_beside: float = 1.0
    train_beside: float = 1.0
    versions: dict[str, str] = {}
    format: int = FORMAT

    def __post_init__(self) -> None:
        if not self.groups or any(not lengths or min(lengths) < 1 for lengths in self.groups):
            raise ValueError("a calibration needs sampled groups with lengths of at least 1 token")
        if not 0.0 <= self.zero_variance < 1.0:
            raise ValueError(f"zero_variance is a share below 1, got {self.zero_variance}")
        if not (0.0 <= self.drift < math.inf and 0.0 <= self.context < math.inf):
            raise ValueError(f"drift and context are not negative, got {self.drift} and {self.context}")
        if not self.reward or min(self.decode_beside, self.train_beside) < 1.0 or min(self.reward) < 0:
            raise ValueError(
                "rewards take no negative time, and work beside other work is not faster than alone"
            )

    @property
    def mean_length(self) -> float:
        """Tokens of a completion."""
        lengths = [length for group in self.groups for length in group]
        return sum(lengths) / len(lengths)

    @property
    def mean_context(self) -> float:
        """Tokens that a running sequence has behind it, prompt included: long ones run longer, and count for more."""
        lengths = [length for group in self.groups for length in group]
        return self.prompt_tokens + sum(length**2 for length in lengths) / (2 * sum(lengths))

    def with_lengths(self, factor: float = 1.0, tail: int = 0) -> Rates:
        """The same machine with other completions; decode steps change with the context that these bring.

        Args:
            factor: on every length. tail: tokens of the longest hundredth of all completions; 0: as they are.
        """
        groups = [[max(1, round(factor * length)) for length in group] for group in self.groups]
        if tail:
            ordered = sorted((length for group in groups for length in group), reverse=True)
            least = ordered[max(0, len(ordered) // 100 - 1)]
            groups = [[tail if length >= least else length for length in group] for group in groups]
        other = msgspec.structs.replace(self, groups=groups)
        longer = self.context * (other.mean_context - self.mean_context)
        points = [(count, max(0.0, seconds + count * longer)) for count, seconds in self.decode.points]
        return msgspec.structs.replace(other, decode=Curve(points))

    def write(self, path: Path) -> None:
        """As indented JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_rates(path: Path) -> Rates:
    """A file of `Rates.write`.

    Raises:
        ConfigError: it is missing, of another format, or no calibration.
    """
    try:
        rates = msgspec.json.decode(path.read_bytes(), type=Rates)
    except OSError as error:
        raise ConfigError(
            [("rates", f"{path} cannot be read ({error.strerror}); write it with headway calibrate")]
        ) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError([("rates", f"{path} is not a calibration: {error}")]) from None
    if rates.format != FORMAT:
        raise ConfigError(
            [("rates", f"{path} has format {rates.format}, this version reads {FORMAT}; calibrate again")]
        )
    return rates
