"""At equal weights both sides must score a token alike: checked on every batch whose tokens all have lag 0.

What looks exactly like staleness shows here and nowhere else: log-probs that are shifted, another temperature, or
pushes that never reach what the generators compute with, so that the distance grows with every step.
"""

from __future__ import annotations

import logging

from headway.algo import PolicyStats
from headway.errors import TrainingStopped

MAX_APART = 3
_log = logging.getLogger(__name__)


class Agreement:
    """Over a run: the first batch at lag 0 must agree, later ones may not disagree MAX_APART times in a row.

    Args:
        max_log_ratio: largest |pi - mu| of a token that is sound.
    """

    def __init__(self, max_log_ratio: float) -> None:
        self._max_log_ratio = max_log_ratio
        self._agreed = False
        self._num_apart = 0

    def check(self, stats: PolicyStats, max_lag: int, step: int) -> None:
        """Look at one batch.

        Args:
            stats: of the batch; max_lag: largest lag in it. Lagging tokens may differ, so nothing is said then.
            step: of the weights that trained on it.

        Raises:
            TrainingStopped: |pi - mu| of a token exceeds the bound.
        """
        if max_lag > 0 or stats.num_tokens == 0:
            return
        if stats.log_ratio_max <= self._max_log_ratio:
            self._agreed, self._num_apart = True, 0
            return
        self._num_apart += 1
        found = (
            f"at equal weights the learner and the generator disagree: max |pi - mu| = {stats.log_ratio_max:.3g}, at "
            f"most {self._max_log_ratio:g} is sound (agreement.max_log_ratio), effective sample size "
            f"{stats.ess:.2f} (step {step}, {self._num_apart} such batches in a row)"
        )
        if self._agreed and self._num_apart < MAX_APART:
            _log.warning("%s", found)
            return
        cause = (
            "They agreed before: what is pushed does not reach what the generator computes with"
            if self._agreed
            else "Log-probs that are shifted, of another temperature, or of other weights look like this"
        )
        raise TrainingStopped(f"{found}. {cause}; run `headway selfcheck` on the recipe")
