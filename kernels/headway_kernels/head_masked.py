"""The head over a kept set: tokens that were sampled with top-k, top-p or min-p, scored under the same truncation.

Each row t has the ids that its sampler kept, ids[offsets[t] : offsets[t + 1]], as vLLM and SGLang return them. Its
log-prob is over these alone, as its sampling was: scored over the whole vocabulary, the ratio to the generator would
be off by the log of the kept mass at every token. Only the kept rows of the weight are gathered, in the forward and
for both gradients. The chain of a row is head.py's; the set is held fixed, so no gradient goes through which ids were
kept.

Legend: T rows (loss tokens), H hidden, V vocabulary, K kept ids of all rows.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from headway_kernels import registry
from headway_kernels.errors import ShapeError
from headway_kernels.head_results import CHUNK_BYTES, HeadLogp, HeadLoss, check_gradients, check_head
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import check_policy_inputs
from headway_kernels.tracing import traceable

__all__ = ["HeadLogp", "HeadLoss", "head_masked", "head_masked_loss_step"]


def _ops() -> ModuleType:
    from headway_kernels import head_ops

    return head_ops


@traceable(_ops)
def head_masked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    backend: str = "auto",
) -> HeadLogp:
    """Log-prob of the targets, logsumexp and entropy over each row's kept ids; no gradient.

    Args:
        x, weight, target, inv_temperature, bias, softcap, logit_scale: as in head.head_logp.
        offsets: int64 [T + 1], rising from 0 to K. ids: int64 [K] in [0, V), distinct within a row, in any order,
            the row's target among them.
        chunk_bytes: budget of the gathered rows of the weight; one row's set is always taken whole.
        backend: "auto" | "triton" | "cuda" | "cpu" | "reference".

    Raises:
        ShapeError: as in head_logp; offsets that do not cover ids; a row whose ids repeat or lack its target (the
            last two are found on the CPU only: elsewhere they would wait for the device).
        UnsupportedOption, BackendUnavailable: see registry.choose.
    """
    arguments = dict(locals())
    del arguments["backend"]
    check_head(x, weight, target, inv_temperature, bias, softcap)
    check_kept(target, offsets, ids, weight.shape[0])
    return registry.run("head_masked", backend, arguments)


@traceable(_ops)
def head_masked_loss_step(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *,
    inv_temperature: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    segments: Tensor | None,
    objective: Objective,
    reference: Tensor | None = None,
    proximal: Tensor | None = None,
    m2_limit: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    want_entropy: bool = True,
    backend: str = "auto",
) -> HeadLoss:
    """head.head_loss_step over each row's kept ids.

    Args:
        offsets, ids, chunk_bytes: as in head_masked. The rest: as in head.head_loss_step; behaviour, reference and
            proximal log-probs are over the same kept sets.

    Returns:
        HeadLoss. weight_grad is touched in the kept rows only.

    Raises:
        As head_masked and head.head_loss_step.
    """
    arguments = dict(locals())
    del arguments["backend"]
    check_policy_inputs(arguments, num_tokens=x.shape[0])
    check_head(x, weight, target, inv_temperature, bias, softcap)
    check_kept(target, offsets, ids, weight.shape[0])
    check_gradients(weight, bias, weight_grad, bias_grad)
    return registry.run("head_masked_loss_step", backend, arguments)


def check_kept(target: Tensor, offsets: Tensor, ids: Tensor, vocabulary: int) -> None:
    """Refuses kept sets that no sampler has.

    Raises:
        ShapeError: see head_masked.
    """
    rows = target.shape[0]
    if offsets.shape != (rows + 1,) or offsets.dtype != torch.int64:
        raise ShapeError(
            f"offsets must be int64 [T + 1] = [{rows + 1}], got {offsets.dtype} {list(offsets.shape)}"
        )
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ShapeError(f"ids must be int64 [K], got {ids.dtype} {list(ids.shape)}")
    if ids.device.type != "cpu":
        return
    counts = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != ids.shape[0] or bool((counts < 0).any()):
        raise ShapeError(f"offsets must rise from 0 to K = {ids.shape[0]}, got {offsets[:8].tolist()}...")
    if ids.shape[0] and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise ShapeError(f"ids must be in [0, {vocabulary}), got {int(ids.min())} to {int(ids.max())}")
    row = torch.repeat_interleave(counts)
    if bool((row * vocabulary + ids).sort().values.diff().eq(0).any()):
        raise ShapeError("the ids of a row must be distinct: a repeated id would count twice")
    hits = torch.zeros(rows, dtype=torch.int64).index_add_(0, row, (ids == target[row]).to(torch.int64))
    if rows and int(hits.min()) == 0:
        index = int(hits.argmin())
        raise ShapeError(
            f"row {index}: target {int(target[index])} is not among its kept ids: it was sampled from them"
        )
