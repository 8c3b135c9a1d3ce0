"""What the policy loss computes for a token: one frozen, validated description, shared by every back-end.

Symbols: pi = the learner's log-prob, mu = the behaviour log-prob, prox = the proximal log-prob,
A = advantage, r = exp(pi - mu), sg = stop-gradient. Per token, before the token weight:

    cispo     -sg(min(r, cap)) A pi                                                (arXiv 2506.13585)
    grpo      -min(q A, clip(q, 1 - clip_low, 1 + clip_high) A), and for A < 0 with `dual_clip` at most
              -dual_clip A                                                         (arXiv 2402.03300)
    dapo      the same; what makes it dapo is clip_high > clip_low                 (arXiv 2503.14476)
    dr_grpo   the same; what makes it dr_grpo is its advantage and denominator     (arXiv 2503.20783)
    rloo      the same; what makes it rloo is the leave-one-out advantage          (arXiv 2402.14740)
    gspo      the same with q = exp(mean over the segment of (pi - mu)): the geometric mean of the token
              ratios, not their product                                            (arXiv 2507.18071)

q = r without a correction. With `correction = "tis"` q = exp(pi - prox), prox = sg(pi) unless a proximal
log-prob is given, and the term is multiplied by rho = min(exp(prox - mu), correction_cap), so nothing counts
twice. cispo and gspo, whose ratio is pi/mu already, refuse a correction.

KL to a reference, with e = pi - ref, each weighted by sg(min(r, cap)) because the tokens are mu's:

    k1   value e, gradient e grad(pi) (the score-function form)   descends KL(pi || ref)
    k2   value e^2 / 2, its own derivative, e grad(pi)            descends KL(pi || ref)
    k3   value exp(-e) - 1 + e, its own derivative                descends KL(ref || pi), which covers modes

where `descends` is meant for the next-token distribution at the states that mu visited, and while r <= cap.
(k1's own derivative would have mean zero: it descends nothing, so it is not offered.)

Entropy: -entropy_coef H per weighted token, unweighted by r.
"""

from __future__ import annotations

import dataclasses
import math

from headway_kernels.errors import UnsupportedOption

CLIPPED = frozenset({"grpo", "dapo", "dr_grpo", "rloo"})
AVAILABLE = ("cispo", "grpo", "dapo", "dr_grpo", "rloo", "gspo")
CORRECTIONS = ("none", "tis")
KL_ESTIMATORS = ("none", "k1", "k2", "k3")


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """One objective with its bounds, correction, KL and entropy terms.

    Attributes:
        name: one of AVAILABLE.
        clip_low, clip_high: the ratio may move to [1 - clip_low, 1 + clip_high]; clipped objectives and gspo.
        dual_clip: > 1, bounds the loss of a token with negative advantage at -dual_clip A; None: off.
        cap: upper bound of the weight min(r, cap), in cispo and in the KL's weight.
        correction: "none" | "tis". correction_cap: upper bound of rho.
        kl: "none" | "k1" | "k2" | "k3". kl_coef: its factor, >= 0.
        entropy_coef: factor of the entropy bonus, >= 0.

    Raises:
        UnsupportedOption: a name, a value or a combination that no back-end has; lists what is available.
    """

    name: str = "cispo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    cap: float = 5.0
    correction: str = "none"
    correction_cap: float = 5.0
    kl: str = "none"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("objective", self.name, AVAILABLE)
        _check_choice("correction", self.correction, CORRECTIONS)
        _check_choice("kl", self.kl, KL_ESTIMATORS)
        _check_range("clip_low", self.clip_low, 0.0, 1.0)
        _check_range("clip_high", self.clip_high, 0.0, math.inf)
        _check_range("cap", self.cap, 0.0, math.inf, open_low=True)
        _check_range("correction_cap", self.correction_cap, 0.0, math.inf, open_low=True)
        _check_range("kl_coef", self.kl_coef, 0.0, math.inf)
        _check_range("entropy_coef", self.entropy_coef, 0.0, math.inf)
        self._check_combination()

    def _check_combination(self) -> None:
        if self.correction != "none" and not self.is_clipped:
            raise UnsupportedOption(
                f"objective {self.name} has the ratio pi/mu already, so correction={self.correction!r} would "
                f"count it twice; use correction='none', or one of {', '.join(sorted(CLIPPED))}"
            )
        if self.dual_clip is not None:
            _check_range("dual_clip", self.dual_clip, 1.0, math.inf, open_low=True)
            if self.name == "cispo":
                raise UnsupportedOption(
                    f"objective {self.name} has no dual clip; leave dual_clip out, or use a clipped objective"
                )
        if self.kl == "none" and self.kl_coef != 0.0:
            raise UnsupportedOption(f"kl_coef={self.kl_coef} has no effect with kl='none'; use k1, k2 or k3")

    @property
    def is_clipped(self) -> bool:
        """Token-level clipped surrogate."""
        return self.name in CLIPPED

    @property
    def is_segment_level(self) -> bool:
        """The ratio is one value a segment, so a segment's tokens must be evaluated together."""
        return self.name == "gspo"

    @property
    def needs_reference(self) -> bool:
        """The loss contains reference log-probs."""
        return self.kl != "none" and self.kl_coef != 0.0


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedOption(f"{what} {value!r} is not available; choose from {', '.join(allowed)}")


def _check_range(what: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (value > low if open_low else value >= low) and value <= high and math.isfinite(value)
    if not inside:
        bracket = "(" if open_low else "["
        raise UnsupportedOption(f"{what} must be in {bracket}{low}, {high}] and finite, got {value}")
