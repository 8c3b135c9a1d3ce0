"""The check on the first batch: at equal weights both sides must have scored its tokens alike."""

from __future__ import annotations

from headway.algo import PolicyStats
from headway.errors import TrainingStopped

MAX_LOG_RATIO = 0.05  # both sides compute in fp32 with the same op: 1e-5 is usual


def check_agreement(stats: PolicyStats, max_lag: int) -> None:
    """Refuse to train when the learner and the generator disagree on tokens that the same weights sampled.

    Args:
        stats: of the first batch; max_lag: largest lag in it. Lagging tokens may differ, so nothing is said then.

    Raises:
        TrainingStopped: |pi - mu| of a token exceeds MAX_LOG_RATIO.
    """
    if max_lag > 0 or stats.num_tokens == 0 or stats.log_ratio_max <= MAX_LOG_RATIO:
        return
    raise TrainingStopped(
        f"at equal weights the learner and the generator disagree: max |pi - mu| = {stats.log_ratio_max:.3g}, at most "
        f"{MAX_LOG_RATIO} is sound, effective sample size {stats.ess:.2f}. Log-probs that are shifted, of another "
        "temperature, or of other weights look like this; run `headway selfcheck` on the recipe"
    )
