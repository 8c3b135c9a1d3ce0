"""head_logp and head_loss_step against fp64 autograd written on its own."""

from __future__ import annotations

import torch

from headway_kernels.head import head_loss_step
from headway_kernels.objective import Objective


def test_gradients_of_plain_cispo_match_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(17, 8, generator=generator)
    weight = torch.randn(33, 8, generator=generator)
    target = torch.randint(0, 33, (17,), generator=generator)
    advantage = torch.randn(17, generator=generator)
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax(x64 @ w64.T / 0.7, 1).gather(1, target[:, None])[:, 0]
    behaviour = (logp.detach() + 0.5 * torch.randn(17, generator=generator)).float()
    ratio = (logp.detach() - behaviour).exp().clamp(max=1.2)
    loss = -(ratio * advantage * logp).sum() / 17
    loss.backward()
    weight_grad = torch.ones(33, 8)
    out = head_loss_step(
        x, weight, target,
        inv_temperature=torch.full((17,), 1 / 0.7), behaviour=behaviour, advantage=advantage,
        token_weight=torch.full((17,), 1 / 17), segments=None, objective=Objective(cap=1.2),
        weight_grad=weight_grad, chunk_bytes=33 * 4 * 5,
    )  # fmt: skip
    assert x64.grad is not None
    assert w64.grad is not None
    torch.testing.assert_close(out.loss, loss.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(out.x_grad.double(), x64.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weight_grad.double() - 1, w64.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.logp.double(), logp.detach(), rtol=1e-5, atol=1e-6)
