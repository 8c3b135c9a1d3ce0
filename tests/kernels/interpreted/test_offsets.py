"""Offsets beyond 2^31 elements in every kernel that can meet them; memory between what is used is never touched.

The kernels are launched themselves where the host code would write whole tensors. Tests of head_logp and score_rows
lie beside their others. Legend: T tokens or rows, V vocabulary, H hidden.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from headway_kernels.head_masked import head_masked
from headway_kernels.objective import Objective
from headway_kernels.triton.head_rows import gradient_rows, loss_rows
from headway_kernels.triton.launch import bounds_of, codes_of
from headway_kernels.triton.policy_loss import BLOCK, NUM_COUNTS, NUM_PEAKS, NUM_SUMS, policy_segments
from headway_kernels.triton.segment_scan import _split, scan_segments

FAR = 2**31 + 64


def far_rows(rows: torch.Tensor, stride: int = FAR) -> torch.Tensor:
    """The same rows, `stride` elements apart."""
    out = torch.empty((rows.shape[0] - 1) * stride + rows.shape[1], dtype=rows.dtype)
    apart = out.as_strided(rows.shape, (stride, 1))
    apart.copy_(rows)
    return apart


def far_column(values: torch.Tensor) -> torch.Tensor:
    """A column of which all but the last values lie before FAR."""
    out = torch.empty(FAR + values.shape[0], dtype=values.dtype)
    out[FAR:] = values
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_is_written_over_rows_of_logits_that_far_apart(dtype: torch.dtype) -> None:
    """In bf16 the gradient of a row lies in the upper half of the row's bytes: 2 stride elements a row."""
    V = 50
    logits = torch.stack((torch.arange(V) * 0.01, torch.arange(V) * -0.1))
    results = []
    for stride in (64, FAR):
        held = torch.empty(stride + 64).as_strided((2, 64), (stride, 1))
        held[:, :V] = logits
        flat = held.as_strided((stride + 64,), (1,)).view(dtype)
        if dtype is torch.bfloat16:
            # The row's own 64 columns: the second half of their bytes.
            gradient = flat.as_strided((2, 64), (2 * stride, 1), 64)
        else:
            gradient = held
        live = torch.zeros(2, dtype=torch.int8)
        probability = torch.softmax(logits, 1)
        peak, target = logits.amax(1), torch.tensor([3, 4])
        total = (logits - peak[:, None]).exp().sum(1)
        logp = probability.log().gather(1, target[:, None])[:, 0]
        gradient_rows[(2,)](
            held, gradient, stride, gradient.stride(0), V, None, target, torch.ones(2), 1.0, 1.0, 0,
            (peak, total, -torch.expm1(logp), logp, None), torch.tensor([2.0, -0.5]), None, live,
            HAS_SOFTCAP=False, BLOCK=64,
        )  # fmt: skip
        results.append(gradient[:, :V].float().clone())
    onehot = torch.nn.functional.one_hot(target, V)
    want = torch.tensor([[2.0], [-0.5]]) * (onehot - probability)
    unit = 1e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(results[1], want, rtol=unit, atol=1e-7)
    assert torch.equal(results[0], results[1])


def test_the_fused_row_kernel_reads_and_writes_rows_that_far_apart() -> None:
    V, objective = 50, Objective()
    logits, target, one = (
        torch.stack((torch.arange(V) * 0.01, torch.arange(V) * -0.1)),
        torch.tensor([3, 4]),
        torch.ones(2),
    )
    held = far_rows(torch.nn.functional.pad(logits, (0, 14)))
    logp, live = torch.zeros(2), torch.zeros(2, dtype=torch.int8)
    exact = torch.log_softmax(logits.double(), 1)
    behaviour = exact.gather(1, target[:, None])[:, 0].float()
    loss_rows[(2,)](
        held, held, FAR, FAR, V, None, target, one, 1.0, 1.0, (behaviour, one, one, None, None), None,
        bounds_of(objective), logp, None, live, HAS_SOFTCAP=False, ENTROPY_TERM=False, BLOCK=64, **codes_of(objective),
    )  # fmt: skip
    torch.testing.assert_close(logp, behaviour, rtol=1e-5, atol=1e-6)
    want = exact.exp() - torch.nn.functional.one_hot(target, V)  # r = 1, A = 1: c = -1
    torch.testing.assert_close(held[:, :V].double(), want, rtol=1e-5, atol=1e-7)


def test_kept_rows_of_the_weight_and_rows_of_x_may_lie_that_far_apart() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 8, generator=generator), torch.randn(3, 8, generator=generator)
    offsets, ids, target = torch.tensor([0, 2, 4]), torch.tensor([0, 2, 1, 2]), torch.tensor([2, 1])
    near, far = (
        head_masked(*sides, target, offsets, ids, inv_temperature=torch.ones(2), backend="triton")
        for sides in ((x, weight), (far_rows(x), far_rows(weight, FAR // 2)))
    )
    assert all(torch.equal(one, other) for one, other in itertools.zip_longest(near, far))


def test_a_segment_of_tokens_may_lie_that_far_in() -> None:
    generator = torch.Generator().manual_seed(2)
    objective = Objective("gspo")
    columns = [0.1 * torch.randn(20, generator=generator) - 1 for _ in range(3)]
    results = []
    for place in (lambda column: column, far_column):
        tokens = tuple(place(column) for column in (*columns, torch.full((20,), 0.05)))
        end = tokens[0].shape[0]
        coefficient = place(torch.zeros(20))
        partials = (
            torch.zeros(1, NUM_SUMS),
            torch.zeros(1, NUM_PEAKS),
            torch.zeros(1, NUM_COUNTS, dtype=torch.int32),
        )
        policy_segments[(1,)](
            (*tokens, None, None, None), torch.tensor([end - 20, end]), None, coefficient, partials,
            bounds_of(objective), RATIO_LEVEL=int(objective.ratio_level), RHO_LEVEL=int(objective.rho_level),
            BLOCK=BLOCK, **codes_of(objective),
        )  # fmt: skip
        results.append((coefficient[-20:].clone(), partials[0]))
    assert results[0][0].abs().min() > 0
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_segment_of_a_scan_may_lie_that_far_in() -> None:
    rewards = torch.arange(20.0)
    results = []
    for place in (lambda column: column, far_column):
        column, advantage, target = place(rewards), place(torch.zeros(20)), place(torch.zeros(20))
        end = column.shape[0]
        scan_segments[(1,)](
            column, None, None, None, None, torch.tensor([end - 20, end]), advantage, target,
            _split(0.9, 1.0, 1.0, 1.0), KIND="return", B=16,
        )  # fmt: skip
        results.append(target[-20:].clone())
    want = torch.zeros(21, dtype=torch.float64)
    for i in reversed(range(20)):
        want[i] = rewards[i] + 0.9 * want[i + 1]
    torch.testing.assert_close(results[1].double(), want[:20], rtol=1e-6, atol=0)
    assert torch.equal(results[0], results[1])
