"""Statistics of a policy loss: sums, peaks and a histogram that add up over chunks, rows and ranks.

Everything stays on the tensors' device until a property is read; a property read is a host sync. To combine
over ranks all-reduce `sums` and `buckets` by addition and `peaks` by maximum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headway_kernels.errors import NumericsError

# The order of PolicyStats.sums. Every name but the first counts weighted tokens only.
SUMS = (
    "tokens",  # all tokens given, masked ones included
    "weighted",  # tokens whose weight is not 0
    "clipped_high",  # A > 0 and the ratio above 1 + clip_high: no gradient
    "clipped_low",  # A < 0 and the ratio below 1 - clip_low: no gradient
    "clipped_dual",  # A < 0 and the ratio above dual_clip: no gradient
    "capped",  # a weight was cut to cap or correction_cap: reduced gradient
    "rejected",  # masked by icepop, mis, dppo_tv or m2po: neither loss nor gradient
    "limited",  # any of the five above, each token once
    "ratio",  # r = pi/mu, before clip and cap; its exponent is bounded to +-20
    "ratio_squared",
    "ratio_clamped",  # min(r, cap)
    "ratio_clamped_squared",
    "weight",  # the objective's own ratio before clip, cap and rejection: r, rho or the segment's value
    "kl_behaviour_k1",  # d = mu - pi, an estimate of KL(mu || pi)
    "kl_behaviour_k2",  # d^2 / 2
    "kl_behaviour_k3",  # r - 1 + d, r as in "ratio"
    "kl_reference_k1",  # min(r, cap) e, e = pi - ref; this and the next two are 0 without a reference
    "kl_reference_k2",  # min(r, cap) e^2 / 2
    "kl_reference_k3",  # min(r, cap) (exp(-e) - 1 + e), the exponent bounded to +-20
    "entropy",
    "segments",  # segment-level objectives: segments with a weighted token
    "segments_limited",  # of them, those with a limited token
    "segments_rejected",  # of them, those with a rejected token
    "not_finite",  # weighted tokens with an input that is not finite; see PolicyStats.check
)
_INDEX: Mapping[str, int] = {name: index for index, name in enumerate(SUMS)}

# The log-ratio's histogram: 128 buckets of 1/16 over [-4, 4), one below and one above.
BUCKET_LOW, BUCKETS_PER_UNIT, NUM_INNER = -4.0, 16.0, 128
NUM_BUCKETS = NUM_INNER + 2


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PolicyStats:
    """Sums over tokens, additive over chunks, rows and ranks.

    Attributes:
        sums: float64 [len(SUMS)], in the order of SUMS.
        peaks: float64 [3], the largest log-ratio pi - mu and the largest |log-ratio|, neither clamped, and the
            largest min(r, cap) (-inf, 0 and 0 without a weighted token).
        buckets: float64 [NUM_BUCKETS], weighted tokens by log-ratio.
    """

    sums: Tensor
    peaks: Tensor
    buckets: Tensor

    @staticmethod
    def zero(device: torch.device | str = "cpu") -> PolicyStats:
        """The neutral element of addition."""
        return PolicyStats(
            sums=torch.zeros(len(SUMS), dtype=torch.float64, device=device),
            peaks=torch.tensor([-math.inf, 0.0, 0.0], dtype=torch.float64, device=device),
            buckets=torch.zeros(NUM_BUCKETS, dtype=torch.float64, device=device),
        )

    def __add__(self, other: PolicyStats) -> PolicyStats:
        return PolicyStats(
            self.sums + other.sums, torch.maximum(self.peaks, other.peaks), self.buckets + other.buckets
        )

    def total(self, name: str) -> float:
        """The sum of that name (see SUMS)."""
        return float(self.sums[_INDEX[name]])

    def mean(self, name: str) -> float:
        """The sum of that name per weighted token; 0 if there is none."""
        return self.total(name) / max(self.total("weighted"), 1.0)

    @property
    def num_tokens(self) -> int:
        """Weighted tokens."""
        return int(self.total("weighted"))

    @property
    def masked_share(self) -> float:
        """Tokens with weight 0, as a share of all tokens given."""
        return 1.0 - self.total("weighted") / max(self.total("tokens"), 1.0) if self.total("tokens") else 0.0

    def check(self) -> None:
        """Refuse values that are not finite: a back-end without a host sync counts them instead of raising.

        Raises:
            NumericsError: a weighted token had such an input.
        """
        count = int(self.total("not_finite"))
        if count:
            raise NumericsError(
                f"{count} tokens that carry loss have a value that is not finite: drop their samples, or give "
                "them weight 0; backend='reference' names the first"
            )

    @property
    def rejected_share(self) -> float:
        """Weighted tokens that a rejection mask left without loss."""
        return self.mean("rejected")

    @property
    def segment_rejected_share(self) -> float:
        """Segments with a rejected token; 0 for token-level objectives."""
        return self.total("segments_rejected") / max(self.total("segments"), 1.0)

    @property
    def clip_share(self) -> float:
        """Weighted tokens whose ratio met any bound: clip, dual clip, cap or rejection."""
        return self.mean("limited")

    @property
    def segment_clip_share(self) -> float:
        """Segments with a token whose ratio met any bound; 0 for token-level objectives."""
        return self.total("segments_limited") / max(self.total("segments"), 1.0)

    @property
    def ess(self) -> float:
        """Effective sample size of the ratios as a share: (sum r)^2 / (n sum r^2); 1 if there is no token."""
        spread = self.total("weighted") * self.total("ratio_squared")
        return self.total("ratio") ** 2 / spread if spread else 1.0

    @property
    def ratio_mean(self) -> float:
        """Mean of r = pi/mu before clip and cap; a single r counts as exp(20) at most."""
        return self.mean("ratio")

    @property
    def ratio_clamped_mean(self) -> float:
        """Mean of min(r, cap)."""
        return self.mean("ratio_clamped")

    @property
    def weight_mean(self) -> float:
        """Mean of the objective's own ratio before clip and cap."""
        return self.mean("weight")

    @property
    def ratio_max(self) -> float:
        """The largest r, not clamped (reported up to exp(700)); 0 if there is no token."""
        return math.exp(min(float(self.peaks[0]), 700.0))

    @property
    def log_ratio_max(self) -> float:
        """The largest |pi - mu|, not clamped."""
        return float(self.peaks[1])

    @property
    def ratio_clamped_max(self) -> float:
        """The largest min(r, cap); 0 if there is no token."""
        return float(self.peaks[2])

    @property
    def ess_clamped(self) -> float:
        """ess of min(r, cap) in place of r."""
        spread = self.total("weighted") * self.total("ratio_clamped_squared")
        return self.total("ratio_clamped") ** 2 / spread if spread else 1.0

    @property
    def kl_behaviour(self) -> float:
        """KL(mu || pi) by the k3 estimator r - 1 - log r, per token; k1 and k2 by mean()."""
        return self.mean("kl_behaviour_k3")

    @property
    def kl_behaviour_k1(self) -> float:
        """KL(mu || pi) by the k1 estimator, per token."""
        return self.mean("kl_behaviour_k1")

    @property
    def kl_reference(self) -> float:
        """KL(pi || reference) by the ratio-weighted k3 estimator, per token; 0 without a reference."""
        return self.mean("kl_reference_k3")

    @property
    def entropy(self) -> float:
        """Mean entropy of the next-token distribution, in nats; 0 if it was not asked for."""
        return self.mean("entropy")

    def ratio_quantile(self, share: float) -> float:
        """An upper bound of the ratio's quantile, to one bucket (6.5 %); 0 if there is no token."""
        if not self.num_tokens:
            return 0.0
        reached = torch.cumsum(self.buckets, 0) >= share * float(self.buckets.sum())
        index = int(reached.to(torch.int8).argmax())
        if index == NUM_BUCKETS - 1:
            return self.ratio_max
        return min(math.exp(BUCKET_LOW + index / BUCKETS_PER_UNIT), self.ratio_max)

    @property
    def ratio_p99(self) -> float:
        """The ratio that 99 % of the weighted tokens stay below."""
        return self.ratio_quantile(0.99)

    @property
    def ratio_clamped_p99(self) -> float:
        """The min(r, cap) that 99 % of the weighted tokens stay below."""
        return min(self.ratio_p99, self.ratio_clamped_max)


def peaks(log_ratio: Tensor, clamped: Tensor, active: Tensor) -> Tensor:
    """The largest log-ratio, the largest |log-ratio| and the largest clamped ratio of the active tokens.

    Args:
        log_ratio, clamped: float64 [T], finite, log_ratio 0 where inactive. active: bool [T].

    Returns:
        float64 [3]; -inf, 0 and 0 without an active token.
    """
    if not log_ratio.shape[0]:
        return PolicyStats.zero(log_ratio.device).peaks
    highest = torch.where(active, log_ratio, -math.inf).amax()
    return torch.stack((highest, log_ratio.abs().amax(), torch.where(active, clamped, 0.0).amax()))


def bucket_counts(log_ratio: Tensor, active: Tensor) -> Tensor:
    """Counts active tokens by log-ratio.

    Args:
        log_ratio: float64 [T], finite. active: bool [T].

    Returns:
        float64 [NUM_BUCKETS].
    """
    place = ((log_ratio - BUCKET_LOW) * BUCKETS_PER_UNIT).floor().clamp_(-1, NUM_INNER).add_(1)
    place = torch.where(active, place, NUM_BUCKETS).to(torch.int64)
    return torch.bincount(place, minlength=NUM_BUCKETS + 1)[:NUM_BUCKETS].to(torch.float64)
