"""head_logp and head_masked in Triton against fp64, and their promise that a row's bits are its own.

Legend: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_oracle import HEADS, Problem, make_problem, oracle_rows

from headway_kernels.errors import UnsupportedOption
from headway_kernels.head import HeadLogp, head_logp
from headway_kernels.head_masked import head_masked
from headway_kernels.head_shard import VocabShard
from headway_kernels.triton import head_logp as kernels


def run(problem: Problem, rows: slice = slice(None), **options: Any) -> HeadLogp:
    return head_logp(
        problem.x[rows], problem.weight, problem.target[rows], inv_temperature=problem.inv_temperature[rows],
        backend="triton", **(problem.head() | options),
    )  # fmt: skip


def assert_exact(out: HeadLogp, problem: Problem) -> None:
    """|error| <= 1e-5 max(1, |z|max), the bound of the fp32 claim."""
    logp, entropy = (rows.detach() for rows in oracle_rows(problem))
    logits = problem.x.double() @ problem.weight.double().T
    bound = 1e-5 * max(1.0, float(logits.abs().max()))
    assert float((out.logp - logp).abs().max()) <= bound
    assert float((out.entropy - entropy).abs().max()) <= bound


# 1: one column; around a tile of 128 and a span of 1024; two spans and a bit.
@pytest.mark.parametrize("V", [1, 7, 127, 128, 129, 257, 1023, 1025, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_vocabulary_with_the_target_at_either_end(V: int, dtype: torch.dtype) -> None:
    """A3, A8: real logits near -60, where padding at 0 would take all the mass; fp32 accuracy from bf16 inputs."""
    problem = make_problem(T=9, V=V, H=8, dtype=dtype)
    problem.bias = torch.full((V,), -60.0)
    problem.inv_temperature = problem.inv_temperature.float()
    problem.target[0], problem.target[1] = 0, V - 1
    assert_exact(run(problem), problem)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("dtype", "H"), [(torch.float32, 65), (torch.float16, 256), (torch.bfloat16, 1)], ids=str
)
def test_any_head_and_width(head: str, dtype: torch.dtype, H: int) -> None:
    """H = 65 has no aligned rows: pointers; H = 256 has: tensor descriptors over several depths."""
    problem = make_problem(T=9, V=150, H=H, head=head, dtype=dtype)
    problem.inv_temperature = problem.inv_temperature.float()
    assert kernels.takes_descriptors(problem.x) == (H == 256)
    assert_exact(run(problem), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """A14: 140 rows are two tiles of bf16 and three of fp32."""
    problem = make_problem(T=140, V=1100, H=64, dtype=dtype)
    problem.inv_temperature = problem.inv_temperature.float()
    whole = run(problem)
    for rows in (slice(0, 1), slice(139, 140), slice(60, 70), slice(13, 140)):
        for part, full in zip(run(problem, rows), whole, strict=True):
            assert torch.equal(part, full[rows])


def test_peaked_logits_keep_their_digits() -> None:
    """One logit 80 above the rest, in both directions of the target."""
    problem = make_problem(T=9, V=300, H=8)
    problem.bias = torch.zeros(300)
    problem.bias[77] = 80.0
    problem.target[:4] = 77
    assert_exact(run(problem), problem)


@pytest.mark.parametrize("c", [1.0, 30.0])
def test_the_softcap_comes_before_padding(c: float) -> None:
    """A4: capped padding would have a logit of 0 among real ones near -c."""
    problem = make_problem(T=9, V=129, H=8)
    problem.bias, problem.softcap = torch.full((129,), -4 * c), c
    assert_exact(run(problem), problem)


def test_weights_may_lie_beyond_2_to_the_31_elements() -> None:
    """Offsets are int64 by pointers and by descriptors; the pages between the rows are never touched."""
    problem = make_problem(T=9, V=3, H=8)
    want = run(problem)
    for stride in (2**30 + 8, 2**30 + 9):  # the third row starts at 2^31 elements and some
        far = torch.empty(2 * stride + 8).as_strided((3, 8), (stride, 1))
        far.copy_(problem.weight)
        assert kernels.takes_descriptors(far) == (stride % 4 == 0)
        problem.weight = far
        for mine, theirs in zip(run(problem), want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


class _Whole(VocabShard):
    """The second of two ranks, where the first is played by its recorded parts."""

    def check(self, num_local: int) -> None:
        del num_local


def test_a_part_of_the_vocabulary_reports_its_own_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(T=9, V=300, H=8)
    problem.target[:3] = torch.tensor([0, 199, 299])
    sent: list[tuple[torch.Tensor, ...]] = []

    def record(self: VocabShard, *parts: torch.Tensor) -> Any:
        sent.append(parts)
        raise StopIteration

    monkeypatch.setattr(VocabShard, "merge", record)
    whole = problem.weight
    for low, high in ((0, 200), (200, 300)):
        problem.weight = whole[low:high]
        with pytest.raises(StopIteration):
            run(problem, shard=_Whole(low, 300))
    picked = torch.stack([parts[3] for parts in sent])
    assert torch.isfinite(picked).sum(0).eq(1).all()
    logits = problem.x.double() @ whole.double().T
    torch.testing.assert_close(
        picked.amax(0).double(), logits.gather(1, problem.target[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    total = sum(parts[1] * parts[0].double().exp() for parts in sent)
    torch.testing.assert_close(torch.as_tensor(total).log(), logits.logsumexp(1), rtol=1e-5, atol=1e-5)


def test_fp64_is_refused_not_rounded() -> None:
    problem = make_problem(T=6)
    problem.x, problem.weight = problem.x.double(), problem.weight.double()
    with pytest.raises(UnsupportedOption, match="float64"):
        run(problem)


# 1 and 20: a greedy token and a common top-k; 33: past a block of 32; 60: the whole vocabulary.
@pytest.mark.parametrize("head", ["plain", "all"])
@pytest.mark.parametrize(("dtype", "H"), [(torch.float32, 8), (torch.bfloat16, 130)], ids=str)
def test_kept_sets_score_as_if_the_vocabulary_ended_there(head: str, dtype: torch.dtype, H: int) -> None:
    problem = make_problem(T=9, V=60, H=H, head=head, dtype=dtype)
    problem.inv_temperature = problem.inv_temperature.float()
    generator = torch.Generator().manual_seed(3)
    rows = []
    for row, size in enumerate((1, 20, 33, 60, 2, 32, 5, 7, 31)):
        others = torch.randperm(60, generator=generator)
        others = others[others != problem.target[row]][: size - 1]
        chosen = torch.cat((others, problem.target[row : row + 1]))
        rows.append(chosen[torch.randperm(size, generator=generator)])
    offsets = torch.tensor([0, *torch.tensor([len(ids) for ids in rows]).cumsum(0).tolist()])
    out = head_masked(
        problem.x, problem.weight, problem.target, offsets, torch.cat(rows), backend="triton",
        inv_temperature=problem.inv_temperature, **problem.head(),
    )  # fmt: skip
    for row, ids in enumerate(rows):
        part = make_problem(T=9, V=60, H=H, head=head, dtype=dtype)
        part.x, part.weight = problem.x[row : row + 1], problem.weight[ids]
        part.bias = None if problem.bias is None else problem.bias[ids]
        part.target = (ids == problem.target[row]).nonzero()[0]
        part.inv_temperature = problem.inv_temperature[row : row + 1]
        assert_exact(HeadLogp(*(scores[row : row + 1] for scores in out)), part)
    alone = head_masked(
        problem.x[2:3], problem.weight, problem.target[2:3], offsets[2:4] - offsets[2], rows[2], backend="triton",
        inv_temperature=problem.inv_temperature[2:3], **problem.head(),
    )  # fmt: skip
    assert all(torch.equal(one, scores[2:3]) for one, scores in zip(alone, out, strict=True))
