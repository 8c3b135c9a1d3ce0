"""A head whose vocabulary is split over ranks: what the ranks exchange, four floats a row.

Each rank holds weight[start : start + V_r] and the same rows x. Of every row it knows the largest logit m, the sum
s of exp(z - m), the sum d of exp(z - m)(z - m), and the target's logit if it is in its part. One all-gather a chunk
brings the four together; every rank merges them in rank order, so all hold the same bits.

Blocks until every rank of the group has called; torch.distributed's timeout bounds the wait.

Legend: N rows, R ranks.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from headway_kernels.errors import BackendUnavailable, ShapeError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class VocabShard:
    """Which part of the vocabulary this rank holds.

    Attributes:
        start: id of the first row of this rank's weight. total: V over all ranks.
        group: a torch.distributed process group; None: the default group.
    """

    start: int
    total: int
    group: dist.ProcessGroup | None = None

    def check(self, num_local: int) -> None:
        """Refuse a part that the vocabulary does not have.

        Raises:
            ShapeError: [start, start + num_local) is not within [0, total).
            BackendUnavailable: torch.distributed is not initialised.
        """
        if self.start < 0 or self.start + num_local > self.total:
            raise ShapeError(
                f"the shard holds ids {self.start} to {self.start + num_local - 1} of {self.total}: not a part of it"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise BackendUnavailable(
                "a vocabulary-parallel head needs torch.distributed: call init_process_group before"
            )

    def merge(self, peak: Tensor, sums: Tensor, dots: Tensor, picked: Tensor) -> MergedRows:
        """The rows' values over the whole vocabulary.

        Args:
            peak: [N], largest local logit. sums, dots: float64 [N], relative to it.
            picked: [N], the target's logit; -inf where another rank holds it.

        Raises:
            ShapeError: no rank, or more than one, holds a row's target.
        """
        # Sums of at most V fp32 terms in [0, 1], exact to 6e-8 of themselves: as good as the logits are.
        packed_N4 = torch.stack((peak, sums.to(peak.dtype), dots.to(peak.dtype), picked), 1)
        parts = [torch.empty_like(packed_N4) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, packed_N4.contiguous(), group=self.group)
        parts_RN4 = torch.stack(parts)
        peaks_RN, targets_RN = parts_RN4[:, :, 0], parts_RN4[:, :, 3]
        if not bool((torch.isfinite(targets_RN) | targets_RN.isnan()).sum(0).eq(1).all()):
            raise ShapeError("every target must be in the part of exactly one rank: check the shards' starts")
        highest = peaks_RN.amax(0)
        shift_RN = (peaks_RN - highest).to(torch.float64)
        factor_RN = shift_RN.exp()
        sums_RN = parts_RN4[:, :, 1].to(torch.float64) * factor_RN
        dots_RN = parts_RN4[:, :, 2].to(torch.float64) * factor_RN + shift_RN * sums_RN
        total, dot = sums_RN[0], dots_RN[0]
        for rank in range(1, len(parts)):
            total, dot = total + sums_RN[rank], dot + dots_RN[rank]
        return MergedRows(highest, total, dot, targets_RN.amax(0))

    def smallest(self, count: int, device: torch.device) -> int:
        """The smallest of the ranks' counts: parts of different sizes must still cut the rows alike."""
        value = torch.tensor(count, device=device)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.group)
        return int(value)

    def sum_over_ranks(self, x_grad: Tensor) -> None:
        """Adds up every rank's part of dL/dx, in place."""
        dist.all_reduce(x_grad, group=self.group)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MergedRows:
    """As in VocabShard.merge, over the whole vocabulary: peak, picked [N]; sums, dots float64 [N]."""

    peak: Tensor
    sums: Tensor
    dots: Tensor
    picked: Tensor
