"""head_masked and its loss step against fp64 autograd over the kept ids, and against the dense head.

Legend: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import policy_oracle as oracle
import pytest
import torch
from policy_oracle import CORRECTED, OBJECTIVES, Tokens, label
from torch import Tensor

from headway_kernels.errors import NumericsError, ShapeError
from headway_kernels.head import head_logp, head_loss_step
from headway_kernels.head_masked import head_masked, head_masked_loss_step
from headway_kernels.head_results import HeadLoss
from headway_kernels.objective import Objective

T, V, H = 23, 61, 8


@dataclasses.dataclass
class Kept:
    """A step over kept sets of 1 to 20 ids; head: bias, softcap and logit scale."""

    x: Tensor
    weight: Tensor
    target: Tensor
    offsets: Tensor
    ids: Tensor
    inv_temperature: Tensor
    tokens: Tokens
    head: dict[str, Any]

    def rows(self) -> list[Tensor]:
        return [self.ids[low:high] for low, high in itertools.pairwise(self.offsets.tolist())]


def make(*, plain: bool = False, dtype: torch.dtype = torch.float32, full: bool = False) -> Kept:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight = normal(T, H).to(dtype), normal(V, H).to(dtype)
    sizes = [V if full else 1 + t % 20 for t in range(T)]
    ids = [torch.randperm(V, generator=generator)[:size] for size in sizes]
    target = torch.stack([row[len(row) // 2] for row in ids])
    weights = torch.rand(T, generator=generator) / T
    weights[1::4] = 0.0
    head = {} if plain else {"bias": normal(V).to(dtype), "softcap": 2.0, "logit_scale": 0.7}
    kept = Kept(
        x, weight, target, torch.tensor([0, *itertools.accumulate(sizes)]), torch.cat(ids),
        torch.rand(T, generator=generator) + 0.5,
        Tokens(normal(T), normal(T), weights, torch.tensor([0, 4, 4, 11, T]), normal(T), normal(T)), head,
    )  # fmt: skip
    logp = oracle_rows(kept, leaves(kept))[0].detach().float()
    for name in ("behaviour", "reference", "proximal"):
        setattr(kept.tokens, name, (logp + 0.3 * normal(T)).clamp(max=-0.01))
    return kept


def leaves(kept: Kept) -> tuple[Tensor, ...]:
    bias = kept.head.get("bias", torch.zeros(V))
    return tuple(tensor.detach().double().requires_grad_() for tensor in (kept.x, kept.weight, bias))


def oracle_rows(kept: Kept, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy, row by row: log_softmax of the kept logits alone."""
    x, weight, bias = inputs
    logits = (x @ weight.T + bias) * kept.head.get("logit_scale", 1.0)
    if "softcap" in kept.head:
        logits = kept.head["softcap"] * torch.tanh(logits / kept.head["softcap"])
    logits = logits * kept.inv_temperature.double()[:, None]
    logps, entropies = [], []
    for index, row in enumerate(kept.rows()):
        log_probs = torch.log_softmax(logits[index, row], 0)
        logps.append(log_probs[(row == kept.target[index]).nonzero()[0, 0]])
        entropies.append(-(log_probs.exp() * log_probs).sum())
    return torch.stack(logps), torch.stack(entropies)


def run(kept: Kept, objective: Objective, **options: Any) -> tuple[HeadLoss, Tensor, Tensor | None]:
    grad = torch.zeros(V, H, dtype=torch.promote_types(kept.x.dtype, torch.float32))
    bias_grad = None if "bias" not in kept.head else torch.zeros_like(grad[:, 0])
    tokens = kept.tokens
    out = head_masked_loss_step(
        kept.x, kept.weight, kept.target, kept.offsets, kept.ids, inv_temperature=kept.inv_temperature,
        behaviour=tokens.behaviour, advantage=tokens.advantage, token_weight=tokens.token_weight,
        segments=tokens.segments, objective=objective, reference=tokens.reference, weight_grad=grad,
        bias_grad=bias_grad, **kept.head, **options,
    )  # fmt: skip
    return out, grad, bias_grad


@pytest.mark.parametrize("options", [*OBJECTIVES, *CORRECTED[::5]], ids=label)
def test_loss_and_gradients_are_those_of_autograd_over_the_kept_ids(options: dict[str, Any]) -> None:
    fields = dict(options)
    use_proximal = fields.pop("proximal", False)
    for plain, (kl, entropy_coef) in itertools.product((False, True), (("none", 0.05), ("k3", 0.0))):
        kept = make(plain=plain)
        proximal = kept.tokens.proximal
        extra: dict[str, Any] = {"proximal": proximal} if use_proximal else {}
        kept.tokens.proximal = proximal if use_proximal else None
        objective = Objective(
            **fields, kl=kl, kl_coef=0.1 if kl != "none" else 0.0, entropy_coef=entropy_coef
        )
        x, weight, bias = leaves(kept)
        loss = oracle.policy_loss(objective, *oracle_rows(kept, (x, weight, bias)), kept.tokens)
        loss.backward()
        for budget in (1, 1 << 20):  # a row at a time, and all at once
            out, grad, bias_grad = run(kept, objective, chunk_bytes=budget, **extra)
            assert float(out.loss) == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
            for got, want in ((out.x_grad, x.grad), (grad, weight.grad), (bias_grad, bias.grad)):
                if got is not None:
                    assert want is not None
                    assert float((got.double() - want).abs().max()) <= 1e-5 * float(want.abs().max())
            assert not out.x_grad[kept.tokens.token_weight == 0].any()


def test_scores_are_of_the_kept_set_and_a_frozen_policy_has_a_ratio_of_one() -> None:
    """Over the whole vocabulary the log-prob would be off by the log of the kept mass, at every token."""
    kept = make()
    logp, entropy = (tensor.detach() for tensor in oracle_rows(kept, leaves(kept)))
    out = head_masked(
        kept.x,
        kept.weight,
        kept.target,
        kept.offsets,
        kept.ids,
        inv_temperature=kept.inv_temperature,
        **kept.head,
    )
    torch.testing.assert_close(out.logp.double(), logp, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    dense = head_logp(kept.x, kept.weight, kept.target, inv_temperature=kept.inv_temperature, **kept.head)
    assert float((out.logp - dense.logp).min()) > 0.5
    kept.tokens.behaviour = out.logp
    step = run(kept, Objective("grpo"))[0]
    assert (step.stats.ratio_mean, step.stats.ratio_max, step.stats.clip_share) == (1.0, 1.0, 0.0)
    assert torch.equal(step.logp, out.logp)


def test_keeping_everything_is_the_dense_head() -> None:
    kept = make(full=True)
    objective = Objective("grpo", entropy_coef=0.02)
    out, grad, bias_grad = run(kept, objective)
    tokens, dense_grad = kept.tokens, torch.zeros(V, H)
    dense_bias_grad = torch.zeros(V)
    dense = head_loss_step(
        kept.x, kept.weight, kept.target, inv_temperature=kept.inv_temperature, behaviour=tokens.behaviour,
        advantage=tokens.advantage, token_weight=tokens.token_weight, segments=None, objective=objective,
        reference=tokens.reference, weight_grad=dense_grad, bias_grad=dense_bias_grad, **kept.head,
    )  # fmt: skip
    torch.testing.assert_close(out.loss, dense.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(out.x_grad, dense.x_grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(grad, dense_grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(bias_grad, dense_bias_grad, rtol=1e-4, atol=1e-7)


def test_bf16_inputs_keep_fp32_log_probs() -> None:
    kept = make(dtype=torch.bfloat16)
    logp = oracle_rows(kept, leaves(kept))[0].detach()
    out = run(kept, Objective())[0]
    assert out.x_grad.dtype is torch.bfloat16
    torch.testing.assert_close(out.logp.double(), logp, rtol=1e-5, atol=1e-5)


def test_a_token_alone_in_its_set_is_certain_and_has_no_gradient() -> None:
    kept = make()
    out, _, _ = run(kept, Objective("grpo"))
    assert int(kept.offsets[21] - kept.offsets[20]) == 1
    assert (float(out.logp[20]), float(out.x_grad[20].abs().max())) == (0.0, 0.0)


def test_masked_rows_reach_nothing_and_others_are_named() -> None:
    kept = make()
    clean = run(kept, Objective())
    kept.x[5], kept.tokens.behaviour[9] = math.nan, math.inf
    dirty = run(kept, Objective())
    assert torch.equal(clean[0].x_grad, dirty[0].x_grad)
    assert torch.equal(clean[1], dirty[1])
    kept.x[6] = math.nan
    with pytest.raises(NumericsError, match="token 6 "):
        run(kept, Objective())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offsets": torch.arange(T)}, r"\[T \+ 1\]"),
        ({"offsets": torch.zeros(T + 1, dtype=torch.int64)}, "rise from 0 to K"),
        ({"ids": torch.zeros(5)}, "int64"),
        ({"ids": "large"}, "must be in"),
        ({"ids": "twice"}, "distinct"),
        ({"target": "other"}, "row 3: target .* not among its kept ids"),
    ],
)
def test_kept_sets_that_no_sampler_has_are_refused(changes: dict[str, Any], words: str) -> None:
    kept = make()
    if changes == {"ids": "large"}:
        changes = {"ids": torch.where(kept.ids == kept.ids[0], V, kept.ids)}
    elif changes == {"ids": "twice"}:
        changes = {"ids": kept.ids.clone()}
        changes["ids"][kept.offsets[5]] = changes["ids"][kept.offsets[5] + 1]
    elif changes == {"target": "other"}:
        changes = {"target": kept.target.clone()}
        changes["target"][3] = next(i for i in range(V) if i not in kept.rows()[3])
    for name, value in changes.items():
        setattr(kept, name, value)
    with pytest.raises(ShapeError, match=words):
        head_masked(
            kept.x, kept.weight, kept.target, kept.offsets, kept.ids, inv_temperature=kept.inv_temperature
        )
