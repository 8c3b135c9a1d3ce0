"""What the policy loss computes: one frozen, validated description, shared by every back-end.

Symbols: pi = the learner's log-prob, mu = the behaviour log-prob, prox = the proximal log-prob, A = advantage,
r = exp(pi - mu), sg = stop-gradient. Loss of a token before the token weight, by family:

    CLIP  -min(q A, clip(q, 1 - clip_low, 1 + clip_high) A), and for A < 0 with `dual_clip` at most -dual_clip A
        ppo            arXiv 1707.06347, dual clip 1912.09729    dapo     2503.14476: clip_high > clip_low
        grpo           2402.03300                                dr_grpo  2503.20783: its advantage, denominator
        reinforce_pp   2501.03262: its batch-wide advantage      rloo     2402.14740: its leave-one-out advantage
        decoupled_ppo  2110.00641: always with a correction
        gspo           2507.18071: q = exp(mean over the segment of (pi - mu)), the geometric mean of the token
                       ratios, not their product
    CAP   -sg(min(r, cap)) A pi
        cispo          2506.13585
        vtrace         1802.01561: the same, where A comes from segment_scan(kind="vtrace") and cap is rho-bar
    GATE  -(4 / tau) sigmoid(tau (q - 1)) A, tau = gate_positive for A > 0, else gate_negative
        sapo           2511.20347
    TV    -q A, without the tokens that move away from mu (A > 0 and q > 1, or A < 0 and q < 1) and whose
          probability differs by more than tv_bound
        dppo_tv        2602.04879, the binary form
    M2    -q A, without the tokens of the largest (pi - mu)^2: those that must go until the mean of the others
          is at most m2_bound
        m2po           2510.01161

q = r, but with a correction q = exp(pi - prox), where prox = sg(pi) unless a proximal log-prob is given, and the
term is multiplied by a weight of rho, so nothing counts twice. With x = prox - mu, rho is exp(x) at level "token",
exp(sum of x) over the segment at "sequence", exp(mean of x) at "geometric":

    tis     min(rho, correction_cap)                                      caps
    icepop  rho if correction_floor <= rho <= correction_cap, else 0      rejects on both sides
    mis     rho if rho <= correction_cap, else 0                          rejects above

Objectives whose ratio is to mu by definition (cispo, vtrace, gspo, dppo_tv, m2po) refuse a correction.

KL to a reference, with e = pi - ref, each weighted by sg(min(r, cap)) because the tokens are mu's:

    k1   value e, gradient e grad(pi) (the score-function form)   descends KL(pi || ref)
    k2   value e^2 / 2, its own derivative, e grad(pi)            descends KL(pi || ref)
    k3   value exp(-e) - 1 + e, its own derivative                descends KL(ref || pi), which covers modes

where `descends` is meant for the next-token distribution at the states that mu visited, and while r <= cap.
(k1's own derivative would have mean zero: it descends nothing, so it is not offered.)

Entropy: -entropy_coef H per weighted token, unweighted by r. policy_token.py has the formulas line by line.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping

from headway_kernels.errors import UnsupportedOption


class Family(enum.IntEnum):
    """The formula of a token; the numbers are the kernels' codes."""

    CLIP = 0
    CAP = 1
    GATE = 2
    TV = 3
    M2 = 4


class Correction(enum.IntEnum):
    """What rho does to a token; the numbers are the kernels' codes."""

    NONE = 0
    TIS = 1
    ICEPOP = 2
    MIS = 3


class Kl(enum.IntEnum):
    """Estimator of the KL to the reference; the numbers are the kernels' codes."""

    NONE = 0
    K1 = 1
    K2 = 2
    K3 = 3


class Level(enum.IntEnum):
    """Over which tokens a log-ratio is formed: its own, the segment's sum, the segment's mean."""

    TOKEN = 0
    SEQUENCE = 1
    GEOMETRIC = 2


FAMILIES: Mapping[str, Family] = {
    "cispo": Family.CAP,
    "grpo": Family.CLIP,
    "dapo": Family.CLIP,
    "dr_grpo": Family.CLIP,
    "rloo": Family.CLIP,
    "reinforce_pp": Family.CLIP,
    "ppo": Family.CLIP,
    "decoupled_ppo": Family.CLIP,
    "gspo": Family.CLIP,
    "sapo": Family.GATE,
    "dppo_tv": Family.TV,
    "m2po": Family.M2,
    "vtrace": Family.CAP,
}
AVAILABLE = tuple(FAMILIES)
CORRECTABLE = tuple(
    name for name, family in FAMILIES.items() if family in (Family.CLIP, Family.GATE) and name != "gspo"
)
CORRECTIONS = ("none", "tis", "icepop", "mis")
LEVELS = ("token", "sequence", "geometric")
KL_ESTIMATORS = ("none", "k1", "k2", "k3")


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """One objective with its bounds, correction, KL and entropy terms.

    Attributes:
        name: one of AVAILABLE.
        clip_low, clip_high: CLIP: the ratio may move to [1 - clip_low, 1 + clip_high].
        dual_clip: CLIP: > 1, bounds the loss of a token with negative advantage at -dual_clip A; None: off.
        cap: upper bound of min(r, cap): the CAP family's weight and every KL's weight.
        correction: one of CORRECTIONS. correction_cap: upper bound of rho.
        kl: one of KL_ESTIMATORS. kl_coef: its factor, >= 0.
        entropy_coef: factor of the entropy bonus, >= 0.
        correction_level: one of LEVELS. correction_floor: icepop's lower bound of rho.
        gate_positive, gate_negative: GATE: temperature of the gate by the sign of the advantage, > 0.
        tv_bound: TV: the largest difference of the sampled token's probability, in (0, 1].
        m2_bound: M2: bound of the mean squared log-ratio, > 0.

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
    correction_level: str = "token"
    correction_floor: float = 0.5
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    tv_bound: float = 0.15
    m2_bound: float = 0.04
    # Formed once: torch.compile can read an attribute, but cannot trace a JSON encoder.
    _text: str = dataclasses.field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_choice("objective", self.name, AVAILABLE)
        _check_choice("correction", self.correction, CORRECTIONS)
        _check_choice("correction_level", self.correction_level, LEVELS)
        _check_choice("kl", self.kl, KL_ESTIMATORS)
        _check_range("clip_low", self.clip_low, 0.0, 1.0)
        _check_range("tv_bound", self.tv_bound, 0.0, 1.0, open_low=True)
        for name in ("clip_high", "kl_coef", "entropy_coef", "correction_floor"):
            _check_range(name, getattr(self, name), 0.0, math.inf)
        for name in ("cap", "correction_cap", "gate_positive", "gate_negative", "m2_bound"):
            _check_range(name, getattr(self, name), 0.0, math.inf, open_low=True)
        self._check_combination()
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        object.__setattr__(self, "_text", json.dumps(fields, separators=(",", ":")))

    def _check_combination(self) -> None:
        if self.correction != "none" and self.name not in CORRECTABLE:
            raise UnsupportedOption(
                f"objective {self.name} has the ratio pi/mu already, so correction={self.correction!r} would "
                f"count it twice; use correction='none', or one of {', '.join(CORRECTABLE)}"
            )
        if self.correction == "none" and self.name == "decoupled_ppo":
            raise UnsupportedOption(
                "objective decoupled_ppo is pi/prox times a weight of prox/mu, so it needs a correction: "
                "'tis', 'icepop' or 'mis'; without one use ppo"
            )
        if self.correction == "none" and self.correction_level != "token":
            raise UnsupportedOption(
                f"correction_level={self.correction_level!r} has no effect with correction='none'"
            )
        if self.correction == "icepop" and self.correction_floor > self.correction_cap:
            raise UnsupportedOption(
                f"correction_floor={self.correction_floor} is above correction_cap={self.correction_cap}: "
                "every token would be rejected"
            )
        if self.dual_clip is not None:
            _check_range("dual_clip", self.dual_clip, 1.0, math.inf, open_low=True)
            if self.family is not Family.CLIP:
                raise UnsupportedOption(
                    f"objective {self.name} has no dual clip; leave dual_clip out, or use a clipped objective"
                )
        if self.kl == "none" and self.kl_coef != 0.0:
            raise UnsupportedOption(f"kl_coef={self.kl_coef} has no effect with kl='none'; use k1, k2 or k3")

    @property
    def family(self) -> Family:
        """The formula of a token."""
        return FAMILIES[self.name]

    @property
    def correction_code(self) -> Correction:
        """The correction as a kernel's code."""
        return Correction[self.correction.upper()]

    @property
    def kl_code(self) -> Kl:
        """The KL estimator as a kernel's code; NONE where its factor is 0."""
        return Kl[self.kl.upper()] if self.needs_reference else Kl.NONE

    @property
    def ratio_level(self) -> Level:
        """Of q: GEOMETRIC for gspo, else TOKEN."""
        return Level.GEOMETRIC if self.name == "gspo" else Level.TOKEN

    @property
    def rho_level(self) -> Level:
        """Of rho: correction_level; TOKEN without a correction."""
        return Level[self.correction_level.upper()]

    @property
    def is_segment_level(self) -> bool:
        """A ratio is one value a segment, so a segment's tokens must be evaluated together."""
        return self.ratio_level is not Level.TOKEN or self.rho_level is not Level.TOKEN

    @property
    def needs_m2_limit(self) -> bool:
        """Which tokens are masked depends on all tokens of the step; see m2_limit of policy_loss."""
        return self.family is Family.M2

    @property
    def needs_reference(self) -> bool:
        """The loss contains reference log-probs."""
        return self.kl != "none" and self.kl_coef != 0.0

    def to_text(self) -> str:
        """As one line of JSON, the form in which it passes through a torch custom op."""
        return self._text

    @staticmethod
    def from_text(text: str) -> Objective:
        """The inverse of to_text."""
        return Objective(**json.loads(text))


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedOption(f"{what} {value!r} is not available; choose from {', '.join(allowed)}")


def _check_range(what: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (value > low if open_low else value >= low) and value <= high and math.isfinite(value)
    if not inside:
        bracket = "(" if open_low else "["
        raise UnsupportedOption(f"{what} must be in {bracket}{low}, {high}] and finite, got {value}")
