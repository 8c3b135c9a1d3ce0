"""Training adapters: the steps of the usual form y = W x + (alpha / r) B A x, and a base that never moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.buffer import Group
from headway.config import LearnerConfig
from headway.learner.setup import load_reference
from headway.model import Lora, load_policy
from headway.trainer import FlatOptimizer, FlatState

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
LENGTHS = [(4, 9), (6, 5)]


def test_updates_are_those_of_adamw_over_the_factors_of_the_usual_form(folder: Path) -> None:
    """Float64 AdamW over A and B with their own gradients; headway stores (alpha / r) B."""
    config = LearnerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.7, beta1=0.8, beta2=0.95, eps=1e-3)
    policy = load_policy(folder, with_grad=True, lora=Lora(RANK, ALPHA, seed=1))
    optimizer = FlatOptimizer(policy, config)
    stored = {name: p for name, p in policy.module.named_parameters() if ".lora_" in name}
    usual = {
        name: p.detach().double().clone().requires_grad_() for name, p in stored.items()
    }  # B begins at zero
    adamw = torch.optim.AdamW(usual.values(), betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, lr=1e-2)
    draw = torch.Generator().manual_seed(0)
    for step in range(6):
        outer = 10.0 ** (step - 3)  # below and above the clip
        for name, parameter in stored.items():
            by_product = outer * torch.randn(parameter.shape, generator=draw)  # by what is stored
            assert parameter.grad is not None
            parameter.grad.copy_(by_product)
            usual[name].grad = by_product.double() * (SCALE if "lora_B" in name else 1.0)
        norm = torch.nn.utils.clip_grad_norm_(usual.values(), 0.7)
        adamw.step()
        assert optimizer.update(1e-2).grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, parameter in stored.items():
        expected = usual[name].detach() * (SCALE if "lora_B" in name else 1.0)
        assert (parameter - expected).abs().max() <= 1e-5, name
        assert parameter.abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_moves_the_adapters_alone_and_goes_on_from_a_copy_bit_for_bit(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], dtype: str
) -> None:
    changes: dict[str, Any] = {
        "push": {"dtype": dtype}, "model": {"lora": {"rank": RANK, "alpha": ALPHA}}, "learner": {"lr": 1e-2},
    }  # fmt: skip
    batches = [groups_of(LENGTHS, seed=seed, drift=0.1) for seed in range(4)]
    each, other = bench(**changes), bench(**changes)
    frozen = {n: p.detach().clone() for n, p in each.policy.module.named_parameters() if ".lora_" not in n}
    assert len(frozen) == 20
    start = each.policy.flat.clone()
    for step, batch in enumerate(batches[:2], 1):
        assert not each.trainer.step(batch, step).skipped
    copied = FlatState.empty(each.policy.manifest.num_elements)
    state = each.trainer.copy_state(copied)
    other.trainer.restore(state, copied)
    for step, batch in enumerate(batches[2:], 3):
        for trainer in (each, other):
            assert not trainer.trainer.step(batch, step).skipped
    assert torch.equal(each.policy.flat, other.policy.flat)
    for name, parameter in each.policy.module.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    moved = (each.policy.flat - start) != 0
    for spec in each.policy.manifest.tensors:
        assert moved[spec.offset : spec.offset + spec.size].any(), spec.name


def test_the_reference_is_the_policy_without_its_adapters(
    bench: Callable[..., Any], folder: Path, groups_of: Callable[..., list[Group]]
) -> None:
    """KL to it is that to a policy loaded on its own; the policy that is trained keeps its adapters."""
    changes: dict[str, Any] = {"model": {"lora": {"rank": RANK}}, "algo": {"kl": "k3", "kl_coef": 0.5}}
    groups = groups_of(LENGTHS, drift=0.1)
    found: list[tuple[float, torch.Tensor]] = []
    for shared in (True, False):
        each = bench(**changes)
        reference = (
            load_reference(each.config, each.policy, print)
            if shared
            else load_policy(folder, with_grad=False)
        )
        assert (reference.module is each.policy.module) == shared
        each.trainer._reference = reference
        with torch.no_grad():
            each.policy.flat.add_(
                0.05 * torch.randn(each.policy.flat.shape, generator=torch.Generator().manual_seed(1))
            )
        found.append((each.trainer.step(groups, 1).policy.kl_reference, each.policy.flat.clone()))
    assert found[0][0] == found[1][0] > 0.0
    assert torch.equal(found[0][1], found[1][1])
