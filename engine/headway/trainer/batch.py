"""From groups to what the learning step computes with: rows, and per loss token its inputs to the loss.

Legend: N tokens of a row, T head rows of a row (one per trajectory and loss token), Q trajectories of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.algo import Recipe, StepTotals, TokenInputs, group_advantages, token_weights
from headway.buffer import Group
from headway.config import BatchConfig
from headway.packing import PackGroup, Packing, Row, pack
from headway.trainer.kept import KeptRows, KeptTable
from headway.types import Trajectory


@dataclass(frozen=True)
class LossRow:
    """One row with the loss's inputs, as tensors.

    Attributes:
        row: token ids, positions and the forest; token_ids, position_ids: int64 [N].
        hidden_index, target: int64 [T]; segments: int64 offsets of the trajectories over T.
        behaviour, advantage, token_weight, inv_temperature: fp32 [T].
        lag: fp32 [T], in optimizer steps; None unless the recipe reads it.
        kept: what each token was sampled from; None: all of the vocabulary, for every one.
    """

    row: Row
    token_ids: Tensor
    position_ids: Tensor
    hidden_index: Tensor
    target: Tensor
    segments: Tensor
    behaviour: Tensor
    advantage: Tensor
    token_weight: Tensor
    inv_temperature: Tensor
    lag: Tensor | None = None
    kept: KeptRows | None = None

    @property
    def tokens(self) -> TokenInputs:
        """What the loss reads besides log-probs."""
        return TokenInputs(self.behaviour, self.advantage, self.token_weight, self.segments, self.lag)

    def to(self, device: torch.device) -> LossRow:
        """The same with its tensors on a device."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | KeptRows)
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class TrainBatch:
    """What one optimizer step trains on.

    Attributes:
        trajectories: [Q], in the order of the packing's numbers.
        rows: never empty unless nothing carries loss; num_loss_tokens: over all rows.
        num_forwarded: tokens forwarded; num_unshared: without prefix sharing.
    """

    trajectories: list[Trajectory]
    rows: list[LossRow]
    num_loss_tokens: int
    num_forwarded: int
    num_unshared: int

    def to(self, device: torch.device) -> TrainBatch:
        """The same with its rows' tensors on a device; itself on the CPU, where they are made."""
        if device.type == "cpu":
            return self
        return dataclasses.replace(self, rows=[row.to(device) for row in self.rows])


def prepare(
    groups: Sequence[Group], batch: BatchConfig, recipe: Recipe, max_new_tokens: int, consumed: int = 0
) -> TrainBatch:
    """Advantages, packing and token weights of a batch; groups in any order.

    Trajectories without a reward carry no loss.

    Args:
        consumed: step of the weights that train on it; read where the recipe reads lags.
    """
    ordered = sorted(groups, key=lambda group: group.ticket.ticket_id)
    pack_groups = [PackGroup(group.ticket.ticket_id, group.trajectories) for group in ordered]
    packing = pack(pack_groups, batch.tokens_per_row, batch.share_prefix)
    trajectories = [trajectory for group in ordered for trajectory in group.trajectories]
    rewards = np.array([np.nan if t.reward is None else t.reward for t in trajectories], np.float64)
    advantages = group_advantages(rewards, [t.ticket_id for t in trajectories], mode=recipe.advantage)
    rows = _loss_rows(packing, trajectories, advantages.values, advantages.trained, recipe, max_new_tokens)
    if recipe.reads_lag:
        rows = _with_lags(rows, trajectories, consumed)
    if any(trajectory.kept is not None for trajectory in trajectories):
        table = KeptTable(trajectories)
        rows = [dataclasses.replace(row, kept=table.rows(row.row)) for row in rows]
    num_loss_tokens = sum(int((row.token_weight != 0).sum()) for row in rows)
    return TrainBatch(trajectories, rows, num_loss_tokens, packing.num_forwarded, packing.num_unshared)


def _loss_rows(
    packing: Packing,
    trajectories: list[Trajectory],
    advantages: NDArray[np.float64],
    trained: NDArray[np.bool_],
    recipe: Recipe,
    max_new_tokens: int,
) -> list[LossRow]:
    lengths = np.array([t.num_tokens for t in trajectories], np.int64)
    first = np.cumsum(lengths) - lengths
    logprobs = np.concatenate([t.logprobs for t in trajectories]) if trajectories else np.zeros(0, np.float32)
    inv_temperature = np.array([1.0 / t.temperature for t in trajectories], np.float32)
    masks = [trained[row.sequence] for row in packing.rows]
    totals = StepTotals(
        num_tokens=sum(int(mask.sum()) for mask in masks),
        num_sequences=sum(int(trained[row.segment_sequence].sum()) for row in packing.rows),
    )
    rows: list[LossRow] = []
    for row, mask in zip(packing.rows, masks, strict=True):
        weights = token_weights(
            mask, row.segment_offsets, totals, denominator=recipe.denominator, max_new_tokens=max_new_tokens
        )
        rows.append(
            LossRow(
                row=row,
                token_ids=torch.from_numpy(row.token_ids),
                position_ids=torch.from_numpy(row.position_ids),
                hidden_index=torch.from_numpy(row.hidden_index),
                target=torch.from_numpy(row.target),
                segments=torch.from_numpy(row.segment_offsets),
                behaviour=torch.from_numpy(logprobs[first[row.sequence] + row.token]),
                advantage=torch.from_numpy(advantages[row.sequence].astype(np.float32)),
                token_weight=torch.from_numpy(weights.astype(np.float32)),
                inv_temperature=torch.from_numpy(inv_temperature[row.sequence]),
            )
        )
    return rows


def _with_lags(rows: list[LossRow], trajectories: list[Trajectory], consumed: int) -> list[LossRow]:
    lengths = np.array([t.num_tokens for t in trajectories], np.int64)
    first = np.cumsum(lengths) - lengths
    lags = np.zeros(int(lengths.sum()), np.float32)
    for start, trajectory in zip(first, trajectories, strict=True):
        lags[start + trajectory.prompt_length : start + trajectory.num_tokens] = trajectory.token_lags(
            consumed
        )
    return [
        dataclasses.replace(row, lag=torch.from_numpy(lags[first[row.row.sequence] + row.row.token]))
        for row in rows
    ]
