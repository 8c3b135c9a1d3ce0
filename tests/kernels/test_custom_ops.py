"""The custom ops under torch.library.opcheck, on meta tensors, and inside a compiled module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headway_kernels import head_ops, policy_ops  # registers the ops
from headway_kernels.errors import UnsupportedOption
from headway_kernels.head import VocabShard, head_logp, head_loss_step
from headway_kernels.head_masked import head_masked, head_masked_loss_step
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import policy_loss
from headway_kernels.segment_scan import segment_scan

T, V, H = 5, 9, 4
OBJECTIVE = Objective("gspo", entropy_coef=0.1)


def inputs(device: str = "cpu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    logp = normal(T) - 3
    return {
        "x": normal(T, H), "weight": normal(V, H), "bias": normal(V), "target": torch.arange(T, device=device),
        "offsets": torch.arange(0, 2 * T + 1, 2, device=device),
        "ids": torch.stack((torch.arange(T), torch.arange(T) + 3), 1).flatten().to(device),
        "ones": torch.ones(T, device=device), "logp": logp, "behaviour": logp + 0.1 * normal(T),
        "advantage": normal(T), "segments": torch.tensor([0, 2, T], device=device),
        "weight_grad": torch.zeros(V, H, device=device), "bias_grad": torch.zeros(V, device=device),
    }  # fmt: skip


def arguments() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each op with the flat arguments of its schema."""
    d, text = inputs(), OBJECTIVE.to_text()
    rows = (d["behaviour"], d["advantage"], d["ones"], d["segments"], None, None, None, d["bias"])
    grads = (d["weight_grad"], d["bias_grad"], text, 3.0, 0.5, 64, True, "auto")
    kept = (d["x"], d["weight"], d["target"], d["offsets"], d["ids"], d["ones"])
    yield "head_logp", (d["x"], d["weight"], d["target"], d["ones"], d["bias"], 3.0, None, 64, "auto")
    yield "head_loss_step", (d["x"], d["weight"], d["target"], d["ones"], *rows, *grads)
    without = Objective().to_text()
    yield (
        "head_loss_step",
        (
            d["x"], d["weight"], d["target"], d["ones"], *rows[:-1], None, None, None, without, None, None, 64,
            False, "auto",
        ),
    )  # fmt: skip
    yield "head_masked", (*kept, d["bias"], None, 2.0, 64, "auto")
    yield "head_masked_loss_step", (*kept, *rows, *grads)
    yield (
        "policy_loss",
        (
            d["logp"], d["behaviour"], d["advantage"], d["ones"], d["segments"], None, None, d["ones"], None,
            text, 0, "auto",
        ),
    )  # fmt: skip
    scan = (d["advantage"], d["segments"], d["ones"])
    yield "segment_scan", ("gae", *scan, None, None, None, 0.9, 0.9, 1.0, 1.0, "auto")


@pytest.mark.parametrize("index", range(7))
def test_opcheck(index: int) -> None:
    """Schema (mutation, aliasing), fake implementation, autograd registration, tracing with dynamic shapes."""
    name, flat = list(arguments())[index]
    torch.library.opcheck(getattr(torch.ops.headway, name).default, flat)


class Step(torch.nn.Module):
    """Every op of the learning step, as a module that embeds them would call them."""

    def forward(self, d: dict[str, Tensor]) -> tuple[Tensor, ...]:
        rows = {"inv_temperature": d["ones"], "bias": d["bias"]}
        kept = (d["x"], d["weight"], d["target"], d["offsets"], d["ids"])
        logp = head_logp(torch.tanh(d["x"]), d["weight"], d["target"], **rows).logp
        scores = head_masked(*kept, **rows)
        scan = segment_scan("gae", d["advantage"], d["segments"], values=logp, gamma=0.9, lam=0.8)
        loss = policy_loss(
            logp, d["behaviour"], scan.advantage * 2, d["ones"], objective=OBJECTIVE, segments=d["segments"],
            entropy=scores.entropy,
        )  # fmt: skip
        steps = [
            step(
                *(kept if step is head_masked_loss_step else kept[:3]), behaviour=d["behaviour"],
                advantage=scan.advantage, token_weight=d["ones"], segments=d["segments"], objective=OBJECTIVE,
                weight_grad=d["weight_grad"], bias_grad=d["bias_grad"], **rows,
            )
            for step in (head_loss_step, head_masked_loss_step)
        ]  # fmt: skip
        assert steps[0].entropy is not None
        return (
            logp, scores.logp, *scan, loss.loss, loss.coefficient * 3, loss.stats.sums, steps[0].loss,
            steps[0].x_grad + steps[1].x_grad, steps[0].entropy, steps[1].stats.peaks,
        )  # fmt: skip


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, of itself
def test_a_compiled_module_computes_what_the_module_does(compiler: str) -> None:
    """One graph without a break; gradients reach the given buffers."""
    plain, traced = inputs(), inputs()
    want = Step()(plain)
    got = torch.compile(Step(), fullgraph=True, backend=compiler)(traced)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(traced["weight_grad"], plain["weight_grad"])
    assert traced["weight_grad"].any()


def test_meta_tensors_have_the_shapes_and_dtypes_of_real_ones() -> None:
    for mine, theirs in zip(Step()(inputs("meta")), Step()(inputs()), strict=True):
        assert mine.is_meta
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def test_outputs_that_are_views_of_one_tensor_are_cloned() -> None:
    """A back-end may return such views; a custom op must not."""
    both = torch.arange(6.0).view(2, 3)
    first, second, empty, other = policy_ops.apart(both[0], both[1], torch.empty(0), torch.empty(0))
    assert first.data_ptr() == both.data_ptr()
    assert second.untyped_storage().data_ptr() != both.untyped_storage().data_ptr()
    assert torch.equal(second, both[1])
    assert empty.numel() == other.numel() == 0


def test_a_shard_cannot_be_traced() -> None:
    d = inputs("meta")
    with pytest.raises(UnsupportedOption, match="shard"):
        head_logp(d["x"], d["weight"], d["target"], inv_temperature=d["ones"], shard=VocabShard(0, V))
    assert head_ops.LossTensors is not None
    assert policy_ops.stats_like(d["x"])[0].is_meta
