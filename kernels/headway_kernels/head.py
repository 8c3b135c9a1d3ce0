"""The language-model head: log-probs of given targets, and the policy loss with both gradients in one pass.

head_loss_step forms the gradients while the logits of a chunk are at hand: three matrix products (logits, dX,
dW) instead of the four of a head that recomputes its logits in the backward, and never a tensor of T x V
elements. head_masked.py has both for tokens that were sampled from a kept set.

Chain of a row, in this order: linear (with bias), logit scale, softcap, inverse temperature, log-softmax. With
z the chain's result, p = softmax(z), H its entropy, c = dL/dlogp and h = -dL/dH of a row:

    dL/dz = c (onehot - p) + h p (log p + H)

Legend: T rows (loss tokens), H hidden, V vocabulary, S segments.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from headway_kernels import registry
from headway_kernels.head_results import CHUNK_BYTES, HeadLogp, HeadLoss, check_gradients, check_head
from headway_kernels.head_shard import VocabShard
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import check_policy_inputs
from headway_kernels.tracing import traceable

__all__ = ["CHUNK_BYTES", "HeadLogp", "HeadLoss", "VocabShard", "head_logp", "head_loss_step"]


def _ops() -> ModuleType:
    from headway_kernels import head_ops

    return head_ops


@traceable(_ops)
def head_logp(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    shard: VocabShard | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    backend: str = "auto",
) -> HeadLogp:
    """Log-prob of the targets, logsumexp and entropy, streamed over chunks of rows; no gradient.

    Args:
        x: [T, H] float; weight: [V, H] of the same dtype; bias: [V].
        target: int64 [T] in [0, V). On an accelerator its range is the caller's to keep.
        inv_temperature: float [T], 1 / temperature of each row.
        softcap: c of c tanh(z / c); logit_scale: factor of the logits, before the softcap.
        shard: weight and bias are this rank's part of the vocabulary, target counts over all of it; every
            rank of the group calls with the same rows and gets the same result.
        chunk_bytes: budget of the logits held at once; at least one row is.
        backend: "auto" | "triton" | "cuda" | "cpu" | "reference".

    Returns:
        HeadLogp. Temperature is applied before the softmax: all three are of the tempered distribution.

    Raises:
        ShapeError: shapes, dtypes or a target out of range.
        UnsupportedOption, BackendUnavailable: see registry.choose.
    """
    arguments = dict(locals())
    del arguments["backend"]
    check_head(x, weight, target, inv_temperature, bias, softcap, shard)
    return registry.run("head_logp", backend, arguments)


@traceable(_ops)
def head_loss_step(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
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
    shard: VocabShard | None = None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    want_entropy: bool = True,
    backend: str = "auto",
) -> HeadLoss:
    """Loss, dL/dx, dL/dweight and statistics of the policy loss in one chunked pass; no autograd.

    Args:
        x ... logit_scale, shard, chunk_bytes, backend: as in head_logp.
        behaviour, advantage, token_weight, segments, reference, proximal, m2_limit: as in policy_loss. Chunks
            of segment-level objectives are unions of whole segments; what outgrows a chunk is computed twice.
        objective: the loss.
        weight_grad: float32 [V, H], dL/dweight is added to it; None: not computed. bias_grad: [V], likewise.
        want_entropy: compute the entropy though the objective has no entropy term.

    Returns:
        HeadLoss. Loss and gradients do not depend on chunk_bytes beyond fp32 rounding.

    Raises:
        ShapeError, UnsupportedOption, BackendUnavailable: as in head_logp and policy_loss.
        NumericsError: as in policy_loss; weight_grad and bias_grad are then unusable.
    """
    arguments = dict(locals())
    del arguments["backend"]
    check_policy_inputs(arguments, num_tokens=x.shape[0])
    check_head(x, weight, target, inv_temperature, bias, softcap, shard)
    check_gradients(weight, bias, weight_grad, bias_grad)
    return registry.run("head_loss_step", backend, arguments)
