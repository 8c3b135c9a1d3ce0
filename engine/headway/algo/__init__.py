"""What turns rewards and masks into the numbers of the loss, and the loss itself.

The layers above take the fused head and its types from here; headway_kernels stays behind this door.
"""

from headway.algo.advantages import (
    AdvantageMode,
    Advantages,
    clean_reward,
    group_advantages,
    judge_group,
)
from headway.algo.denominators import Denominator, StepTotals, count_totals, token_weights
from headway.algo.objectives import Recipe, resolve_recipe
from headway.algo.scored import TokenInputs, scored_inputs, step_m2_limit
from headway_kernels.head import HeadLogp, HeadLoss, head_logp, head_loss_step
from headway_kernels.head_masked import head_masked, head_masked_loss_step
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss, policy_loss
from headway_kernels.policy_stats import PolicyStats

__all__ = [
    "AdvantageMode",
    "Advantages",
    "Denominator",
    "HeadLogp",
    "HeadLoss",
    "Objective",
    "PolicyLoss",
    "PolicyStats",
    "Recipe",
    "StepTotals",
    "TokenInputs",
    "clean_reward",
    "count_totals",
    "group_advantages",
    "head_logp",
    "head_loss_step",
    "head_masked",
    "head_masked_loss_step",
    "judge_group",
    "policy_loss",
    "resolve_recipe",
    "scored_inputs",
    "step_m2_limit",
    "token_weights",
]
