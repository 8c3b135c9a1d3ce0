"""Before the first update: the learner scores again, at equal weights, what the generators have sampled.

An engine's upgrade, a dtype, another head precision or another log-prob statistic all look like staleness in a
run, and none of them can be seen from one side. Called by the trainer on the first batches, until enough tokens
at lag 0 have been seen; at step 0 every token has lag 0, after a resume perhaps none of the first batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.config import AgreementLimits
from headway.errors import TrainingStopped
from headway.trainer.batch import LossRow, TrainBatch

MIN_TOKENS = 200  # at lag 0, before the check is over
PATIENCE = 20  # batches without as many, before that is said
MAX_EXPONENT = 20.0  # of a ratio: far beyond any bound, and its square is finite


@dataclass(frozen=True)
class Distance:
    """How far apart both sides score the same tokens.

    Attributes:
        num_tokens: compared; mean, largest: of |pi - mu|, in nats; ess: of the ratios, as a share of 1.
    """

    num_tokens: int
    mean: float
    largest: float
    ess: float

    @staticmethod
    def of(difference: Tensor) -> Distance:
        """Of pi - mu of some tokens, [n] float, n > 0."""
        values = difference.double().cpu()
        ratio = values.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
        return Distance(
            num_tokens=len(values),
            mean=float(values.abs().mean()),
            largest=float(values.abs().max()),
            ess=float(ratio.sum() ** 2 / (len(values) * (ratio**2).sum())),
        )

    def faults(self, limits: AgreementLimits) -> list[str]:
        """What is beyond its bound, with the key of the bound; a value that is NaN is."""
        found: list[str] = []
        if not self.mean <= limits.mean_log_ratio:
            found.append(
                f"mean |pi - mu| = {self.mean:.3g} (agreement.mean_log_ratio allows {limits.mean_log_ratio:g})"
            )
        if not self.largest <= limits.max_log_ratio:
            found.append(
                f"max |pi - mu| = {self.largest:.3g} (agreement.max_log_ratio allows {limits.max_log_ratio:g})"
            )
        if not self.ess >= limits.min_ess:
            found.append(
                f"effective sample size {self.ess:.3f} (agreement.min_ess allows {limits.min_ess:g} and more)"
            )
        return found

    def record(self) -> dict[str, float]:
        """For the step's row."""
        return {
            "tokens": self.num_tokens,
            "mean_log_ratio": self.mean,
            "max_log_ratio": self.largest,
            "ess": self.ess,
        }

    def __str__(self) -> str:
        return (
            f"mean |pi - mu| {self.mean:.2g}, max {self.largest:.2g}, effective sample size {self.ess:.4f} over "
            f"{self.num_tokens} tokens at lag 0"
        )


def witnesses(batch: TrainBatch, consumed: int) -> np.ndarray:
    """bool [Q]: trajectories all of whose tokens were sampled by the weights of step `consumed`.

    A trajectory that saw a push is none: its last tokens may have read keys of older weights.
    """
    return np.array(
        [
            bool(trajectory.spans) and all(span.version.step == consumed for span in trajectory.spans)
            for trajectory in batch.trajectories
        ],
        bool,
    )


@dataclass
class StartCheck:
    """The check of one run, or of one resumption of it.

    Args:
        limits: the bounds; numerics: what both sides compute with, for the error.
    """

    limits: AgreementLimits
    numerics: str
    _seen: list[Tensor] = field(default_factory=list[Tensor])
    _num_seen: int = 0
    _num_batches: int = 0

    @property
    def done(self) -> bool:
        """Enough has been seen."""
        return self._num_seen >= MIN_TOKENS

    @property
    def warning(self) -> str:
        """That the check is still open after PATIENCE batches, told at that batch only; else ""."""
        if self.done or self._num_batches != PATIENCE:
            return ""
        return (
            f"the learner and the generators have not been compared yet: after {PATIENCE} batches {self._num_seen} of "
            f"{MIN_TOKENS} tokens were at lag 0. Training goes on; run `headway selfcheck` on the recipe. "
            f"{self.numerics}"
        )

    def differences(self, row: LossRow, scores: Tensor, chosen: np.ndarray) -> None:
        """Take one row's log-probs in: scores [T], of the learner. chosen: bool [Q], the witnesses."""
        mask = torch.from_numpy(chosen[row.row.sequence]).to(scores.device)
        self._seen.append((scores.double() - row.behaviour.double())[mask].cpu())

    def judge(self, step: int) -> Distance | None:
        """The distance over all that was seen so far; None if that is nothing.

        Args:
            step: of the weights that scored.

        Raises:
            TrainingStopped: it is beyond a bound.
        """
        self._num_batches += 1
        seen = torch.cat(self._seen) if self._seen else torch.zeros(0)
        if not len(seen):
            return None
        self._seen, self._num_seen = [seen], len(seen)
        distance = Distance.of(seen)
        faults = distance.faults(self.limits)
        if faults:
            raise TrainingStopped(
                f"at equal weights the learner and the generator disagree before anything is trained: "
                f"{'; '.join(faults)}; over {distance.num_tokens} tokens at lag 0 (step {step}). {self.numerics}. "
                "Log-probs that are shifted, raw instead of processed, of another temperature, dtype or head look "
                "like this; run `headway selfcheck` on the recipe, or raise the bound if you know why"
            )
        assert math.isfinite(distance.mean), "NaN is beyond every bound"
        return distance
