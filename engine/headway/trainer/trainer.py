"""The learning step: rows through the backbone, the fused head, one backward, one update.

    hidden = backbone(row)                       # a common prefix once; segments never see each other
    loss, d_hidden = head_loss_step(hidden ...)  # gradients formed in the forward, no [T, V] tensor kept
    hidden.backward(d_hidden); clip; optimizer

Called by the learner's main loop and by headway.serial. Nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor

from headway.algo import (
    HeadLoss,
    PolicyStats,
    Recipe,
    head_logp,
    head_loss_step,
    head_masked,
    head_masked_loss_step,
    scored_inputs,
    step_m2_limit,
)
from headway.buffer import Group
from headway.config import RunConfig
from headway.errors import NumericsError, TrainingStopped
from headway.model import Policy
from headway.trainer.batch import LossRow, TrainBatch, prepare
from headway.trainer.optimizer import FlatOptimizer, FlatState
from headway.trainer.schedule import learning_rate
from headway.trainer.start_check import Distance, StartCheck, witnesses

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepStats:
    """What one learning step did.

    Attributes:
        loss: as the optimizer saw it; grad_norm: global, before clipping; lr: of this update.
        skipped: no update was made (a value was not finite, or nothing carried loss).
        policy: the loss's statistics over the batch; batch: what was trained.
        start_check: how far both sides were apart before this step; None once that is settled, or where nothing could
            be compared. warning: that this has gone on for long; "" if not.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    policy: PolicyStats
    batch: TrainBatch
    start_check: Distance | None = None
    warning: str = ""

    @property
    def notes(self) -> list[str]:
        """What a run says of the check, for people."""
        agreed = "" if self.start_check is None else f"both sides agree: {self.start_check}"
        return [line for line in (agreed, self.warning) if line]


class TrainerState(msgspec.Struct, frozen=True):
    """What a trainer's next step depends on, besides weights and moments.

    Attributes:
        lr: peak learning rate in force; num_updates: made by the optimizer; skipped_in_a_row: steps without one.
    """

    lr: float
    num_updates: int
    skipped_in_a_row: int


class Trainer:
    """One policy, its optimizer and its objective.

    Args:
        policy: loaded with_grad; reference: frozen, when the objective needs one.
        config: the whole recipe; recipe: the objective with its defaults filled in.
        start_check: compares both sides on the first batches; None: that is not wanted, as in a replay.

    Attributes:
        lr: peak learning rate; recipe: the objective; both may be changed between two steps.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        recipe: Recipe,
        reference: Policy | None,
        start_check: StartCheck | None = None,
    ) -> None:
        self.policy = policy
        self.lr = config.learner.lr
        self._config = config
        self.recipe = recipe
        self._reference = reference
        self._optimizer = FlatOptimizer(policy, config.learner)
        self._skipped_in_a_row = 0
        self._start_check = start_check

    def step(self, groups: Sequence[Group], step: int) -> StepStats:
        """Train on `groups`; `step` (from 1) is the number of this update.

        Raises:
            TrainingStopped: learner.max_skipped steps in a row had a value that is not finite, or both sides
                disagree at the start (see StartCheck); nothing is changed then.
        """
        batch = prepare(
            groups, self._config.batch, self.recipe, self._config.sampling.max_new_tokens, consumed=step - 1
        ).to(self.policy.device)
        distance, warning = self._check_start(batch, step - 1)
        lr = learning_rate(self._config.learner, step, self._config.steps, peak=self.lr)
        loss, policy, fault = 0.0, PolicyStats.zero(self.policy.device), ""
        try:
            m2_limit = self._m2_limit(batch)
            for row in batch.rows:
                result = self._train_row(row, m2_limit)
                loss, policy = loss + float(result.loss), policy + result.stats
            policy.check()
        except NumericsError as error:
            fault = str(error)
        fault = fault or _nothing_to_train(policy)
        if fault:
            self._clear_gradient()
            grad_norm, skipped = float("nan"), True
        else:
            update = self._optimizer.update(lr)
            grad_norm, skipped = update.grad_norm, update.skipped
            fault = "the gradient is not finite" if skipped else ""
        self._note_skip(fault, step, batch)
        return StepStats(loss, grad_norm, lr, skipped, policy, batch, distance, warning)

    def copy_state(self, target: FlatState) -> TrainerState:
        """Copy weights and moments into `target`; returns the rest. Between two steps only."""
        return TrainerState(self.lr, self._optimizer.copy_state(target), self._skipped_in_a_row)

    def restore(self, state: TrainerState, source: FlatState) -> None:
        """Go on from what copy_state gave."""
        self.lr, self._skipped_in_a_row = state.lr, state.skipped_in_a_row
        self._optimizer.restore(source, state.num_updates)

    def _check_start(self, batch: TrainBatch, consumed: int) -> tuple[Distance | None, str]:
        """Score the batch's tokens at lag 0 once more, until enough of them agreed; and what to warn of."""
        check = self._start_check
        if check is None or check.done:
            return None, ""
        chosen = witnesses(batch, consumed)
        for row in batch.rows:
            if chosen[row.row.sequence].any():
                scores = score_row(self.policy, row, self._config.learner.head_chunk_mib << 20)
                check.differences(row, scores, chosen)
        return check.judge(consumed), check.warning

    def _train_row(self, row: LossRow, m2_limit: Tensor | None) -> HeadLoss:
        hidden = _hidden(self.policy, row)
        head, chunk_bytes = self.policy.head, self._config.learner.head_chunk_mib << 20
        head_rows, weight, bias = head.operands(hidden.detach()[row.hidden_index])
        advantage, proximal = row.advantage, None
        if self.recipe.reads_scores:
            logp = _score(head_rows, self.policy, row, chunk_bytes)
            advantage, proximal = scored_inputs(self.recipe, logp, row.tokens)
        result = _loss_of(row, self.policy)(
            head_rows,
            weight,
            row.target,
            inv_temperature=row.inv_temperature,
            behaviour=row.behaviour,
            advantage=advantage,
            proximal=proximal,
            m2_limit=m2_limit,
            token_weight=row.token_weight,
            segments=row.segments,
            objective=self.recipe.objective,
            reference=self._reference_logp(row),
            bias=bias,
            softcap=head.softcap,
            logit_scale=head.scale,
            weight_grad=head.weight.grad,
            bias_grad=None if head.bias is None else head.bias.grad,
            chunk_bytes=chunk_bytes,
        )
        # A shared prompt position feeds several head rows: their gradients are added in the rows' order.
        x_grad = result.x_grad.to(hidden.dtype)
        hidden.backward(torch.zeros_like(hidden).index_add_(0, row.hidden_index, x_grad))
        return result

    def _m2_limit(self, batch: TrainBatch) -> Tensor | None:
        """Over several rows a pass of its own comes first; of a single row the loss finds it by itself."""
        if not self.recipe.objective.needs_m2_limit or len(batch.rows) < 2:
            return None
        chunk_bytes = self._config.learner.head_chunk_mib << 20
        rows = [(score_row(self.policy, row, chunk_bytes), row.tokens) for row in batch.rows]
        return step_m2_limit(self.recipe, rows)

    def _reference_logp(self, row: LossRow) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return score_row(self._reference, row, self._config.learner.head_chunk_mib << 20)

    def _clear_gradient(self) -> None:
        assert self.policy.grad is not None
        self.policy.grad.zero_()

    def _note_skip(self, fault: str, step: int, batch: TrainBatch) -> None:
        if not fault:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        ids = ", ".join(trajectory.trajectory_id for trajectory in batch.trajectories)
        _log.warning("step %d makes no update: %s; trajectories: %s", step, fault, ids)
        if self._skipped_in_a_row >= self._config.learner.max_skipped:
            raise TrainingStopped(
                f"{self._skipped_in_a_row} steps in a row made no update (learner.max_skipped): {fault}; "
                f"trajectories of the last: {ids}"
            )


def score_row(policy: Policy, row: LossRow, chunk_bytes: int) -> Tensor:
    """Log-probs fp32 [T] of a row's targets under `policy`, each at its trajectory's temperature. No gradient."""
    with torch.no_grad():
        return _score(_hidden(policy, row)[row.hidden_index], policy, row, chunk_bytes)


def _hidden(policy: Policy, row: LossRow) -> Tensor:
    return policy.backbone(row.token_ids, row.position_ids, policy.context(row.row))


def _loss_of(row: LossRow, policy: Policy) -> Callable[..., HeadLoss]:
    """The fused head: over the whole vocabulary, or over what each token was sampled from."""
    if row.kept is None:
        return head_loss_step
    kept = row.kept.over(policy.vocab_size)
    return partial(head_masked_loss_step, offsets=kept.offsets, ids=kept.ids)


def _score(head_rows: Tensor, policy: Policy, row: LossRow, chunk_bytes: int) -> Tensor:
    head = policy.head
    x, weight, bias = head.operands(head_rows)
    score = head_logp
    if row.kept is not None:
        kept = row.kept.over(policy.vocab_size)
        score = partial(head_masked, offsets=kept.offsets, ids=kept.ids)
    return score(
        x,
        weight,
        row.target,
        inv_temperature=row.inv_temperature,
        bias=bias,
        softcap=head.softcap,
        logit_scale=head.scale,
        chunk_bytes=chunk_bytes,
    ).logp


def _nothing_to_train(policy: PolicyStats) -> str:
    """Why a batch gives no update; "" if it does."""
    if policy.num_tokens == 0:
        return "no token of the batch carries loss"
    if policy.total("rejected") == policy.num_tokens:
        return (
            f"every token of the batch is rejected, at a mean weight of {policy.weight_mean:.3g} and |pi - mu| up to "
            f"{policy.log_ratio_max:.3g}: widen the bounds (docs/objectives.md), or lower staleness.max_lag"
        )
    return ""
